"""I6: the tokens and positions that each rank really feeds."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.evidence import FEED_IS_STATE
from stagewatch.monitor.checks.base import Finding
from stagewatch.monitor.checks.fields import difference, previous_broadcast
from stagewatch.monitor.history import History
from stagewatch.monitor.windows import InputsWindow


class InputDivergence:
    """All ranks of a step must build the same input window for a row."""

    NAME: ClassVar = "input-divergence"
    INVARIANT: ClassVar = "I6"
    COMPARES: ClassVar = "input ids and positions of every row's window, between all ranks"
    SEVERITY: ClassVar = "critical"
    EXCEPTIONS: ClassVar = "none: the global batch is compared, also under prefill context parallelism"
    REMEDY: ClassVar = (
        "Stages compute different tokens or positions for the same request: its text is wrong from here on. Restart "
        "the engine, and look at the row's state on each rank at the first bad step for which part came first."
    )

    def differs(self, window: InputsWindow) -> NDArray[np.bool_] | None:
        """Rows that some rank feeds differently."""
        masks = [window.differing(column) for column in ("ids_digest", "position", "position_shape")]
        found = [mask for mask in masks if mask is not None]
        return np.logical_or.reduce(found) if found else None

    def explain(self, window: InputsWindow, row: int, history: History) -> Finding:
        """Blame by what a rank's own state says of its feed; leave a state that differs to the checks of state."""
        block = window.blocks[-1]
        ids_differ = len(set(window.values("ids_digest", row).tolist())) > 1
        expected, judge = None, True
        if ids_differ and not block.prefilling[row]:
            # A decoding row feeds its last token and its drafts. Where these differ, the feed only follows.
            judge = False
        elif not ids_differ and (broadcast := previous_broadcast(window, row, history)):
            seen, sent = broadcast
            positions = set(seen.window.values("position", seen.row).tolist())
            if len(positions) == 1:
                expected = int(positions.pop()) + int(seen.reference.scheduled[seen.row]) - sent.num_rejected
        fields = (
            ("input_ids", "ids_digest"),
            ("positions", "position"),
            ("positions", "position_shape"),
        )
        found = difference(
            self.NAME,
            self.REMEDY,
            window,
            row,
            fields,
            expected=expected,
            sampled=False,
            relayed=not block.prefilling[row],
            text="ranks feed different inputs",
        )
        return found if judge else _by_own_state(found, window, row)


def _by_own_state(found: Finding, window: InputsWindow, row: int) -> Finding:
    """Blame the ranks that feed something else than their own token and drafts, if the others do not."""
    own = [bool(block.flags[row] & FEED_IS_STATE) for block in window.blocks]
    wrong: tuple[int, ...] = ()
    if any(own):
        wrong = window.group.numbers([i for i, fed in zip(window.indices, own, strict=True) if not fed])
    return replace(found, blamed=wrong, ranks=wrong or window.group.numbers(window.indices))
