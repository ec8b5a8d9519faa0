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
from stagewatch.monitor.windows import Group, life_of

_MEANING: Final = {
    SUSPECT_ID_NEGATIVE: ("a negative token id (a placeholder that was not replaced)", "input_ids"),
    SUSPECT_ID_BEYOND_VOCAB: ("a token id beyond the vocabulary", "input_ids"),
    SUSPECT_POSITION: ("a position outside the model's length", "positions"),
    SUSPECT_COUNTS: ("impossible counts of sampled and rejected tokens", "num_sampled"),
}
_ALL: Final = np.uint8(sum(_MEANING))


class ValueRange:
    """Token ids lie in the vocabulary, positions below the model's length, counts within the draft block."""

    NAME: ClassVar = "value-range"
    INVARIANT: ClassVar = "I16"
    COMPARES: ClassVar = (
        "ids and positions fed; ids and counts sent, received and consumed, on each rank by itself"
    )
    SEVERITY: ClassVar = "critical"
    EXCEPTIONS: ClassVar = (
        "undefined columns and rows outside the mask; limits that the adapter does not know"
    )
    REMEDY: ClassVar = (
        "The blamed rank reads memory that was never written or was written by somebody else. Restart the engine; "
        "if it is a placeholder, the request was scheduled before its draft block arrived."
    )

    def examine(self, chunk: Chunk, group: Group, history: History) -> Iterable[Finding]:
        """Every flagged row; the sidecar looked at the tokens, which do not come here."""
        inputs, sent = chunk.inputs, chunk.sent
        if inputs is not None:
            for index, block in zip(inputs.indices, inputs.blocks, strict=True):
                yield from self._flagged(group, index, block, Phase.INPUTS, "feeds", history)
        if sent is not None:
            for index, payload in zip(sent.indices, sent.blocks, strict=True):
                yield from self._flagged(group, index, payload, Phase.SENT, "sent", history)
        for index, payload in chunk.received:
            yield from self._flagged(group, index, payload, Phase.RECEIVED, "received", history)
        for index, payload in chunk.consumed:
            yield from self._flagged(group, index, payload, Phase.CONSUMED, "consumed", history)

    def _flagged(
        self, group: Group, index: int, block: Any, phase: Phase, verb: str, history: History
    ) -> Iterator[Finding]:
        flags = block.flags & _ALL
        if not flags.any():
            return
        if phase is not Phase.INPUTS:
            flags = np.where(block.applied != 0, flags, 0)
        ends = np.cumsum(block.rows)
        for row in np.flatnonzero(flags):
            at = int(np.searchsorted(ends, row, side="right"))
            rank, request = group.number(index), int(block.request[row])
            meanings = [_MEANING[bit] for bit in _MEANING if flags[row] & bit]
            life = history.life(request, int(block.step[at]))
            yield Finding(
                check=self.NAME,
                severity=Severity.CRITICAL,
                step=int(block.at[at]) if phase is Phase.CONSUMED else int(block.step[at]),
                phase=phase,
                text=f"rank {rank} {verb} {' and '.join(text for text, _ in meanings)}",
                remedy=self.REMEDY,
                request=request,
                life=life_of(block, int(row)) if life is None else life,
                row=int(row - ends[at] + block.rows[at]),
                ranks=(rank,),
                blamed=(rank,),
                fields=tuple(field for _, field in meanings),
                t_ns=int(block.t_ns[at]),
            )
