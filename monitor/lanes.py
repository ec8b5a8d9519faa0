"""Lanes: one rank's evidence, in the order it was recorded, until it can be compared with the other ranks'.

A lane trusts nobody: what comes twice, out of order or too late is left out and counted, and where records are
missing it notes which steps may be incomplete for it.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.evidence import I64, EventBlock, Evidence, join, slice_steps
from stagewatch.agents.record import U64, Kind
from stagewatch.monitor.calls import NO_CALLS, Calls, Names, join_calls

BlockKind = Literal["inputs", "mask", "sent", "received", "consumed"]
KINDS: Final[tuple[BlockKind, ...]] = ("inputs", "mask", "sent", "received", "consumed")
OPEN: Final = 1 << 62
"""End of a gap that no step has closed yet."""
CALLS_WAITING_MAX: Final = 65_536
"""Calls of one rank that wait for the others; past it the oldest are given up and their steps are incomplete."""
GAPS_MAX: Final = 1024
SLOTS_MAX: Final = 1 << 20
"""Slot numbers believed; what is kept of a slot is kept in a table."""
AHEAD: Final = 2
"""Steps after a gap that may still lack events: on CUDA a step's inputs are published after its calls."""


@dataclass(frozen=True, slots=True)
class Binds:
    """Slots that one rank gave to requests; every column has one entry per bind. ``step`` is the ordinal before."""

    step: I64
    slot: I64
    generation: I64
    request: U64
    t_ns: I64

    def __len__(self) -> int:
        return len(self.step)

    @classmethod
    def of(cls, events: EventBlock) -> "Binds":
        """The binds among a rank's events."""
        at = np.flatnonzero((events.kind == Kind.BIND) & (events.slot >= 0) & (events.slot < SLOTS_MAX))
        slot, generation = events.slot[at].astype(np.int64), events.generation[at].astype(np.int64)
        return cls(events.step[at], slot, generation, events.request[at], events.t_ns[at])

    def part(self, first: int, end: int) -> "Binds":
        """Binds ``first`` to ``end`` (exclusive)."""
        kept = slice(first, end)
        return Binds(
            self.step[kept], self.slot[kept], self.generation[kept], self.request[kept], self.t_ns[kept]
        )

    def where(self, keep: NDArray[np.bool_]) -> "Binds":
        """The marked binds."""
        return Binds(
            self.step[keep], self.slot[keep], self.generation[keep], self.request[keep], self.t_ns[keep]
        )


def join_binds(parts: list[Binds]) -> Binds:
    """Binds of one rank, one part after the other; at least one part."""
    if len(parts) == 1:
        return parts[0]
    columns = ("step", "slot", "generation", "request", "t_ns")
    return Binds(*(np.concatenate([getattr(part, column) for part in parts]) for column in columns))


class Lane:
    """One rank's evidence that waits for the other ranks'. ``deferral_steps`` is how late a payload may be recorded."""

    def __init__(self, deferral_steps: int = 8, names: Names | None = None) -> None:
        self.newest = 0
        """Newest step whose inputs arrived."""
        self.heard = False
        self.late_rows = 0
        """Rows that came twice, or after their step had its verdict."""
        self.late_records = 0
        """Payloads and masks of which the same is true, and calls given up."""
        self.gaps: list[tuple[int, int]] = []
        """First and last step of each stretch for which records of this rank are missing."""
        self.pending_rows = 0
        """Rows of inputs that wait."""
        self._deferral_steps: Final = deferral_steps
        self._names: Final = names or Names()
        self._next_seq = -1
        self._pending: dict[BlockKind, list[Any]] = {kind: [] for kind in KINDS}
        self._newest_of: dict[BlockKind, int] = dict.fromkeys(KINDS, 0)
        self._calls: list[Calls] = []
        self._binds: list[Binds] = []

    # ---- in

    def push(self, evidence: Evidence, judged: dict[BlockKind, int]) -> Calls:
        """Add evidence; records of steps up to what is ``judged`` of their kind come too late. Return new calls."""
        self.heard = True
        if self._next_seq >= 0 and evidence.next_seq <= self._next_seq:
            self._count_late(evidence)
            return NO_CALLS
        again = self._next_seq if self._next_seq > evidence.first_seq else -1
        if self.gaps and self.gaps[-1][1] == OPEN and evidence.inputs is not None:
            self.gaps[-1] = (self.gaps[-1][0], int(evidence.inputs.step[0]) + AHEAD)
        if evidence.lost or evidence.first_seq != max(self._next_seq, 0):
            self._note_gaps(evidence)
        self._next_seq = evidence.next_seq
        for kind in KINDS:
            block = getattr(evidence, kind)
            if block is not None and len(block.step):
                self._add(kind, block, again, judged[kind])
        return (
            NO_CALLS
            if evidence.events is None
            else self._add_events(evidence.events, again, judged["inputs"])
        )

    def _add(self, kind: BlockKind, block: Any, again: int, judged: int) -> None:
        order = block.at if kind == "consumed" else block.step
        floor = max(judged, self._newest_of[kind])
        # Several payloads may be consumed before one step.
        least = floor if kind != "consumed" else max(judged, self._newest_of[kind] - 1)
        if again < 0 and order[0] > least and _ascends(order, strictly=kind != "consumed"):
            kept = block
        else:
            running = np.maximum.accumulate(np.concatenate([[least], order[:-1]]))
            keep = order >= running if kind == "consumed" else order > running
            keep &= (order > judged) & (block.seq >= again)
            kept = select(block, keep)
            self._count_dropped(kind, block, ~keep)
            if not len(kept.step):
                return
        self._newest_of[kind] = int((kept.at if kind == "consumed" else kept.step)[-1])
        self._pending[kind].append(kept)
        if kind == "inputs":
            self.newest = self._newest_of[kind]
            self.pending_rows += len(kept.request)

    def _add_events(self, events: EventBlock, again: int, judged: int) -> Calls:
        fresh = events.seq >= again
        calls, binds = Calls.of(events, self._names), Binds.of(events)
        if not fresh.all():
            calls = calls.where(fresh[events.kind == Kind.COLLECTIVE])
            binds = Binds.of(select(events, fresh))
        if len(calls) and calls.step[0] < judged:
            # The other ranks' calls of these steps are gone: nobody is left to compare them with.
            late = calls.step < judged
            self.late_records += int(late.sum())
            calls = calls.where(~late)
        if len(calls):
            self._calls.append(calls)
            self._bound_calls()
        if len(binds):
            self._binds.append(binds)
        return calls

    def _bound_calls(self) -> None:
        surplus = sum(map(len, self._calls)) - CALLS_WAITING_MAX
        if surplus <= 0:
            return
        waiting = join_calls(self._calls)
        steps = waiting.step[:surplus]
        self._calls = [waiting.where(np.arange(len(waiting)) >= surplus)]
        self._add_gap(int(steps.min()), int(steps.max()))
        self.late_records += surplus

    def _count_dropped(self, kind: BlockKind, block: Any, dropped: NDArray[np.bool_]) -> None:
        if kind == "inputs":
            self.late_rows += int(block.rows[dropped].sum())
        else:
            self.late_records += int(dropped.sum())

    def _count_late(self, evidence: Evidence) -> None:
        for kind in KINDS:
            block = getattr(evidence, kind)
            if block is not None:
                self._count_dropped(kind, block, np.ones(len(block.step), np.bool_))

    def _note_gaps(self, evidence: Evidence) -> None:
        """Find the holes in the sequence numbers, and between which steps they lie."""
        blocks = [getattr(evidence, kind) for kind in (*KINDS, "events")]
        seqs = np.sort(np.concatenate([block.seq for block in blocks if block is not None]))
        seqs = seqs[seqs >= self._next_seq]
        before = np.concatenate([[max(self._next_seq, 0) - 1], seqs[:-1]])
        holes = np.flatnonzero(seqs - before > 1)
        if not len(holes):
            # The reader counted a loss that the numbers do not show: it may lie anywhere in here.
            holes = np.zeros(1, np.int64) if evidence.lost and len(seqs) else holes
        inputs = evidence.inputs
        for hole in holes.tolist():
            first, last = self.newest, OPEN
            if inputs is not None:
                older = int(np.searchsorted(inputs.seq, before[hole], side="right"))
                newer = int(np.searchsorted(inputs.seq, seqs[hole]))
                first = int(inputs.step[older - 1]) if older else self.newest
                last = int(inputs.step[newer]) + AHEAD if newer < len(inputs.step) else OPEN
            self._add_gap(first - self._deferral_steps, last)
        if not len(seqs) or seqs[-1] + 1 < evidence.next_seq:
            first = self.newest if inputs is None else int(inputs.step[-1])
            self._add_gap(first - self._deferral_steps, OPEN)

    def _add_gap(self, first: int, last: int) -> None:
        if self.gaps and first <= self.gaps[-1][1]:
            self.gaps[-1] = (min(first, self.gaps[-1][0]), max(last, self.gaps[-1][1]))
        else:
            self.gaps.append((first, last))
        if len(self.gaps) > GAPS_MAX:
            second = self.gaps.pop(1)
            self.gaps[0] = (self.gaps[0][0], second[1])

    # ---- out

    def reached(self, kind: BlockKind) -> int:
        """Newest step that arrived of a kind; 0 if none did."""
        return self._newest_of[kind]

    def take(self, kind: BlockKind, upto: int) -> Any | None:
        """Remove and return the records of a kind up to a step, as one block; None if there are none."""
        blocks = self._pending[kind]
        if not blocks:
            return None
        taken, kept = [], []
        for block in blocks:
            order = block.at if kind == "consumed" else block.step
            end = int(np.searchsorted(order, upto, side="right"))
            if end:
                taken.append(slice_steps(block, 0, end))
            if end < len(order):
                kept.append(slice_steps(block, end, len(order)))
        self._pending[kind] = kept
        if not taken:
            return None
        block = join(taken)
        if kind == "inputs":
            self.pending_rows -= len(block.request)
        return block

    def take_calls(self, upto: int) -> Calls:
        """Remove and return the calls of steps up to ``upto``."""
        waiting = join_calls(self._calls)
        done = waiting.step <= upto
        if done.all():
            self._calls = []
            return waiting
        rest = waiting.where(~done)
        self._calls = [rest]
        return waiting.where(done)

    @property
    def calls_ahead(self) -> Calls:
        """The calls that wait: those of steps that some rank has not left."""
        return join_calls(self._calls)

    def take_binds(self, upto: int) -> Binds | None:
        """Remove and return the binds recorded up to ``upto``."""
        if not self._binds:
            return None
        waiting = join_binds(self._binds)
        done = waiting.step <= upto
        self._binds = [] if done.all() else [waiting.where(~done)]
        return waiting.where(done) if done.any() else None


def _ascends(order: I64, *, strictly: bool) -> bool:
    if len(order) < 2:
        return True
    return bool((order[1:] > order[:-1]).all() if strictly else (order[1:] >= order[:-1]).all())


def select(block: Any, keep: NDArray[np.bool_]) -> Any:
    """The records of a block at the marked places."""
    if keep.all():
        return block
    edges = np.flatnonzero(np.diff(np.concatenate([[False], keep, [False]]).astype(np.int8)))
    runs = [slice_steps(block, int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return join(runs) if runs else slice_steps(block, 0, 0)
