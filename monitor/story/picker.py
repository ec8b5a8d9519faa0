"""Picking single rows out of what is replayed: the rows of some requests, or of some steps."""

from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.evidence import (
    EventBlock,
    Evidence,
    InputsBlock,
    MaskBlock,
    PayloadBlock,
    list_offsets,
    slice_steps,
)
from stagewatch.agents.identity import Identity, Rank, Sizes
from stagewatch.agents.record import U64, Kind
from stagewatch.monitor.checks.fields import digest_or_count, shown
from stagewatch.monitor.pieces import STEP_MAX
from stagewatch.monitor.story.records import Bound, Called, Fed, Freed, Masked, Sent

ROWS_MAX: Final = 400_000
"""Rows picked of one engine, all ranks together; what is beyond is counted and told."""

EngineKey = tuple[str, int]
"""Instance and replica."""


def number_of(identity: Identity) -> int:
    """A rank's number in engine order."""
    rank, sizes = identity.rank, identity.sizes
    return (rank.dp * sizes.pp + rank.pp) * sizes.tp + rank.tp


@dataclass(frozen=True, slots=True)
class Selection:
    """What is wanted. Empty ``requests`` stands for all; ``engine`` for one instance, empty for all."""

    requests: frozenset[int] = frozenset()
    first_step: int = 0
    last_step: int = STEP_MAX
    engine: str = ""
    dp: int | None = None
    calls: bool = False

    @property
    def narrows(self) -> bool:
        """Whether some steps or engines are left out."""
        return (self.first_step, self.last_step) != (0, STEP_MAX) or bool(self.engine)

    def takes(self, identity: Identity) -> bool:
        """Whether anything of a rank is wanted."""
        return self.engine in ("", identity.instance) and self.dp in (None, identity.rank.dp)


@dataclass(slots=True)
class Picked:
    """What was picked of one replica of an engine, each list in the order delivered."""

    instance: str
    dp: int
    sizes: Sizes
    ranks: set[int] = field(default_factory=set)
    """Numbers of the ranks that were heard."""
    fed: list[Fed] = field(default_factory=list)
    masked: list[Masked] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    bound: list[Bound] = field(default_factory=list)
    freed: list[Freed] = field(default_factory=list)
    called: list[Called] = field(default_factory=list)
    lost: int = 0
    """Records that some rank lost: overwritten or damaged."""
    beyond: int = 0
    """Rows left out beyond `ROWS_MAX`."""

    @property
    def authority(self) -> int:
        """Number of the last stage's last rank."""
        return (self.dp * self.sizes.pp + self.sizes.pp) * self.sizes.tp - 1

    def only(self, request: int) -> "Picked":
        """What was picked of one request."""
        kept: dict[str, Any] = {
            name: [row for row in getattr(self, name) if row.request == request]
            for name in ("fed", "masked", "sent", "bound", "freed")
        }
        return replace(self, called=[], **kept)


class Picker:
    """A tap that keeps the rows of a selection."""

    def __init__(self, selection: Selection) -> None:
        self.engines: Final[dict[EngineKey, Picked]] = {}
        self._selection = selection
        self._keys: U64 = np.array(sorted(selection.requests), np.uint64)
        self._waiting: dict[tuple[str, Rank], dict[int, list[tuple[int, int]]]] = {}
        """Per rank and step, (place in the batch, request) of rows picked whose mask is still to come."""

    def see(self, identity: Identity, evidence: Evidence) -> None:
        """Pick from one batch of a rank."""
        if not self._selection.takes(identity):
            return
        key = identity.instance, identity.rank.dp
        picked = self.engines.get(key)
        if picked is None:
            picked = self.engines[key] = Picked(*key, identity.sizes)
        rank = number_of(identity)
        picked.ranks.add(rank)
        picked.lost += evidence.lost
        if evidence.events is not None:
            self._events(picked, rank, evidence.events)
        waiting = self._waiting.setdefault((identity.instance, identity.rank), {})
        if evidence.inputs is not None:
            self._inputs(picked, rank, evidence.inputs, waiting)
        if evidence.mask is not None and waiting:
            self._mask(picked, rank, evidence.mask, waiting)
        for kind in ("sent", "received", "consumed"):
            block = getattr(evidence, kind)
            if block is not None:
                self._payload(picked, rank, kind, block)

    def _wanted(self, block: Any) -> Any | None:
        """The part of a block with the steps wanted; None if there are none."""
        first = int(np.searchsorted(block.step, self._selection.first_step))
        end = int(np.searchsorted(block.step, self._selection.last_step, side="right"))
        return slice_steps(block, first, end) if first < end else None

    def _rows(self, picked: Picked, request: U64) -> NDArray[np.intp]:
        rows = np.flatnonzero(np.isin(request, self._keys)) if len(self._keys) else np.arange(len(request))
        room = max(ROWS_MAX - len(picked.fed) - len(picked.sent), 0)
        picked.beyond += max(len(rows) - room, 0)
        return rows[:room]

    def _inputs(
        self, picked: Picked, rank: int, whole: InputsBlock, waiting: dict[int, list[tuple[int, int]]]
    ) -> None:
        block = self._wanted(whole)
        if block is None:
            return
        starts = list_offsets(block, "")
        for row in self._rows(picked, block.request).tolist():
            at = int(np.searchsorted(starts, row, side="right")) - 1
            step, request = int(block.step[at]), int(block.request[row])
            waiting.setdefault(step, []).append((row - int(starts[at]), request))
            picked.fed.append(
                Fed(
                    step,
                    rank,
                    request,
                    int(block.tick[at]),
                    int(block.slot[row]),
                    int(block.generation[row]),
                    bool(block.prefilling[row]),
                    int(block.prefill_len[row]),
                    int(block.cap[row]),
                    int(block.scheduled[row]),
                    int(block.draft_count[row]),
                    shown(block, row, "computed"),
                    shown(block, row, "mirror"),
                    shown(block, row, "position"),
                    f"{int(block.position_shape[row]):016x}",
                    shown(block, row, "last_digest"),
                    shown(block, row, "draft_digest") if block.draft_count[row] > 0 else "",
                    shown(block, row, "ids_digest"),
                    int(block.t_ns[at]),
                )
            )

    def _mask(
        self, picked: Picked, rank: int, block: MaskBlock, waiting: dict[int, list[tuple[int, int]]]
    ) -> None:
        starts = list_offsets(block, "")
        for at in np.flatnonzero(np.isin(block.step, np.array([*waiting], np.int64))).tolist():
            step = int(block.step[at])
            for place, request in waiting.pop(step):
                if place >= block.rows[at]:
                    continue  # another batch than the inputs said: nothing can be matched by place
                row = int(starts[at]) + place
                picked.masked.append(
                    Masked(step, rank, request, bool(block.engine[row]), bool(block.fixed[row]))
                )

    def _payload(self, picked: Picked, rank: int, kind: str, whole: PayloadBlock) -> None:
        # Consumed payloads ascend by the step that consumed them, not by the one that sent them.
        block: PayloadBlock | None = whole if kind == "consumed" else self._wanted(whole)
        if block is None:
            return
        starts = list_offsets(block, "")
        for row in self._rows(picked, block.request).tolist():
            at = int(np.searchsorted(starts, row, side="right")) - 1
            step = int(block.step[at])
            if not self._selection.first_step <= step <= self._selection.last_step:
                continue
            picked.sent.append(_sent(block, at, row, step, rank, kind))

    def _events(self, picked: Picked, rank: int, block: EventBlock) -> None:
        selection = self._selection
        wanted = np.isin(block.request, self._keys) if len(self._keys) else np.ones(len(block.seq), np.bool_)
        for at in np.flatnonzero(wanted & (block.kind == Kind.BIND)).tolist():
            picked.bound.append(
                Bound(
                    int(block.step[at]),
                    rank,
                    int(block.request[at]),
                    int(block.slot[at]),
                    int(block.generation[at]),
                    int(block.prompt_len[at]),
                    int(block.cap[at]),
                    block.text[at],
                )
            )
        for at in np.flatnonzero(wanted & (block.kind == Kind.FREE)).tolist():
            where = int(block.step[at]), rank, int(block.request[at]), int(block.slot[at])
            picked.freed.append(Freed(*where, int(block.generation[at])))
        if not selection.calls:
            return
        # A call belongs to the step that begins after it was recorded, or to that in which it was.
        near = (block.step >= selection.first_step - 1) & (block.step <= selection.last_step)
        for at in np.flatnonzero(near & (block.kind == Kind.COLLECTIVE)).tolist():
            picked.called.append(Called(int(block.step[at]), rank, block.text[at], int(block.numel[at])))


def _sent(block: PayloadBlock, at: int, row: int, step: int, rank: int, kind: str) -> Sent:
    sampled = max(int(block.num_sampled[row]), 0)
    return Sent(
        step,
        rank,
        int(block.request[row]),
        kind,
        int(block.at[at]),
        int(block.generation[row]),
        int(block.generation_now[row]),
        int(block.num_sampled[row]),
        int(block.num_rejected[row]),
        _tokens(block, at, row, "tokens", sampled) or digest_or_count(block, row, "tokens_digest"),
        _last(block, at, row, sampled),
        "" if not block.drafts[at] else (
            _tokens(block, at, row, "drafts", int(block.drafts[at])) or digest_or_count(block, row, "draft_digest")
        ),
        int(block.drafts[at]),
        bool(block.applied[row]),
        int(block.t_ns[at]),
    )  # fmt: skip


def _tokens(block: PayloadBlock, at: int, row: int, column: str, count: int) -> str:
    """A row's token values; empty where only their digest was recorded."""
    raw = getattr(block, f"raw_{column}")
    if not len(raw):
        return ""
    width = int((block.width if column == "tokens" else block.drafts)[at])
    first = int(list_offsets(block, f"raw_{column}")[at]) + (row - int(list_offsets(block, "")[at])) * width
    return str(raw[first : first + min(count, width)].tolist())


def _last(block: PayloadBlock, at: int, row: int, sampled: int) -> str:
    if not sampled:
        return ""
    tokens = _tokens(block, at, row, "tokens", sampled)
    return tokens.strip("[]").split(", ")[-1] if tokens else digest_or_count(block, row, "last_digest")
