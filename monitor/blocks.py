"""Blocks on the collector's side: the kinds that are compared, and parts of them."""

from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.evidence import join, slice_steps

BlockKind = Literal["inputs", "mask", "sent", "received", "consumed"]
KINDS: Final[tuple[BlockKind, ...]] = ("inputs", "mask", "sent", "received", "consumed")


def select(block: Any, keep: NDArray[np.bool_]) -> Any:
    """The records of a block at the marked places."""
    if keep.all():
        return block
    edges = np.flatnonzero(np.diff(np.concatenate([[False], keep, [False]]).astype(np.int8)))
    runs = [slice_steps(block, int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return join(runs) if runs else slice_steps(block, 0, 0)
