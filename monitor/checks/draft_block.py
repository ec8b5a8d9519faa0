"""I4: the draft block that each rank holds for a row that verifies drafts."""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.evidence import DRAFTS_ALL_ZERO
from stagewatch.monitor.checks.base import Finding
from stagewatch.monitor.checks.fields import difference, previous_broadcast, sampled_before
from stagewatch.monitor.history import History
from stagewatch.monitor.windows import InputsWindow


class DraftBlock:
    """Ranks must hold the block that the last stage proposed at the row's previous step."""

    NAME: ClassVar = "draft-block"
    INVARIANT: ClassVar = "I4"
    COMPARES: ClassVar = "the draft tokens that a step uses, between all ranks"
    SEVERITY: ClassVar = "critical"
    EXCEPTIONS: ClassVar = "columns beyond the row's draft count: they are padding, and no step uses them"
    REMEDY: ClassVar = (
        "The blamed rank verifies drafts that the last stage never proposed, so accepted tokens and KV are wrong. "
        "If its block is all zero, this engine does not relay drafts between stages: use vLLM 0.30 or later, or "
        "switch speculation off. Otherwise restart the engine and look at the payload of the row's last step."
    )

    def differs(self, window: InputsWindow) -> NDArray[np.bool_] | None:
        """Rows with drafts whose used block differs between ranks."""
        found = window.differing("draft_digest")
        return None if found is None else found & (window.blocks[-1].draft_count > 0)

    def explain(self, window: InputsWindow, row: int, history: History) -> Finding:
        """Blame whoever does not hold what the last stage proposed; say if no block ever came."""
        broadcast = previous_broadcast(window, row, history)
        expected = None
        if broadcast and broadcast[1].drafts == int(window.blocks[-1].draft_count[row]):
            expected = broadcast[1].draft_digest
        zero = [
            window.group.number(index)
            for index, block in zip(window.indices, window.blocks, strict=True)
            if block.flags[row] & DRAFTS_ALL_ZERO
        ]
        never_relayed = bool(zero) and len(zero) < len(window.blocks)
        text = "ranks hold different draft blocks"
        if never_relayed:
            text = f"draft block never relayed: all zero on rank {', '.join(map(str, zero))}"
        return difference(
            self.NAME,
            self.REMEDY,
            window,
            row,
            (("draft_tokens", "draft_digest"),),
            expected=expected,
            sampled=sampled_before(window, row, history),
            relayed=True,
            text=text,
        )
