"""I5 within a rank: a count of computed tokens must follow from the row's last step and what came of it.

Ranks that err alike agree with each other, and comparing them finds nothing. This check holds them to arithmetic.
"""

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from stagewatch.monitor.checks.base import Chunk, Finding, Phase
from stagewatch.monitor.history import History
from stagewatch.monitor.incidents import Severity, Value
from stagewatch.monitor.links import UNKNOWN
from stagewatch.monitor.windows import Group, life_of


class CountContinuity:
    """Computed before, plus scheduled, less rejected, is what must be computed now."""

    NAME: ClassVar = "count-continuity"
    INVARIANT: ClassVar = "I5"
    COMPARES: ClassVar = "the device's num_computed with what follows from the request's last step"
    SEVERITY: ClassVar = "warning"
    EXCEPTIONS: ClassVar = (
        "rows on which ranks differ (position-drift reports those); steps in between that are not on record; a last "
        "step whose broadcast is unknown or was skipped; a request that was preempted or started again"
    )
    REMEDY: ClassVar = (
        "All ranks count alike and wrongly: look at how rejected drafts and preempted steps are taken off the count, "
        "in the code that the ranks share, before trusting any output of this request."
    )

    def examine(self, chunk: Chunk, group: Group, history: History) -> Iterable[Finding]:
        """Every row whose count does not follow."""
        window, links = chunk.inputs, history.links
        if window is None or links is None:
            return
        block = window.blocks[-1]
        # A step that may have sampled and whose broadcast holds nothing was skipped: what came of it is unknown.
        known = links.complete & (links.computed != UNKNOWN) & (links.sampled != UNKNOWN)
        known &= ~links.samples | (links.sampled > 0)
        expected = links.computed + links.scheduled - links.rejected
        computed = block.computed.astype(np.int64)[links.row]
        wrong = known & (computed != expected)
        if not wrong.any():
            return
        apart = window.differing("computed")
        for place in np.flatnonzero(wrong).tolist():
            row = int(links.row[place])
            if apart is not None and apart[row]:
                continue
            at, in_step = window.locate(row)
            numbers = group.numbers(window.indices)
            yield Finding(
                check=self.NAME,
                severity=Severity.WARNING,
                step=int(window.steps[at]),
                phase=Phase.INPUTS,
                text=f"every rank counts {int(computed[place])}, but {int(expected[place])} follow from "
                f"step {int(links.step[place])}",
                remedy=self.REMEDY,
                request=int(block.request[row]),
                life=life_of(block, row),
                row=in_step,
                ranks=numbers,
                fields=("num_computed",),
                values=tuple(Value(number, "num_computed", str(int(computed[place]))) for number in numbers),
                t_ns=min(int(each.t_ns[at]) for each in window.blocks),
                absolves=True,
            )
