"""Alignment: brings ranks' evidence of the same steps together, and says of every other step why it cannot.

Every rank's evidence comes in the order it was recorded, so once a rank has delivered a step, any step
below that it did not deliver is missing for good. The horizon is the newest step that every rank has
reached; everything up to it gets its verdict.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.evidence import (
    I64,
    EventBlock,
    Evidence,
    InputsBlock,
    join,
    slice_steps,
)
from stagewatch.monitor.checks.base import Chunk, Unaligned
from stagewatch.monitor.windows import Group, Window

RANK_MISSING: Final = "rank_missing"
"""A rank of the group was never heard of, or fell silent."""
GAP: Final = "gap"
"""A rank went past the step without delivering it: its ring was overrun, or its stream lost it."""
BATCH_DIFFERS: Final = "batch_differs"
"""Ranks recorded different batches under one ordinal, so rows have no counterpart."""

PENDING_ROWS_MAX: Final = 4_000_000
"""Rows held for ranks that lag; past it the laggards' steps become INDETERMINATE."""

BlockKind = Literal["inputs", "mask", "sent", "received", "consumed"]
PER_STEP_KINDS: Final[tuple[BlockKind, ...]] = ("mask", "sent", "received", "consumed")
FINGERPRINT: Final = ("request", "scheduled", "draft_count")


class Lane:
    """One rank's evidence that waits for the other ranks'."""

    def __init__(self) -> None:
        self.newest = 0
        """Newest step whose inputs arrived."""
        self.heard = False
        self.incomplete_to = 0
        """Last step whose records may be incomplete, since some were lost before it."""
        self.late_rows = 0
        """Rows that arrived after their step had its verdict."""
        self._pending: dict[BlockKind, list[Any]] = {
            "inputs": [],
            "mask": [],
            "sent": [],
            "received": [],
            "consumed": [],
        }
        self.events: list[EventBlock] = []

    def push(self, evidence: Evidence, judged: int) -> None:
        """Add evidence; inputs of steps up to ``judged`` come too late and are counted."""
        self.heard = True
        inputs = evidence.inputs
        if inputs is not None and len(inputs.step):
            late = int(np.searchsorted(inputs.step, judged, side="right"))
            self.late_rows += int(inputs.rows[:late].sum())
            if late < len(inputs.step):
                self._pending["inputs"].append(slice_steps(inputs, late, len(inputs.step)))
            if evidence.lost:
                self.incomplete_to = int(inputs.step[0])
            self.newest = max(self.newest, int(inputs.step[-1]))
        elif evidence.lost:
            self.incomplete_to = self.newest + 1
        for kind in PER_STEP_KINDS:
            block = getattr(evidence, kind)
            if block is not None and len(block.step):
                self._pending[kind].append(block)
        if evidence.events is not None:
            self.events.append(evidence.events)

    @property
    def pending_rows(self) -> int:
        """Rows of inputs that wait."""
        return sum(int(block.rows.sum()) for block in self._pending["inputs"])

    def newest_inputs(self) -> InputsBlock | None:
        """The newest inputs that wait; None if none do."""
        blocks = self._pending["inputs"]
        return blocks[-1] if blocks else None

    def newest_of(self, kind: BlockKind) -> int:
        """Newest step waiting of a kind; 0 if none."""
        blocks = self._pending[kind]
        return int(blocks[-1].step[-1]) if blocks else 0

    def take(self, kind: BlockKind, upto: int) -> Any | None:
        """Remove and return the records of a kind up to a step, as one block; None if there are none."""
        taken, kept = [], []
        for block in self._pending[kind]:
            order = block.at if kind == "consumed" else block.step
            end = int(np.searchsorted(order, upto, side="right"))
            if end:
                taken.append(slice_steps(block, 0, end))
            if end < len(order):
                kept.append(slice_steps(block, end, len(order)))
        self._pending[kind] = kept
        return join(taken) if taken else None


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
        self.lanes: Final = tuple(Lane() for _ in group.ranks)
        self.judged = 0
        """Every step up to this ordinal has been handed out or given up."""
        self._judged_masks = 0

    def advance(self, *, absent: frozenset[int] = frozenset(), final: bool = False) -> Aligned | None:
        """Hand out what is complete. ``absent`` are rank indices no longer waited for.

        With ``final`` nobody is waited for: the evidence has ended.
        """
        horizon = self._horizon(absent, final)
        masks_to = self._masks_horizon(horizon, final)
        quiet = not any(lane.events for lane in self.lanes)
        if horizon <= self.judged and masks_to <= self._judged_masks and quiet and not final:
            return None
        reasons: Counter[str] = Counter()
        # Payloads of a step are complete on a rank once it went on to the next.
        payloads_to = horizon if final else horizon - 1
        upto: dict[BlockKind, int] = {
            "inputs": horizon,
            "mask": masks_to,
            "sent": payloads_to,
            "received": payloads_to,
            "consumed": horizon,
        }
        taken = {kind: [lane.take(kind, upto[kind]) for lane in self.lanes] for kind in upto}
        inputs, unaligned = self._inputs(taken["inputs"], reasons)
        last = set(self.group.last_stage)
        early = [i for i in range(len(self.lanes)) if i not in last]
        events = tuple((index, join(lane.events)) for index, lane in enumerate(self.lanes) if lane.events)
        for lane in self.lanes:
            lane.events = []
        chunk = Chunk(
            inputs=inputs,
            mask=self._same_steps(taken["mask"], range(len(self.lanes))),
            sent=self._same_steps(taken["sent"], self.group.last_stage),
            received=self._same_steps(taken["received"], early),
            consumed=self._same_steps(taken["consumed"], early),
            unaligned=unaligned,
            complete_to=horizon,
            incomplete_to=max(lane.incomplete_to for lane in self.lanes),
            events=events,
        )
        self.judged = max(self.judged, horizon)
        self._judged_masks = max(self._judged_masks, masks_to)
        return Aligned(chunk, dict(reasons), self.judged)

    def newcomers(self) -> tuple[int, ...]:
        """Keys of requests that joined the batch in the newest step any rank began and others did not reach."""
        ahead = max(self.lanes, key=lambda lane: lane.newest)
        block = ahead.newest_inputs()
        if block is None or ahead.newest <= self.judged:
            return ()
        rows = int(block.rows[-1])
        first = block.mirror[len(block.request) - rows :] == 0
        return tuple(block.request[len(block.request) - rows :][first].tolist())

    def _horizon(self, absent: frozenset[int], final: bool) -> int:
        if final:
            return max(lane.newest for lane in self.lanes)
        present = [lane.newest for index, lane in enumerate(self.lanes) if index not in absent]
        crowded = any(lane.pending_rows > PENDING_ROWS_MAX for lane in self.lanes)
        if crowded:
            return max(lane.newest for lane in self.lanes)
        return min(present, default=0)

    def _masks_horizon(self, horizon: int, final: bool) -> int:
        """A rank records a step's mask and payloads before its next inputs; look no further than is whole."""
        if final:
            return horizon
        return horizon if all(lane.newest_of("mask") >= horizon for lane in self.lanes) else horizon - 1

    def _inputs(
        self, blocks: list[InputsBlock | None], reasons: Counter[str]
    ) -> tuple[Window[InputsBlock] | None, tuple[Unaligned, ...]]:
        present = [block for block in blocks if block is not None]
        if not present:
            return None, ()
        if len(present) < len(blocks):
            missing = any(not lane.heard for lane in self.lanes)
            reasons[RANK_MISSING if missing else GAP] += max(int(block.rows.sum()) for block in present)
            return None, ()
        common = present[0].step
        for block in present[1:]:
            if not np.array_equal(common, block.step):
                common = np.intersect1d(common, block.step, assume_unique=True)
        union = (
            np.unique(np.concatenate([block.step for block in present]))
            if any(len(block.step) != len(common) for block in present)
            else common
        )
        if len(union) > len(common):
            reasons[GAP] += _rows_outside(present, common)
        selected = [_select(block, np.isin(block.step, common)) for block in present]
        return self._same_batches(selected, reasons)

    def _same_batches(
        self, blocks: list[InputsBlock], reasons: Counter[str]
    ) -> tuple[Window[InputsBlock] | None, tuple[Unaligned, ...]]:
        indices = tuple(range(len(blocks)))
        if not len(blocks[0].step):
            return None, ()
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
        kept = tuple(_select(block, agree) for block in blocks)
        return (Window(self.group, indices, kept) if agree.any() else None), unaligned

    def _same_steps(self, blocks: list[Any], indices: Any) -> Window[Any] | None:
        """A window of the steps that all the given ranks have with equal row counts; None if there are none."""
        chosen = [blocks[index] for index in indices]
        if not chosen or any(block is None for block in chosen):
            return None
        first = chosen[0]
        if not all(np.array_equal(first.step, b.step) and np.array_equal(first.rows, b.rows) for b in chosen):
            common = first.step
            for block in chosen[1:]:
                common = np.intersect1d(common, block.step)
            chosen = [_select(block, np.isin(block.step, common)) for block in chosen]
            equal = np.logical_and.reduce([chosen[0].rows == block.rows for block in chosen])
            chosen = [_select(block, equal) for block in chosen]
        return Window(self.group, tuple(indices), tuple(chosen)) if len(chosen[0].step) else None


def _fingerprints_agree(blocks: list[InputsBlock]) -> NDArray[np.bool_]:
    """Steps at which all ranks recorded the same batch: bool [steps]. Blocks have equal ``step`` columns."""
    first = blocks[0]
    agree = np.ones(len(first.step), np.bool_)
    for block in blocks[1:]:
        if np.array_equal(first.rows, block.rows):
            for column in FINGERPRINT:
                a, b = getattr(first, column), getattr(block, column)
                if not np.array_equal(a, b):
                    bad = np.repeat(np.arange(len(first.step)), first.rows)[a != b]
                    agree[bad] = False
            continue
        for at in range(len(first.step)):
            one, other = slice_steps(first, at, at + 1), slice_steps(block, at, at + 1)
            agree[at] &= all(np.array_equal(getattr(one, c), getattr(other, c)) for c in FINGERPRINT)
    return agree


def _rows_outside(blocks: list[InputsBlock], common: I64) -> int:
    """Rows of steps that not every rank has, each step counted once."""
    counts: dict[int, int] = {}
    for block in blocks:
        outside = ~np.isin(block.step, common)
        for step, rows in zip(block.step[outside].tolist(), block.rows[outside].tolist(), strict=True):
            counts[step] = max(counts.get(step, 0), rows)
    return sum(counts.values())


def _select(block: Any, keep: NDArray[np.bool_]) -> Any:
    """The records of a block at the marked places."""
    if keep.all():
        return block
    edges = np.flatnonzero(np.diff(np.concatenate([[False], keep, [False]]).astype(np.int8)))
    runs = [slice_steps(block, int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return join(runs) if runs else slice_steps(block, 0, 0)
