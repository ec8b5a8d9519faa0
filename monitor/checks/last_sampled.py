"""I3: the last sampled token that each rank holds for a decoding row."""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from stagewatch.monitor.checks.base import Finding
from stagewatch.monitor.checks.fields import difference, previous_broadcast, sampled_before
from stagewatch.monitor.history import History
from stagewatch.monitor.windows import InputsWindow


class LastSampled:
    """Ranks must hold the token that the last stage sampled at the row's previous step."""

    NAME: ClassVar = "last-sampled-token"
    INVARIANT: ClassVar = "I3"
    COMPARES: ClassVar = "the last sampled token of every decoding row, between all ranks"
    SEVERITY: ClassVar = "critical"
    EXCEPTIONS: ClassVar = (
        "prefilling rows: their slot may still hold its former owner's token, which no step uses"
    )
    REMEDY: ClassVar = (
        "The blamed rank missed or overwrote the broadcast of the row's last step. Restart the engine to stop "
        "wrong text; then compare `sent`, `received` and `consumed` of that step in the evidence."
    )

    def differs(self, window: InputsWindow) -> NDArray[np.bool_] | None:
        """Decoding rows whose last sampled token differs between ranks."""
        found = window.differing("last_digest")
        return None if found is None else found & (window.blocks[-1].prefilling == 0)

    def explain(self, window: InputsWindow, row: int, history: History) -> Finding:
        """Blame whoever does not hold what the last stage sent."""
        broadcast = previous_broadcast(window, row, history)
        return difference(
            self.NAME,
            self.REMEDY,
            window,
            row,
            (("last_sampled_tokens", "last_digest"),),
            expected=broadcast[1].last_digest if broadcast else None,
            sampled=sampled_before(window, row, history),
            relayed=True,
            text="ranks hold different last sampled tokens",
        )
