"""I5: how many tokens of a request each rank believes to be computed."""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from stagewatch.monitor.checks.base import Finding
from stagewatch.monitor.checks.fields import difference, previous_broadcast
from stagewatch.monitor.history import History
from stagewatch.monitor.windows import InputsWindow


class PositionDrift:
    """Counts of computed tokens must be equal on all ranks once deferred updates are consumed."""

    NAME: ClassVar = "position-drift"
    INVARIANT: ClassVar = "I5"
    COMPARES: ClassVar = (
        "num_computed of every row, the device's and the host's mirror, each between all ranks"
    )
    SEVERITY: ClassVar = "critical"
    EXCEPTIONS: ClassVar = (
        "a mirror that leads its device's count: it runs ahead by design while drafts are in flight"
    )
    REMEDY: ClassVar = (
        "The blamed rank did not subtract the rejected drafts of the row's last step, or subtracted them twice; it "
        "writes KV where no other rank looks. Restart the engine; report the first bad step with its evidence."
    )

    def differs(self, window: InputsWindow) -> NDArray[np.bool_] | None:
        """Rows of which ranks count differently."""
        found = [rows for column in ("computed", "mirror") if (rows := window.differing(column)) is not None]
        return np.logical_or.reduce(found) if found else None

    def explain(self, window: InputsWindow, row: int, history: History) -> Finding:
        """Blame whoever's count does not follow from its last step and the last stage's broadcast."""
        device = set(window.values("computed", row).tolist())
        # The host's mirror runs ahead of what follows from the broadcast, so only the device's count is held to it.
        broadcast = previous_broadcast(window, row, history) if len(device) > 1 else None
        expected = None
        if broadcast:
            seen, sent = broadcast
            before = set(seen.window.values("computed", seen.row).tolist())
            if len(before) == 1:
                expected = int(before.pop()) + int(seen.reference.scheduled[seen.row]) - sent.num_rejected
        where = "device" if len(device) > 1 else "host"
        values = device if len(device) > 1 else set(window.values("mirror", row).tolist())
        drift = max(values) - min(values)
        return difference(
            self.NAME,
            self.REMEDY,
            window,
            row,
            (("num_computed", "computed"), ("num_computed_mirror", "mirror")),
            expected=expected,
            sampled=False,
            relayed=len(device) > 1 and not window.blocks[-1].prefilling[row],
            text=f"{where} counts of computed tokens drift apart by {drift}",
        )
