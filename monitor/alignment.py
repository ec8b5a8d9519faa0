"""Alignment: brings ranks' evidence of the same steps together, and says of every other step why it cannot.

What happens in a step happens in an order: payloads are consumed, inputs prepared, the mask computed, the payload
sent and received, and all the while calls are entered. Evidence is handed out in that order, and nothing is
handed out before all that comes before it, so that what is found does not depend on how the evidence was cut
into batches or in which order ranks delivered it: a replay says what was said live.

Each rank's evidence comes in the order it was recorded. Once a rank has delivered a step, any step below that it did
not deliver is missing for good; and a payload that it has not delivered `deferral_steps` later never comes.

A step at which ranks' batches have no row in common is held back until the batches that follow tell whether a rank
counts otherwise than the others (see `shifts`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.evidence import I64, Evidence, InputsBlock, slice_steps
from stagewatch.monitor.batches import among, fingerprints_agree, in_common, rows_of, same_steps
from stagewatch.monitor.blocks import KINDS, BlockKind, select
from stagewatch.monitor.calls import Calls, Names
from stagewatch.monitor.checks.base import Chunk, Shifted, Unaligned
from stagewatch.monitor.gaps import OPEN
from stagewatch.monitor.lanes import Lane
from stagewatch.monitor.recount import Recount
from stagewatch.monitor.windows import Group, Window

RANK_MISSING: Final = "rank_missing"
"""A rank of the group was never heard of, or fell silent before the step."""
GAP: Final = "gap"
"""A rank went past the step without delivering it: its ring was overrun, or its stream lost it."""
BATCH_DIFFERS: Final = "batch_differs"
"""Ranks recorded different batches under one ordinal, so rows have no counterpart."""
ORDINALS_SHIFTED: Final = "ordinals_shifted"
"""A rank counted its batches otherwise than the others, and these have no counterpart on record."""
NOT_CONSUMED: Final = "not_consumed"
"""The evidence ended before every rank had consumed its updates and prepared the step."""

PENDING_ROWS_MAX: Final = 4_000_000
"""Rows held for ranks that lag; past it the laggards' steps become INDETERMINATE."""


@dataclass(frozen=True, slots=True)
class Aligned:
    """What became comparable, and what will never be."""

    chunk: Chunk
    indeterminate: dict[str, int]
    """Rows without a verdict of equality, by reason."""


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
        self._upto: dict[BlockKind, int] = dict.fromkeys(KINDS, 0)
        self._comparable: I64 = np.zeros(0, np.int64)
        """Steps whose inputs were aligned and whose later parts were not yet handed out."""
        self._early: Final = tuple(i for i in range(len(self.lanes)) if i not in group.last_stage)
        self._recount: Final = Recount(self.lanes)

    def push(self, index: int, evidence: Evidence) -> Calls:
        """Add evidence of the rank at ``index``; return the calls in it that are new."""
        return self.lanes[index].push(evidence, self._upto)

    def advance(
        self, *, absent: frozenset[int] = frozenset(), final: bool = False, patient: bool = True
    ) -> Aligned | None:
        """Hand out what is complete. ``absent`` are rank indices no longer waited for.

        With ``final`` nobody is waited for: the evidence has ended. Without ``patience`` what is on record must tell
        whether a rank's ordinals are off.
        """
        reasons: Counter[str] = Counter()
        shifted: list[Shifted] = []
        held = OPEN
        while True:
            upto = self._horizons(absent, final)
            if upto == self._upto and not final and not shifted:
                return None
            inputs = [lane.take("inputs", OPEN if final else upto["inputs"]) for lane in self.lanes]
            doubts, agree = self._recount.doubts(inputs)
            if not doubts:
                break
            for lane, block in zip(self.lanes, inputs, strict=True):
                if block is not None:
                    lane.put_back(block)
            found = self._recount.look_at(doubts, absent, patient and not final and not self._overfull())
            if isinstance(found, Shifted):
                shifted.append(found)
                continue
            if found is not None:
                held = found
                upto = {kind: min(step, held - 1) for kind, step in upto.items()}
            if upto == self._upto and not final and not shifted:
                return None
            inputs = [lane.take("inputs", OPEN if final else upto["inputs"]) for lane in self.lanes]
            agree = None
            break
        # A batch that a rank did not count may have left its calls under the step before the one held back.
        left = tuple(min(lane.newest, held - 1) - 1 for lane in self.lanes)
        aligned = self._inputs(inputs, agree, reasons, final)
        return self._hand_out(aligned, upto, left, reasons, tuple(shifted), final)

    def _hand_out(
        self,
        aligned: tuple[Window[InputsBlock] | None, tuple[Unaligned, ...]],
        upto: dict[BlockKind, int],
        left: tuple[int, ...],
        reasons: Counter[str],
        shifted: tuple[Shifted, ...],
        final: bool,
    ) -> Aligned:
        taken = {
            kind: [lane.take(kind, OPEN if final else upto[kind]) for lane in self.lanes]
            for kind in upto
            if kind != "inputs"
        }
        inputs, unaligned = aligned
        self._remember_comparable(inputs)
        behind = OPEN if final else upto["inputs"] - 1
        calls = tuple(lane.take_calls(behind) for lane in self.lanes)
        ahead = self._ahead(upto["mask"])
        binds = tuple(
            (index, found)
            for index, lane in enumerate(self.lanes)
            if (found := lane.take_binds(behind)) is not None
        )
        chunk = Chunk(
            inputs=inputs,
            mask=self._same_steps(taken["mask"], range(len(self.lanes))),
            sent=self._same_steps(taken["sent"], self.group.last_stage),
            received=self._blocks(taken["received"], self._early, compared=True),
            consumed=self._blocks(taken["consumed"], self._early, compared=False),
            unaligned=unaligned,
            shifted=shifted,
            gaps=tuple(gap for lane in self.lanes for gap in lane.gaps),
            calls=calls,
            left=left,
            ahead=ahead,
            names=self.names,
            binds=binds,
        )
        self._settle(upto)
        return Aligned(chunk, dict(reasons))

    # ---- how far

    def _horizons(self, absent: frozenset[int], final: bool) -> dict[BlockKind, int]:
        """The last step of each kind that may be handed out now."""
        lanes = [lane for index, lane in enumerate(self.lanes) if index not in absent]
        newest = max(lane.newest for lane in self.lanes)
        if final or self._overfull():
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

    def _overfull(self) -> bool:
        return any(lane.pending_rows > PENDING_ROWS_MAX for lane in self.lanes)

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
        for lane in self.lanes:
            lane.gaps.forget(done - 4 * self._deferral_steps)
            lane.lacking.forget(self.judged + 1)
        self._recount.forget(self.judged)

    # ---- what

    def _inputs(
        self,
        blocks: Sequence[InputsBlock | None],
        agree: NDArray[np.bool_] | None,
        reasons: Counter[str],
        final: bool,
    ) -> tuple[Window[InputsBlock] | None, tuple[Unaligned, ...]]:
        """``agree``: at which steps all ranks ran the same batch, where the blocks have the same steps."""
        present = [block for block in blocks if block is not None]
        if not present:
            return None, ()
        if len(present) == len(blocks) and same_steps(present):
            return self._same_batches(present, agree, reasons)
        union = np.unique(np.concatenate([block.step for block in present]))
        common = union
        for lane, block in zip(self.lanes, blocks, strict=True):
            steps = np.zeros(0, np.int64) if block is None else block.step
            has = np.isin(union, steps)
            self._count_missing(present, union[~has & np.isin(union, common)], lane, reasons, final)
            common = common[np.isin(common, steps)]
        kept = in_common(present) if len(common) else None
        return (None, ()) if kept is None else self._same_batches(kept, None, reasons)

    def _count_missing(
        self, blocks: list[InputsBlock], steps: I64, lane: Lane, reasons: Counter[str], final: bool
    ) -> None:
        """Count the rows of steps that a lane lacks, each step once."""
        if not len(steps):
            return
        rows = rows_of(steps, blocks)
        uncounted = np.zeros(len(steps), np.bool_)
        for first, last in lane.lacking:
            uncounted |= (first <= steps) & (steps <= last)
        passed = (steps < lane.newest) & ~uncounted
        behind = NOT_CONSUMED if final and lane.heard else RANK_MISSING
        for reason, which in (
            (ORDINALS_SHIFTED, uncounted),
            (GAP, passed),
            (behind, ~passed & ~uncounted),
        ):
            if count := int(rows[which].sum()):
                reasons[reason] += count

    def _same_batches(
        self, blocks: list[InputsBlock], agree: NDArray[np.bool_] | None, reasons: Counter[str]
    ) -> tuple[Window[InputsBlock] | None, tuple[Unaligned, ...]]:
        indices = tuple(range(len(blocks)))
        agree = fingerprints_agree(blocks) if agree is None else agree
        unclear = self._recount.unclear(blocks[0].step)
        if unclear.any():
            reasons[ORDINALS_SHIFTED] += int(rows_of(blocks[0].step[unclear], blocks).sum())
            blocks = [select(block, ~unclear) for block in blocks]
            agree = agree[~unclear]
        if agree.all():
            return (Window(self.group, indices, tuple(blocks)) if len(agree) else None), ()
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
                block = select(block, among(block.step, self._comparable))
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
        wanted = among(common, self._comparable)
        if not same or not wanted.all():
            common = common[wanted]
            chosen = [select(block, np.isin(block.step, common)) for block in chosen]
            equal = np.logical_and.reduce([chosen[0].rows == block.rows for block in chosen])
            chosen = [select(block, equal) for block in chosen]
        return Window(self.group, tuple(indices), tuple(chosen)) if len(chosen[0].step) else None
