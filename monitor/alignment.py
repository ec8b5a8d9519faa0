"""Alignment: brings ranks' evidence of the same steps together, and says of every other step why it cannot.

What happens in a step happens in an order: payloads are consumed, inputs prepared, the mask computed, the payload
sent and received, and all the while calls are entered. Evidence is handed out in that order, and nothing is
handed out before all that comes before it, so that what is found does not depend on how the evidence was cut
into batches or in which order ranks delivered it: a replay says what was said live.

Each rank's evidence comes in the order it was recorded. Once a rank has delivered a step, any step below that it did
not deliver is missing for good; and a payload that it has not delivered `deferral_steps` later never comes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.evidence import I64, Evidence, InputsBlock, slice_steps
from stagewatch.monitor.calls import Calls, Names
from stagewatch.monitor.checks.base import Chunk, Unaligned
from stagewatch.monitor.lanes import OPEN, BlockKind, Lane, select
from stagewatch.monitor.windows import Group, Window

RANK_MISSING: Final = "rank_missing"
"""A rank of the group was never heard of, or fell silent before the step."""
GAP: Final = "gap"
"""A rank went past the step without delivering it: its ring was overrun, or its stream lost it."""
BATCH_DIFFERS: Final = "batch_differs"
"""Ranks recorded different batches under one ordinal, so rows have no counterpart."""
NOT_CONSUMED: Final = "not_consumed"
"""The evidence ended before every rank had consumed its updates and prepared the step."""

PENDING_ROWS_MAX: Final = 4_000_000
"""Rows held for ranks that lag; past it the laggards' steps become INDETERMINATE."""
FINGERPRINT: Final = ("request", "scheduled", "draft_count")


@dataclass(frozen=True, slots=True)
class Aligned:
    """What became comparable, and what will never be."""

    chunk: Chunk
    indeterminate: dict[str, int]
    """Rows without a verdict of equality, by reason."""
    horizon: int


class Aligner:
    """Lanes of one group, and how far they have been judged."""

    def __init__(self, group: Group) -> None:
        self.group: Final = group
        self.names: Final = Names()
        self._deferral_steps: Final = group.sizes.pp
        """A payload is consumed, and so recorded, pp_size iterations after its step at the latest."""
        self.lanes: Final = tuple(Lane(group.sizes.pp, self.names) for _ in group.ranks)
        self.judged = 0
        """Every step up to this ordinal has been handed out or given up."""
        self._upto: dict[BlockKind, int] = dict.fromkeys(
            ("inputs", "mask", "sent", "received", "consumed"), 0
        )
        self._comparable: I64 = np.zeros(0, np.int64)
        """Steps whose inputs were aligned and whose later parts were not yet handed out."""
        self._early: Final = tuple(i for i in range(len(self.lanes)) if i not in group.last_stage)

    def push(self, index: int, evidence: Evidence) -> Calls:
        """Add evidence of the rank at ``index``; return the calls in it that are new."""
        return self.lanes[index].push(evidence, self._upto)

    def advance(self, *, absent: frozenset[int] = frozenset(), final: bool = False) -> Aligned | None:
        """Hand out what is complete. ``absent`` are rank indices no longer waited for.

        With ``final`` nobody is waited for: the evidence has ended.
        """
        upto = self._horizons(absent, final)
        if upto == self._upto and not final:
            return None
        reasons: Counter[str] = Counter()
        taken = {
            kind: [lane.take(kind, OPEN if final else upto[kind]) for lane in self.lanes] for kind in upto
        }
        inputs, unaligned = self._inputs(taken["inputs"], reasons, final)
        self._remember_comparable(inputs)
        left = OPEN if final else upto["inputs"] - 1
        calls = tuple(lane.take_calls(left) for lane in self.lanes)
        ahead = self._ahead(upto["mask"])
        binds = tuple(
            (index, found)
            for index, lane in enumerate(self.lanes)
            if (found := lane.take_binds(left)) is not None
        )
        chunk = Chunk(
            inputs=inputs,
            mask=self._same_steps(taken["mask"], range(len(self.lanes))),
            sent=self._same_steps(taken["sent"], self.group.last_stage),
            received=self._blocks(taken["received"], self._early, compared=True),
            consumed=self._blocks(taken["consumed"], self._early, compared=False),
            unaligned=unaligned,
            gaps=tuple(gap for lane in self.lanes for gap in lane.gaps),
            calls=calls,
            left=tuple(lane.newest - 1 for lane in self.lanes),
            ahead=ahead,
            names=self.names,
            binds=binds,
        )
        self._settle(upto)
        return Aligned(chunk, dict(reasons), self.judged)

    # ---- how far

    def _horizons(self, absent: frozenset[int], final: bool) -> dict[BlockKind, int]:
        """The last step of each kind that may be handed out now."""
        lanes = [lane for index, lane in enumerate(self.lanes) if index not in absent]
        newest = max(lane.newest for lane in self.lanes)
        if final or any(lane.pending_rows > PENDING_ROWS_MAX for lane in self.lanes):
            inputs = mask = payloads = newest
        else:
            inputs = min((lane.newest for lane in lanes), default=0)
            late = inputs - self._deferral_steps
            masks = min((lane.reached("mask") for lane in lanes), default=0)
            sent = [self.lanes[i].reached("sent") for i in self.group.last_stage if i not in absent]
            received = [self.lanes[i].reached("received") for i in self._early if i not in absent]
            mask = min(inputs, max(masks, late))
            payloads = min(mask, max(min([*sent, *received], default=0), late))
            inputs = min(inputs, payloads + 1)
        before = self._upto
        inputs = max(inputs, before["inputs"])
        return {
            "inputs": inputs,
            "mask": max(min(mask, inputs), before["mask"]),
            "sent": max(min(payloads, inputs), before["sent"]),
            "received": max(min(payloads, inputs), before["received"]),
            "consumed": inputs,
        }

    def _ahead(self, masks_to: int) -> tuple[Calls, ...]:
        """Calls of steps that not every rank has left; none of steps whose masks are still to be looked at."""
        ahead = [lane.calls_ahead for lane in self.lanes]
        return tuple(calls.where(calls.step <= masks_to) if len(calls) else calls for calls in ahead)

    def _remember_comparable(self, inputs: Window[InputsBlock] | None) -> None:
        if inputs is not None:
            self._comparable = np.concatenate([self._comparable, inputs.steps])

    def _settle(self, upto: dict[BlockKind, int]) -> None:
        self._upto = upto
        self.judged = upto["inputs"]
        done = min(upto["mask"], upto["sent"], upto["received"])
        self._comparable = self._comparable[self._comparable > done]
        oldest = done - 4 * self._deferral_steps
        for lane in self.lanes:
            if lane.gaps and lane.gaps[0][1] < oldest:
                lane.gaps = [gap for gap in lane.gaps if gap[1] >= oldest]

    # ---- what

    def _inputs(
        self, blocks: Sequence[InputsBlock | None], reasons: Counter[str], final: bool
    ) -> tuple[Window[InputsBlock] | None, tuple[Unaligned, ...]]:
        present = [block for block in blocks if block is not None]
        if not present:
            return None, ()
        first = present[0].step
        if len(present) == len(blocks) and all(np.array_equal(first, block.step) for block in present[1:]):
            return self._same_batches(present, reasons)
        union = np.unique(np.concatenate([block.step for block in present]))
        common = union
        for lane, block in zip(self.lanes, blocks, strict=True):
            steps = np.zeros(0, np.int64) if block is None else block.step
            has = np.isin(union, steps)
            self._count_missing(present, union[~has & np.isin(union, common)], lane, reasons, final)
            common = common[np.isin(common, steps)]
        if not len(common):
            return None, ()
        kept = [select(block, np.isin(block.step, common)) for block in present]
        return self._same_batches(kept, reasons)

    def _count_missing(
        self, blocks: list[InputsBlock], steps: I64, lane: Lane, reasons: Counter[str], final: bool
    ) -> None:
        """Count the rows of steps that a lane lacks, each step once."""
        if not len(steps):
            return
        rows = np.zeros(len(steps), np.int64)
        for block in blocks:
            _, at, place = np.intersect1d(steps, block.step, assume_unique=True, return_indices=True)
            rows[at] = np.maximum(rows[at], block.rows[place])
        passed = steps < lane.newest
        behind = NOT_CONSUMED if final and lane.heard else RANK_MISSING
        for reason, count in ((GAP, int(rows[passed].sum())), (behind, int(rows[~passed].sum()))):
            if count:
                reasons[reason] += count

    def _same_batches(
        self, blocks: list[InputsBlock], reasons: Counter[str]
    ) -> tuple[Window[InputsBlock] | None, tuple[Unaligned, ...]]:
        indices = tuple(range(len(blocks)))
        agree = _fingerprints_agree(blocks)
        if agree.all():
            return Window(self.group, indices, tuple(blocks)), ()
        unaligned = tuple(
            Unaligned(
                int(blocks[0].step[at]),
                indices,
                tuple(slice_steps(block, int(at), int(at) + 1) for block in blocks),
            )
            for at in np.flatnonzero(~agree)
        )
        reasons[BATCH_DIFFERS] += sum(max(len(block.request) for block in each.blocks) for each in unaligned)
        kept = tuple(select(block, agree) for block in blocks)
        return (Window(self.group, indices, kept) if agree.any() else None), unaligned

    def _blocks(
        self, blocks: Sequence[Any], indices: Sequence[int], *, compared: bool
    ) -> tuple[tuple[int, Any], ...]:
        """(rank index, its block) of the given ranks; ``compared``: of steps alone at which all ran the same batch."""
        found = []
        for index in indices:
            block = blocks[index]
            if block is None:
                continue
            if compared:
                block = select(block, np.isin(block.step, self._comparable))
            if len(block.step):
                found.append((index, block))
        return tuple(found)

    def _same_steps(self, blocks: Sequence[Any], indices: Sequence[int]) -> Window[Any] | None:
        """A window of the steps that all the given ranks have with equal row counts; None if there are none."""
        chosen = [blocks[index] for index in indices]
        if not chosen or any(block is None for block in chosen):
            return None
        first = chosen[0]
        same = all(
            np.array_equal(first.step, b.step) and np.array_equal(first.rows, b.rows) for b in chosen[1:]
        )
        common = first.step
        if not same:
            for block in chosen[1:]:
                common = np.intersect1d(common, block.step, assume_unique=True)
        wanted = np.isin(common, self._comparable)
        if not same or not wanted.all():
            common = common[wanted]
            chosen = [select(block, np.isin(block.step, common)) for block in chosen]
            equal = np.logical_and.reduce([chosen[0].rows == block.rows for block in chosen])
            chosen = [select(block, equal) for block in chosen]
        return Window(self.group, tuple(indices), tuple(chosen)) if len(chosen[0].step) else None


def _fingerprints_agree(blocks: list[InputsBlock]) -> NDArray[np.bool_]:
    """Steps at which all ranks recorded the same batch: bool [steps]. Blocks have equal ``step`` columns."""
    first = blocks[0]
    agree = np.ones(len(first.step), np.bool_)
    for block in blocks[1:]:
        if np.array_equal(first.rows, block.rows):
            for column in FINGERPRINT:
                unequal = getattr(first, column) != getattr(block, column)
                if unequal.any():
                    agree[np.repeat(np.arange(len(first.step)), first.rows)[unequal]] = False
            continue
        for at in range(len(first.step)):
            one, other = slice_steps(first, at, at + 1), slice_steps(block, at, at + 1)
            agree[at] &= all(np.array_equal(getattr(one, c), getattr(other, c)) for c in FINGERPRINT)
    return agree
