"""Ranks' batches of the same ordinals, side by side: which steps all have, and at which they ran the same batch."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.evidence import I64, InputsBlock, slice_steps
from stagewatch.monitor.blocks import select

FINGERPRINT: Final = ("request", "scheduled", "draft_count")
"""Columns that are the same on all ranks, whatever their state is."""


def same_steps(blocks: Sequence[InputsBlock]) -> bool:
    """Whether all blocks have equal ``step`` columns."""
    return all(np.array_equal(blocks[0].step, block.step) for block in blocks[1:])


def among(steps: I64, others: I64) -> NDArray[np.bool_]:
    """Which of ``steps`` are among ``others``: bool [steps]. ``others`` ascend."""
    if not len(others):
        return np.zeros(len(steps), np.bool_)
    found: NDArray[np.bool_] = others[np.minimum(np.searchsorted(others, steps), len(others) - 1)] == steps
    return found


def rows_of(steps: I64, blocks: Sequence[InputsBlock]) -> I64:
    """Rows of each step: the most that any rank recorded. int64 [steps]."""
    rows = np.zeros(len(steps), np.int64)
    for block in blocks:
        _, at, place = np.intersect1d(steps, block.step, assume_unique=True, return_indices=True)
        rows[at] = np.maximum(rows[at], block.rows[place])
    return rows


def fingerprints_agree(blocks: list[InputsBlock]) -> NDArray[np.bool_]:
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


def in_common(blocks: Sequence[InputsBlock]) -> list[InputsBlock] | None:
    """The steps that all blocks have; None if there are none."""
    if same_steps(blocks):
        return list(blocks)
    common = blocks[0].step
    for block in blocks[1:]:
        common = common[np.isin(common, block.step)]
    return [select(block, np.isin(block.step, common)) for block in blocks] if len(common) else None
