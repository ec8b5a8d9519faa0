"""I5: how many tokens of a request each rank believes to be computed."""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from stagewatch.monitor.checks.base import Finding
from stagewatch.monitor.checks.fields import difference, previous_broadcast
from stagewatch.monitor.history import History
from stagewatch.monitor.windows import InputsWindow


class PositionDrift:
    """The device's count of computed tokens must be equal on all ranks once deferred updates are consumed."""

    NAME: ClassVar = "position-drift"
    COMPARES: ClassVar = "the device's num_computed of every row, between all ranks"
    EXCEPTIONS: ClassVar = "the host's mirror, which runs ahead by design while drafts are in flight"
    REMEDY: ClassVar = (
        "The blamed rank did not subtract the rejected drafts of the row's last step, or subtracted them twice; it "
        "writes KV where no other rank looks. Restart the engine; report the first bad step with its evidence."
    )

    def differs(self, window: InputsWindow) -> NDArray[np.bool_] | None:
        """Rows whose device count differs between ranks."""
        return window.differing("computed")

    def explain(self, window: InputsWindow, row: int, history: History) -> Finding:
        """Blame whoever's count does not follow from its last step and the last stage's broadcast."""
        broadcast = previous_broadcast(window, row, history)
        expected = None
        if broadcast:
            seen, sent = broadcast
            before = set(seen.window.values("computed", seen.row).tolist())
            if len(before) == 1:
                expected = int(before.pop()) + int(seen.reference.scheduled[seen.row]) - sent.num_rejected
        values = window.values("computed", row)
        drift = int(values.max()) - int(values.min())
        return difference(
            self.NAME,
            self.REMEDY,
            window,
            row,
            (("num_computed", "computed"),),
            expected=expected,
            sampled=False,
            text=f"device counts of computed tokens drift apart by {drift}",
        )
