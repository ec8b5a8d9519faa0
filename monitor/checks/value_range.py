"""I16: values that no sound engine can hold, whichever rank holds them."""

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Final

import numpy as np

from stagewatch.agents.evidence import (
    SUSPECT_COUNTS,
    SUSPECT_ID_BEYOND_VOCAB,
    SUSPECT_ID_NEGATIVE,
    SUSPECT_POSITION,
)
from stagewatch.monitor.checks.base import Chunk, Finding, Phase
from stagewatch.monitor.history import History
from stagewatch.monitor.incidents import Severity
from stagewatch.monitor.windows import Group, Window

_MEANING: Final = {
    SUSPECT_ID_NEGATIVE: ("a negative token id (a placeholder that was not replaced)", "input_ids"),
    SUSPECT_ID_BEYOND_VOCAB: ("a token id beyond the vocabulary", "input_ids"),
    SUSPECT_POSITION: ("a position outside the model's length", "positions"),
    SUSPECT_COUNTS: ("impossible counts of sampled and rejected tokens", "num_sampled"),
}


class ValueRange:
    """Token ids lie in the vocabulary, positions below the model's length, counts within the draft block."""

    NAME: ClassVar = "value-range"
    COMPARES: ClassVar = (
        "ids and positions fed; ids and counts sent, received and consumed, on each rank by itself"
    )
    EXCEPTIONS: ClassVar = (
        "undefined columns and rows outside the mask; limits that the adapter does not know"
    )
    REMEDY: ClassVar = (
        "The blamed rank reads memory that was never written or was written by somebody else. Restart the engine; "
        "if it is a placeholder, the request was scheduled before its draft block arrived."
    )

    def examine(self, chunk: Chunk, group: Group, history: History) -> Iterable[Finding]:
        """Every flagged row; the sidecar looked at the tokens, which do not come here."""
        yield from self._flagged(chunk.inputs, Phase.INPUTS, "feeds")
        yield from self._flagged(chunk.sent, Phase.SENT, "sent")
        yield from self._flagged(chunk.received, Phase.RECEIVED, "received")
        yield from self._flagged(chunk.consumed, Phase.CONSUMED, "consumed")

    def _flagged(self, window: Window[Any] | None, phase: Phase, verb: str) -> Iterator[Finding]:
        if window is None:
            return
        for index, block in zip(window.indices, window.blocks, strict=True):
            flags = block.flags & sum(_MEANING)
            if phase is not Phase.INPUTS:
                flags = np.where(block.applied != 0, flags, 0)
            for row in np.flatnonzero(flags):
                at, in_step = _locate(block, int(row))
                rank = window.group.number(index)
                meanings = [_MEANING[bit] for bit in _MEANING if flags[row] & bit]
                yield Finding(
                    check=self.NAME,
                    severity=Severity.CRITICAL,
                    step=int(block.at[at]) if phase is Phase.CONSUMED else int(block.step[at]),
                    phase=phase,
                    text=f"rank {rank} {verb} {' and '.join(text for text, _ in meanings)}",
                    remedy=self.REMEDY,
                    request=int(block.request[row]),
                    generation=int(block.generation[row]),
                    row=in_step,
                    ranks=(rank,),
                    blamed=(rank,),
                    fields=tuple(field for _, field in meanings),
                    t_ns=int(block.t_ns[at]),
                )


def _locate(block: Any, row: int) -> tuple[int, int]:
    ends = np.cumsum(block.rows)
    at = int(np.searchsorted(ends, row, side="right"))
    return at, row - int(ends[at] - block.rows[at])
