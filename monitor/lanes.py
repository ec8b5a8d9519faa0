"""Lanes: one rank's evidence, in the order it was recorded, until it can be compared with the other ranks'.

A lane trusts nobody: what comes twice, out of order or too late is left out and counted, and where records are
missing it notes which steps may be incomplete for it. Its steps are ordinals in common: where the rank counted its
batches otherwise than the others (`shift`), they are not the ones it recorded.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.evidence import I64, EventBlock, Evidence, InputsBlock, join, slice_steps
from stagewatch.agents.record import Kind
from stagewatch.monitor.binds import Binds, join_binds
from stagewatch.monitor.blocks import KINDS, BlockKind, select
from stagewatch.monitor.calls import NO_CALLS, Calls, Names, join_calls
from stagewatch.monitor.gaps import AHEAD, Gaps
from stagewatch.monitor.ordinals import Ordinals, Shift

CALLS_WAITING_MAX: Final = 65_536
"""Calls of one rank that wait for the others; past it the oldest are given up and their steps are incomplete."""


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
        self.lossy = False
        """Whether records were ever lost."""
        self.gaps: Final = Gaps()
        """Steps for which records of this rank are missing."""
        self.lacking: Final = Gaps()
        """Steps that the rank did not count."""
        self.ordinals: Final = Ordinals()
        self.pending_rows = 0
        """Rows of inputs that wait."""
        self._deferral_steps: Final = deferral_steps
        self._names: Final = names or Names()
        self._next_seq = -1
        self._pending: dict[BlockKind, list[Any]] = {kind: [] for kind in KINDS}
        self._newest_of: dict[BlockKind, int] = dict.fromkeys(KINDS, 0)
        self._consumed_to = 0
        """Step of the newest payload that was consumed."""
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
        holes = bool(evidence.lost) or evidence.first_seq != max(self._next_seq, 0)
        seqs = self._seqs(evidence) if holes else None
        evidence = self.ordinals.of_evidence(evidence)
        if evidence.inputs is not None:
            self.gaps.close(int(evidence.inputs.step[0]))
        if seqs is not None:
            self.lossy = True
            self.gaps.note(evidence, seqs, self._next_seq, self.newest, self._deferral_steps)
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

    def _seqs(self, evidence: Evidence) -> I64:
        """Sequence numbers of what is new, ascending."""
        blocks = [getattr(evidence, kind) for kind in (*KINDS, "events")]
        seqs = np.sort(np.concatenate([block.seq for block in blocks if block is not None]))
        new: I64 = seqs[seqs >= self._next_seq]
        return new

    def _add(self, kind: BlockKind, block: Any, again: int, judged: int) -> None:
        order = block.at if kind == "consumed" else block.step
        floor = max(judged, self._newest_of[kind])
        # Several payloads may be consumed before one step.
        least = floor if kind != "consumed" else max(judged, self._newest_of[kind] - 1)
        if again < 0 and order[0] > least and self._ascends(kind, block):
            kept = block
        else:
            running = np.maximum.accumulate(np.concatenate([[least], order[:-1]]))
            keep = order >= running if kind == "consumed" else order > running
            keep &= (order > judged) & (block.seq >= again)
            if kind == "consumed":
                keep &= block.step > np.maximum.accumulate(
                    np.concatenate([[self._consumed_to], block.step[:-1]])
                )
            kept = select(block, keep)
            self._count_dropped(kind, block, ~keep)
            if not len(kept.step):
                return
        self._newest_of[kind] = int((kept.at if kind == "consumed" else kept.step)[-1])
        self._pending[kind].append(kept)
        if kind == "consumed":
            self._consumed_to = int(kept.step[-1])
        if kind == "inputs":
            self.newest = self._newest_of[kind]
            self.pending_rows += len(kept.request)

    def _ascends(self, kind: BlockKind, block: Any) -> bool:
        """Whether a block follows, in the order of its kind. Payloads are consumed first in, first out."""
        if kind != "consumed":
            return bool((block.step[1:] > block.step[:-1]).all())
        in_turn = block.step[0] > self._consumed_to and (block.step[1:] > block.step[:-1]).all()
        return bool(in_turn and (block.at[1:] >= block.at[:-1]).all())

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
        self.gaps.add(int(steps.min()), int(steps.max()))
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

    # ---- another count

    def shift(self, shift: Shift) -> None:
        """Renumber what waits and what will come."""
        self.ordinals.add(shift)
        self.lossy = True
        for kind in KINDS:
            self._pending[kind] = [shift.of_block(kind, block) for block in self._pending[kind]]
            self._newest_of[kind] = shift.of_step(self._newest_of[kind])
        self.newest = self._newest_of["inputs"]
        self._consumed_to = shift.of_step(self._consumed_to)
        self._calls = [calls.at(shift.of(calls.step)) for calls in self._calls]
        self._binds = [binds.at(shift.of(binds.step + 1) - 1) for binds in self._binds]
        self.lacking.add(shift.step, shift.step + shift.missing - 1)
        # What belongs to the batches in question may be recorded under the steps beside them.
        self.gaps.add(shift.step - 1 - self._deferral_steps, shift.step + shift.missing - 1 + AHEAD)

    # ---- out

    def reached(self, kind: BlockKind) -> int:
        """Newest step that arrived of a kind; 0 if none did."""
        return self._newest_of[kind]

    def waiting(self) -> InputsBlock | None:
        """All inputs that wait, as one block, which from now on is how they wait; None if there are none."""
        blocks = self._pending["inputs"]
        if len(blocks) > 1:
            self._pending["inputs"] = [join(blocks)]
        return self._pending["inputs"][0] if blocks else None

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

    def put_back(self, inputs: InputsBlock) -> None:
        """Inputs that were taken wait again, before all others."""
        if len(inputs.step):
            self._pending["inputs"].insert(0, inputs)
            self.pending_rows += len(inputs.request)

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
