"""Small stories told by hand: what a few ranks record of a few rows, and what the watch makes of it."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stagewatch.agents.digest import Digester
from stagewatch.agents.evidence import digest_records
from stagewatch.agents.identity import Fingerprint, Identity, Rank, Sizes
from stagewatch.agents.record import (
    UNKNOWN,
    Bind,
    Body,
    Collective,
    Inputs,
    Kind,
    Mask,
    Payload,
    Record,
    request_key,
)
from stagewatch.monitor.incidents import Incident
from stagewatch.monitor.watch import Watch

DIGESTER = Digester(b"\x05" * 16)
K = 2
S = 10**9


@dataclass(frozen=True)
class Row:
    """One row of a batch as one rank has it. By default a decoding row that verifies both of its drafts."""

    request: str = "a"
    slot: int = 0
    generation: int = 0
    computed: int = 10
    ahead: int = 0
    """How far the host's mirror leads the device's count."""
    prefill_len: int = 8
    cap: int = 100
    last: int = 30
    drafts: tuple[int, int] = (41, 42)
    draft_count: int = K
    ids: tuple[int, ...] | None = None
    """Tokens fed, where they are not the last one and its drafts."""
    chunk: int = 0
    """Prompt tokens of a prefill chunk; 0: a decoding row."""
    positions_from: int | None = None

    @property
    def fed(self) -> tuple[int, ...]:
        if self.ids is not None:
            return self.ids
        return (
            tuple(range(100, 100 + self.chunk))
            if self.chunk
            else (self.last, *self.drafts[: self.draft_count])
        )


def prefill(request: str = "a", chunk: int = 4, **fields: Any) -> Row:
    """A prefill chunk."""
    return Row(request, **{"computed": 0, "chunk": chunk, "draft_count": 0, **fields})


@dataclass(frozen=True)
class Sent:
    """One row of a payload."""

    tokens: tuple[int, int, int] = (51, 52, 53)
    num_sampled: int = 3
    num_rejected: int = 0
    drafts: tuple[int, int] = (61, 62)
    generation_now: int | None = None
    applied: bool = True


@dataclass
class Story:
    """Ranks of one pipeline, and what each has recorded so far."""

    pp: int = 3
    tp: int = 1
    seq: dict[int, int] = field(default_factory=dict)
    records: dict[int, list[Record]] = field(default_factory=dict)
    fingerprints: dict[int, tuple[Fingerprint, ...]] = field(default_factory=dict)
    bound: set[tuple[int, str, int, int]] = field(default_factory=set)
    step_now: int = 0
    tick: int = 0

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return tuple(Rank(0, pp, tp) for pp in range(self.pp) for tp in range(self.tp))

    @property
    def last(self) -> int:
        return self.pp * self.tp - 1

    def identity(self, index: int) -> Identity:
        sizes = Sizes(1, self.pp, self.tp)
        found = self.fingerprints.get(index, ())
        return Identity(
            "d", "i", self.ranks[index], sizes, "h", 0, "hand", "1", "lab", K, 1000, 500, 0, found
        )

    def record(self, index: int, kind: Kind, body: Body, step: int | None = None) -> None:
        seq = self.seq.get(index, 0)
        self.seq[index] = seq + 1
        at = self.step_now if step is None else step
        self.records.setdefault(index, []).append(Record(kind, seq, at, seq, body))

    def lose(self, index: int, count: int = 1) -> None:
        """The rank's ring overwrites the last records it made."""
        del self.records[index][-count:]

    def bind(self, request: str, slot: int = 0, generation: int = 0, only: int | None = None) -> None:
        for index in range(self.last + 1) if only is None else (only,):
            self.bound.add((index, request, slot, generation))
            self.record(index, Kind.BIND, Bind(slot, generation, 8, 100, request_key(request), request))

    def step(self, *rows: Row, ticks: int = 0, without: tuple[int, ...] = (), **ranks: Any) -> None:
        """Every rank prepares ``rows``, pp_size iterations after the last ones unless ``ticks`` says otherwise.

        ``r0=...`` gives rank 0 rows of its own, or fields to change in its first row.
        """
        self.tick += ticks or self.pp
        for index in range(self.last + 1):
            if index in without:
                continue
            own = ranks.get(f"r{index}", rows)
            if isinstance(own, dict):
                own = (replace(rows[0], **own), *rows[1:])
            for row in own:
                if (index, row.request, row.slot, row.generation) not in self.bound:
                    self.bind(row.request, row.slot, row.generation, only=index)
            scalars = ranks.get(f"scalars{index}", {})
            tick = ranks.get("tick", self.tick)
            self.record(index, Kind.INPUTS, _inputs(own, **{"tick": tick, **scalars}), self.step_now + 1)
        self.step_now += 1

    def masks(self, *engine: bool, fixed: tuple[bool, ...] | None = None, **ranks: Any) -> None:
        for index in range(self.last + 1):
            own = ranks.get(f"r{index}", engine)
            sound = engine if fixed is None else fixed
            columns = [np.array(mask if mask is not None else (), np.uint8) for mask in (own, sound)]
            if own is None:
                columns[0] = np.zeros(len(sound), np.uint8)
            self.record(index, Kind.MASK, Mask(int(own is None), int(not any(sound)), *columns))

    def broadcast(self, *rows: tuple[Row, Sent], **ranks: Any) -> None:
        """The last stage sends, the others receive; ``r0=...`` replaces fields of what rank 0 got of the first row."""
        for index in range(self.last + 1):
            self._payload(index, Kind.SENT if index > self.last - self.tp else Kind.RECEIVED, rows, ranks)

    def consume(self, sent_at: int, *rows: tuple[Row, Sent], **ranks: Any) -> None:
        """Earlier stages write what they received of step ``sent_at``, before the next step."""
        for index in range(self.last + 1 - self.tp):
            self._payload(index, Kind.CONSUMED, rows, ranks, sent_at)

    def _payload(
        self,
        index: int,
        kind: Kind,
        rows: tuple[tuple[Row, Sent], ...],
        ranks: Any,
        sent_at: int | None = None,
    ) -> None:
        changed = ranks.get(f"r{index}", {})
        pairs = [
            (row, replace(sent, **changed) if not place else sent) for place, (row, sent) in enumerate(rows)
        ]
        at = UNKNOWN if sent_at is None else self.step_now + 1
        self.record(index, kind, _payload(pairs, at), sent_at)

    def call(self, group: str = "pp_broadcast", numel: int = 8, op: str = "broadcast", **ranks: Any) -> None:
        """Every rank enters a call; ``r0=...`` is another size on rank 0, None: it does not enter."""
        for index in range(self.last + 1):
            size = ranks.get(f"r{index}", numel)
            if size is not None:
                self.record(index, Kind.COLLECTIVE, Collective(1, size, self.pp, f"{group} {op} int64"))

    def watch(self, *, finish: bool = True) -> Watch:
        watch = Watch()
        for index in range(self.last + 1):
            watch.hello(self.identity(index), S)
        for index, own in self.records.items():
            lost = self.seq[index] - len(own)
            identity = self.identity(index)
            watch.take("i", identity.rank, digest_records(own, identity, DIGESTER, lost=lost), -1.0, 2 * S)
        if finish:
            watch.finish()
        return watch

    def incidents(self) -> list[Incident]:
        return self.watch().incidents()

    def told(self) -> list[tuple[str, str, str, int, tuple[int, ...]]]:
        """(check, severity, request, first bad step, blamed) of every incident."""
        return [(i.check, i.severity.word, i.request, i.first_bad_step, i.blamed) for i in self.incidents()]


def _inputs(rows: tuple[Row, ...], **scalars: int) -> Inputs:
    def column(name: str) -> np.ndarray[Any, Any]:
        return np.array([getattr(row, name) for row in rows], np.int32)

    starts = [row.computed if row.positions_from is None else row.positions_from for row in rows]
    return Inputs(
        **{"tick": 0, "graph_mode": 0, "spec_tokens": K, "padded_tokens": 16, **scalars},
        request=np.array([request_key(row.request) for row in rows], np.uint64),
        slot=column("slot"),
        generation=column("generation"),
        mirror=column("computed") + column("ahead"),
        computed=column("computed"),
        prefill_len=column("prefill_len"),
        scheduled=np.array([len(row.fed) for row in rows], np.int32),
        draft_count=column("draft_count"),
        cap=column("cap"),
        last_sampled=column("last"),
        draft_tokens=np.array([row.drafts for row in rows], np.int32).reshape(-1, K),
        input_ids=np.array([token for row in rows for token in row.fed], np.int32),
        positions=np.array(
            [p + i for p, row in zip(starts, rows, strict=True) for i in range(len(row.fed))], np.int32
        ),
        prefilling=np.array([bool(row.chunk) for row in rows], np.uint8),
    )


def _payload(rows: list[tuple[Row, Sent]], at: int) -> Payload:
    def column(name: str) -> np.ndarray[Any, Any]:
        return np.array([getattr(sent, name) for _, sent in rows], np.int32)

    generation = np.array([row.generation for row, _ in rows], np.int32)
    now = [row.generation if sent.generation_now is None else sent.generation_now for row, sent in rows]
    return Payload(
        at,
        0,
        np.array([request_key(row.request) for row, _ in rows], np.uint64),
        np.array([row.slot for row, _ in rows], np.int32),
        generation,
        np.array(now, np.int32),
        column("num_sampled"),
        column("num_rejected"),
        column("tokens").reshape(-1, K + 1),
        column("drafts").reshape(-1, K),
        column("applied").astype(np.uint8),
    )
