"""Windows: the same steps as several ranks recorded them, side by side.

A window is what checks look at. Its blocks have equal ``step`` and ``rows`` columns, one block per rank in
rank order, so a row's index is the same in all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.evidence import I64, InputsBlock, MaskBlock, PayloadBlock
from stagewatch.agents.identity import Rank, Sizes
from stagewatch.agents.record import I32

B = TypeVar("B", InputsBlock, MaskBlock, PayloadBlock)


@dataclass(frozen=True)
class Group:
    """The ranks that execute the same batches: all stages and TP ranks of one data-parallel replica."""

    deployment: str
    instance: str
    dp: int
    sizes: Sizes

    @cached_property
    def ranks(self) -> tuple[Rank, ...]:
        """Every rank of the group, first stage first."""
        return tuple(Rank(self.dp, pp, tp) for pp in range(self.sizes.pp) for tp in range(self.sizes.tp))

    def number(self, index: int) -> int:
        """The engine-wide number of the rank at ``index`` of `ranks`."""
        return self.dp * self.sizes.pp * self.sizes.tp + index

    def numbers(self, indices: Sequence[int] | NDArray[np.integer]) -> tuple[int, ...]:
        """Engine-wide numbers of several ranks."""
        return tuple(self.number(int(index)) for index in indices)

    @cached_property
    def last_stage(self) -> range:
        """Indices of the last stage's ranks: those that sample."""
        count = self.sizes.pp * self.sizes.tp
        return range(count - self.sizes.tp, count)


@dataclass(frozen=True)
class Window(Generic[B]):
    """Blocks of one kind over the same steps; ``indices[i]`` is the rank index of ``blocks[i]``."""

    group: Group
    indices: tuple[int, ...]
    blocks: tuple[B, ...]

    @property
    def steps(self) -> I64:
        """Ordinals, ascending: int64 [steps]."""
        return self.blocks[0].step

    @cached_property
    def row_steps(self) -> I64:
        """The ordinal of each row's step: int64 [rows]."""
        return np.repeat(self.blocks[0].step, self.blocks[0].rows)

    @cached_property
    def starts(self) -> I64:
        """Where each step's rows begin, and where the last one's end: int64 [steps + 1]."""
        return starts_of(self.blocks[0].rows)

    def differing(self, column: str) -> NDArray[np.bool_] | None:
        """Rows in which some rank's value differs from another's: bool [rows], or None where all agree.

        Whoever asks again is told what was found the first time; nobody may write to it.
        """
        if column not in self._differing:
            self._differing[column] = self._compared(column)
        return self._differing[column]

    def _compared(self, column: str) -> NDArray[np.bool_] | None:
        reference = getattr(self.blocks[0], column)
        found: NDArray[np.bool_] | None = None
        for block in self.blocks[1:]:
            other = getattr(block, column)
            unequal = reference != other
            if unequal.any():
                found = unequal if found is None else found | unequal
        return found

    @cached_property
    def _differing(self) -> dict[str, NDArray[np.bool_] | None]:
        """What was compared already."""
        return {}

    def values(self, column: str, row: int) -> NDArray[Any]:
        """One row's values, rank by rank: [ranks]."""
        return np.array([getattr(block, column)[row] for block in self.blocks])

    def locate(self, row: int) -> tuple[int, int]:
        """(index of the step, index of the row within it) of a row of the window."""
        at = int(np.searchsorted(self.starts, row, side="right")) - 1
        return at, row - int(self.starts[at])


def starts_of(rows: I32) -> I64:
    """Where each step's rows begin, and where the last one's end: int64 [steps + 1]."""
    starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(rows, out=starts[1:])
    return starts


InputsWindow = Window[InputsBlock]
MaskWindow = Window[MaskBlock]
PayloadWindow = Window[PayloadBlock]


def lives_of(block: InputsBlock | PayloadBlock) -> I64:
    """Each row's life: slot and generation in one number. int64 [rows].

    Taken from the last stage's last rank, a life tells a request before a preemption from the same one after
    it, whatever slots other ranks use. The generation alone does not: another slot may be at the same one.
    """
    return (block.slot.astype(np.int64) << 32) | block.generation.astype(np.int64)


def life_of(block: InputsBlock | PayloadBlock, row: int) -> int:
    """The life of one row."""
    return int(block.slot[row]) << 32 | int(block.generation[row])


def raw_tokens(block: InputsBlock, row: int, column: str) -> str | None:
    """Raw tokens of one row for display: ``ids``, ``last`` or ``drafts``; None where they stayed on the node."""
    if not len(block.raw_last):
        return None
    if column == "last":
        return str(int(block.raw_last[row]))
    if column == "ids":
        end = int(block.scheduled[: row + 1].sum())
        return str(block.raw_ids[end - int(block.scheduled[row]) : end].tolist())
    widths = np.repeat(block.drafts, block.rows)
    start = int(widths[:row].sum())
    used = min(int(block.draft_count[row]), int(widths[row]))
    return str(cast("list[int]", block.raw_drafts[start : start + used].tolist()))
