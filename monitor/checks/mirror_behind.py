"""I5, the host's side: the optimistic mirror of num_computed may lead the device, never trail it."""

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from stagewatch.monitor.checks.base import Chunk, Finding, Phase
from stagewatch.monitor.history import History
from stagewatch.monitor.incidents import Severity, Value
from stagewatch.monitor.windows import Group, life_of


class MirrorBehind:
    """A device count above the host's mirror means that rejections were taken off the mirror twice, or not at all."""

    NAME: ClassVar = "mirror-behind"
    INVARIANT: ClassVar = "I5"
    COMPARES: ClassVar = "the host's mirror of num_computed with the device's count"
    SEVERITY: ClassVar = "warning; critical when the request's inputs then differ between ranks"
    EXCEPTIONS: ClassVar = (
        "the mirror's lead, by drafts in flight; rows on which ranks differ (position-drift reports those)"
    )
    REMEDY: ClassVar = (
        "The scheduler took tokens off this request's count that every rank has computed: look at what becomes of "
        "results that return after a preemption. Nothing this request says from here on can be trusted."
    )

    def examine(self, chunk: Chunk, group: Group, history: History) -> Iterable[Finding]:
        """Every row whose device count overtook its mirror on all ranks alike. No rank is to blame for that."""
        window = chunk.inputs
        if window is None:
            return
        block = window.blocks[-1]
        behind = block.mirror < block.computed
        if not behind.any():
            return
        apart = [rows for name in ("mirror", "computed") if (rows := window.differing(name)) is not None]
        for row in np.flatnonzero(behind & ~np.logical_or.reduce([*apart, ~behind])).tolist():
            at, in_step = window.locate(row)
            numbers = group.numbers(window.indices)
            computed, mirror = int(block.computed[row]), int(block.mirror[row])
            yield Finding(
                check=self.NAME,
                severity=Severity.WARNING,
                step=int(window.steps[at]),
                phase=Phase.INPUTS,
                text=f"the device counts {computed} computed tokens on every rank, the host's mirror only {mirror}",
                remedy=self.REMEDY,
                request=int(block.request[row]),
                life=life_of(block, row),
                row=in_step,
                ranks=numbers,
                fields=("num_computed_mirror",),
                values=tuple(Value(number, "num_computed_mirror", str(mirror)) for number in numbers),
                t_ns=min(int(each.t_ns[at]) for each in window.blocks),
                absolves=True,
            )
