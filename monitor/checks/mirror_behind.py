"""I5, the host's side: the optimistic mirror of num_computed may lead the device, never trail it."""

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from stagewatch.monitor.checks.base import Chunk, Finding, Phase
from stagewatch.monitor.history import History
from stagewatch.monitor.incidents import Severity, Value
from stagewatch.monitor.windows import Group, life_of


class MirrorBehind:
    """A device count above the host's mirror means that rejected drafts were not subtracted on that rank."""

    NAME: ClassVar = "mirror-behind"
    COMPARES: ClassVar = "the host's mirror of num_computed with the device's count, on each rank by itself"
    SEVERITY: ClassVar = "warning"
    EXCEPTIONS: ClassVar = "the mirror's lead, up to the drafts in flight"
    REMEDY: ClassVar = (
        "The blamed rank counts tokens that the scheduler knows were rejected, and writes KV at wrong positions. "
        "Restart the engine; look at how this rank consumes num_rejected."
    )

    def examine(self, chunk: Chunk, group: Group, history: History) -> Iterable[Finding]:
        """Every row whose device count overtook its mirror, rank by rank."""
        window = chunk.inputs
        if window is None:
            return
        reference = window.blocks[-1]
        for index, block in zip(window.indices, window.blocks, strict=True):
            for row in np.flatnonzero(block.mirror < block.computed).tolist():
                at, in_step = window.locate(row)
                rank = group.number(index)
                yield Finding(
                    check=self.NAME,
                    severity=Severity.WARNING,
                    step=int(window.steps[at]),
                    phase=Phase.INPUTS,
                    text=f"rank {rank}'s device count {int(block.computed[row])} overtook its mirror "
                    f"{int(block.mirror[row])}",
                    remedy=self.REMEDY,
                    request=int(reference.request[row]),
                    life=life_of(reference, row),
                    row=in_step,
                    ranks=(rank,),
                    blamed=(rank,),
                    fields=("num_computed",),
                    values=(Value(rank, "num_computed", str(int(block.computed[row]))),),
                    t_ns=int(block.t_ns[at]),
                )
