"""Recorded JSONL traces: ``NAME.rankN.jsonl``, one file per rank, one JSON object per line.

The format is described in the field notes' README: ``inputs`` with the prepared rows; ``sent`` and ``drafts`` on
the last rank; ``received`` on the others. ``step`` counts prepared batches from 1. The highest rank number
is the last stage. Traces are raw; they are digested here with a key of this process, so that the same checks
run on them as on evidence from the wire.
"""

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.digest import Digester
from stagewatch.agents.errors import StagewatchError
from stagewatch.agents.evidence import Evidence, digest_records
from stagewatch.agents.identity import Identity, Rank, Sizes
from stagewatch.agents.mask import fixed_mask
from stagewatch.agents.record import UNKNOWN, Bind, Body, Inputs, Kind, Mask, Payload, Record, request_key

_NAME: Final = re.compile(r"(?P<name>.+)\.rank(?P<rank>\d+)\.jsonl")
_BATCH_RECORDS: Final = 4096
_GZIP: Final = b"\x1f\x8b"
RANKS_MAX: Final = 1024


class TraceError(StagewatchError):
    """A trace that cannot be used."""


class _Row(msgspec.Struct):
    req: str
    slot: int
    gen: int
    mirror: int
    computed: int
    prefill: int
    prefilling: bool
    sched: int
    ids: list[int]
    pos: list[int]
    last: list[int]
    drafts: list[int]
    cap: int = UNKNOWN


class _Inputs(msgspec.Struct, tag_field="kind", tag="inputs"):
    step: int
    rows: list[_Row]


class _Sent(msgspec.Struct, tag_field="kind", tag="sent"):
    step: int
    tokens: list[list[int]]
    num_sampled: list[int]
    num_rejected: list[int]
    mask: list[bool] | None = None


class _Drafts(msgspec.Struct, tag_field="kind", tag="drafts"):
    step: int
    drafts: list[list[int]]


class _Received(msgspec.Struct, tag_field="kind", tag="received"):
    step: int
    mask: list[bool] | None = None
    tokens: list[list[int]] | None = None
    num_sampled: list[int] | None = None
    num_rejected: list[int] | None = None
    drafts: list[list[int]] | None = None


_Line = _Inputs | _Sent | _Drafts | _Received
_decoder: Final = msgspec.json.Decoder(_Line)


class _AnyKind(msgspec.Struct):
    kind: str


_kind_decoder: Final = msgspec.json.Decoder(_AnyKind)
_KINDS: Final = frozenset({"inputs", "sent", "drafts", "received"})


@dataclass(frozen=True, slots=True)
class TraceFile:
    """One rank's file."""

    path: Path
    name: str
    rank: int


def trace_file(path: Path) -> TraceFile | None:
    """What a file's name says, or None if it is not named like a trace."""
    match = _NAME.fullmatch(path.name)
    return TraceFile(path, match["name"], int(match["rank"])) if match else None


def identities(files: Sequence[TraceFile]) -> dict[TraceFile, Identity]:
    """Identities of all ranks, by run. Raises TraceError if a run lacks a rank or has one twice.

    Files of one name in several directories are one run where each directory lacks ranks that another has, and
    runs of their own where each is whole.
    """
    found: dict[TraceFile, Identity] = {}
    names: dict[str, list[TraceFile]] = {}
    for file in files:
        names.setdefault(file.name, []).append(file)
    for name, same in names.items():
        runs = _runs(same)
        for run in runs:
            instance = name if len(runs) == 1 else f"{run[0].path.absolute().parent.name}/{name}"
            found |= _run_identities(instance, run)
    return found


def _runs(files: Sequence[TraceFile]) -> list[list[TraceFile]]:
    by_directory: dict[Path, list[TraceFile]] = {}
    for file in files:
        by_directory.setdefault(file.path.parent, []).append(file)
    groups = list(by_directory.values())
    if all({file.rank for file in group} == set(range(len(group))) and len(group) > 1 for group in groups):
        return groups
    return [list(files)]


def _run_identities(instance: str, files: Sequence[TraceFile]) -> dict[TraceFile, Identity]:
    name = files[0].name
    where = f"trace {files[0].path.parent / name}"
    count = max(file.rank for file in files) + 1
    if count > RANKS_MAX:
        raise TraceError(
            f"{where}: rank {count - 1} is beyond the most this build takes ({RANKS_MAX}): correct the file's name"
        )
    for rank in range(count):
        same = [str(file.path) for file in files if file.rank == rank]
        if not same:
            raise TraceError(f"{where}: rank {rank} is missing: give every {name}.rankN.jsonl of the run")
        if len(same) > 1:
            raise TraceError(f"{where}: rank {rank} comes twice, as {' and '.join(same)}: leave one out")
    if count == 1:
        raise TraceError(
            f"{where}: only rank 0, nothing to compare: give every {name}.rankN.jsonl of the run"
        )
    return {
        file: Identity(
            deployment="replay",
            instance=instance,
            rank=Rank(0, file.rank, 0),
            sizes=Sizes(1, count, 1),
            host="",
            pid=0,
            engine="trace",
            engine_version="",
            variant="",
            spec_tokens=UNKNOWN,
            vocab_size=0,
            max_model_len=0,
            started_ns=0,
        )
        for file in files
    }


@dataclass(slots=True)
class _Batch:
    """The rows of the step being read, which later lines of the step refer to."""

    request: NDArray[np.uint64]
    slot: NDArray[np.int32]
    generation: NDArray[np.int32]


class TraceReader:
    """Reads one rank's file as evidence, batch by batch. ``cut_off`` tells of a torn last line."""

    def __init__(self, file: TraceFile, identity: Identity, digester: Digester) -> None:
        self.file: Final = file
        self.identity: Final = identity
        self.cut_off = False
        self.unknown_lines = 0
        """Lines of a kind that this build does not know: left out."""
        self.bytes_read = 0
        self._digester = digester
        try:
            self.size_bytes = file.path.stat().st_size
        except OSError as error:
            raise TraceError(f"{file.path}: cannot be read: {error.strerror}") from None
        self._begin()

    def _begin(self) -> None:
        self.cut_off, self.unknown_lines, self.bytes_read = False, 0, 0
        self._batch: _Batch | None = None
        self._known: set[tuple[str, int, int]] = set()
        self._step = 0
        self._sent: _Sent | None = None

    def left_out(self) -> list[str]:
        """What of the file could not be used, once it was read."""
        told = [f"{self.file.path}: the last line is cut off and was left out"] if self.cut_off else []
        if self.unknown_lines:
            told.append(f"{self.file.path}: {self.unknown_lines} lines of unknown kinds were left out")
        return told

    def evidence(self) -> Iterator[Evidence]:
        """The file's evidence in order, from its beginning; TraceError with file and line for what is unusable."""
        self._begin()
        records: list[Record] = []
        for seq, (kind, step, body) in enumerate(self._bodies()):
            records.append(Record(kind, seq, step, 0, body))
            if len(records) >= _BATCH_RECORDS:
                yield digest_records(records, self.identity, self._digester, raw=True)
                records = []
        if records:
            yield digest_records(records, self.identity, self._digester, raw=True)

    def _bodies(self) -> Iterator[tuple[Kind, int, Body]]:
        number = 0
        try:
            with self.file.path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    self.bytes_read += len(line)
                    if number == 1:
                        line = self._without_mark(line)
                    if not line.strip():
                        continue
                    try:
                        if _kind_decoder.decode(line).kind not in _KINDS:
                            self.unknown_lines += 1
                            continue
                        parsed = _decoder.decode(line)
                    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                        if not line.endswith(b"\n"):
                            self.cut_off = True  # the engine died while writing it
                            break
                        raise TraceError(f"{self.file.path}:{number}: {error}") from None
                    yield from self._parsed(parsed)
            yield from self._flush_sent(None)
        except OSError as error:
            raise TraceError(f"{self.file.path}: cannot be read: {error.strerror}") from None
        except (ValueError, OverflowError) as error:
            raise TraceError(f"{self.file.path}:{number}: {error}") from None

    def _without_mark(self, line: bytes) -> bytes:
        """The first line without the mark that some editors put before UTF-8."""
        if line.startswith(_GZIP):
            raise TraceError(f"{self.file.path}: compressed: unpack it first")
        return line.removeprefix(codecs.BOM_UTF8)

    def _parsed(self, line: _Line) -> Iterator[tuple[Kind, int, Body]]:
        if isinstance(line, _Drafts):
            yield from self._flush_sent(line)
            return
        yield from self._flush_sent(None)
        match line:
            case _Inputs():
                yield from self._inputs(line)
            case _Sent():
                self._check_step(line.step)
                yield Kind.MASK, line.step, self._mask(line.mask)
                self._sent = line
            case _Received():
                self._check_step(line.step)
                yield Kind.MASK, line.step, self._mask(line.mask)
                yield Kind.RECEIVED, line.step, self._received(line)

    def _check_step(self, step: int) -> None:
        if self._batch is None:
            raise ValueError("a payload before the first inputs")
        if step != self._step:
            raise ValueError(f"a line of step {step} follows the inputs of step {self._step}")

    def _inputs(self, line: _Inputs) -> Iterator[tuple[Kind, int, Body]]:
        if not self._step < line.step < 2**63:
            raise ValueError(
                f"step {line.step} follows step {self._step}: steps must rise, and stay below 2**63"
            )
        self._step = line.step
        rows = line.rows
        for row in rows:
            if len(row.ids) != row.sched or len(row.pos) != row.sched:
                raise ValueError(f"request {row.req!r} schedules {row.sched} tokens but feeds {len(row.ids)}")
            if (row.req, row.slot, row.gen) not in self._known:
                self._known.add((row.req, row.slot, row.gen))
                key = request_key(row.req)
                yield Kind.BIND, line.step, Bind(row.slot, row.gen, row.prefill, row.cap, key, row.req)
        body = _inputs_body(rows)
        self._batch = _Batch(body.request, body.slot, body.generation)
        self._rows = body
        yield Kind.INPUTS, line.step, body

    def _mask(self, engine: list[bool] | None) -> Mask:
        body = self._rows
        refined = body.cap >= 0
        fixed = fixed_mask(
            body.mirror,
            body.scheduled,
            body.prefill_len,
            is_prefilling=(body.prefilling != 0) & refined,
            max_seq_len=np.where(refined, body.cap, np.iinfo(np.int32).max),
        )
        rows = len(body.request)
        if engine is not None and len(engine) != rows:
            raise ValueError(f"a mask of {len(engine)} entries for a batch of {rows} rows")
        nothing = np.zeros(rows, np.uint8)
        return Mask(
            int(engine is None),
            int(fixed is None),
            nothing if engine is None else np.array(engine, np.uint8),
            nothing if fixed is None else fixed.astype(np.uint8),
        )

    def _flush_sent(self, drafts: _Drafts | None) -> Iterator[tuple[Kind, int, Body]]:
        sent, self._sent = self._sent, None
        if sent is None:
            return
        yield (
            Kind.SENT,
            sent.step,
            self._payload(
                sent.tokens, sent.num_sampled, sent.num_rejected, drafts.drafts if drafts else None, sent.mask
            ),
        )

    def _received(self, line: _Received) -> Payload:
        if line.tokens is None:
            return self._payload([], [], [], None, None)
        return self._payload(
            line.tokens, line.num_sampled or [], line.num_rejected or [], line.drafts, line.mask
        )

    def _payload(
        self,
        tokens: list[list[int]],
        num_sampled: list[int],
        num_rejected: list[int],
        drafts: list[list[int]] | None,
        mask: list[bool] | None,
    ) -> Payload:
        batch = self._batch
        if batch is None:
            raise ValueError("a payload before the first inputs")
        rows = len(tokens)
        if rows not in (0, len(batch.request)) or any(len(x) != rows for x in (num_sampled, num_rejected)):
            raise ValueError(f"a payload of {rows} rows for a batch of {len(batch.request)}")
        return Payload(
            at=UNKNOWN,
            skipped=int(mask is None),
            request=batch.request[:rows],
            slot=batch.slot[:rows],
            generation=batch.generation[:rows],
            generation_now=batch.generation[:rows],
            num_sampled=_int32(num_sampled),
            num_rejected=_int32(num_rejected),
            tokens=_table(tokens, rows),
            draft_tokens=_table(drafts or [[]] * rows, rows),
            applied=np.array(mask if mask is not None and rows else [False] * rows, np.uint8),
        )


def _inputs_body(rows: list[_Row]) -> Inputs:
    def column(name: str) -> NDArray[np.int32]:
        return _int32([getattr(row, name) for row in rows])

    prefilling = np.array([row.prefilling for row in rows], np.uint8)
    scheduled = column("sched")
    return Inputs(
        tick=UNKNOWN,
        graph_mode=UNKNOWN,
        spec_tokens=UNKNOWN,
        padded_tokens=UNKNOWN,
        request=np.array([request_key(row.req) for row in rows], np.uint64),
        slot=column("slot"),
        generation=column("gen"),
        mirror=column("mirror"),
        computed=column("computed"),
        prefill_len=column("prefill"),
        scheduled=scheduled,
        draft_count=np.where(prefilling != 0, 0, scheduled - 1).astype(np.int32),
        cap=column("cap"),
        last_sampled=_int32([row.last[0] if row.last else UNKNOWN for row in rows]),
        draft_tokens=_table([row.drafts for row in rows], len(rows)),
        input_ids=_int32([token for row in rows for token in row.ids]),
        positions=_int32([position for row in rows for position in row.pos]),
        prefilling=prefilling,
    )


def _int32(values: Sequence[int]) -> NDArray[np.int32]:
    """Wrap as the recorder does: an undefined column may hold any 64-bit value."""
    return np.array(values, np.int64).astype(np.int32)


def _table(rows: Sequence[Sequence[int]], count: int) -> NDArray[np.int32]:
    width = max((len(row) for row in rows), default=0)
    if any(len(row) != width for row in rows):
        raise ValueError("rows of a token table differ in width")
    return np.array(rows, np.int64).reshape(count, width).astype(np.int32)
