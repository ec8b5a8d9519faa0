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
    INVARIANT: ClassVar = "I5"
    COMPARES: ClassVar = "the host's mirror of num_computed with the device's count, on each rank by itself"
    SEVERITY: ClassVar = "warning"
    EXCEPTIONS: ClassVar = "the mirror's lead, up to the drafts in flight"
    REMEDY: ClassVar = (
        "A rank counts tokens that the scheduler knows were rejected, or the scheduler took some off twice. "
        "Restart the engine; look at how num_rejected is consumed and what becomes of results of preempted requests."
    )

    def examine(self, chunk: Chunk, group: Group, history: History) -> Iterable[Finding]:
        """Every row whose device count overtook its mirror, rank by rank."""
        window = chunk.inputs
        if window is None:
            return
        behind = [block.mirror < block.computed for block in window.blocks]
        block = window.blocks[-1]
        for row in np.flatnonzero(np.logical_or.reduce(behind)).tolist():
            at, in_step = window.locate(row)
            wrong = [place for place, found in enumerate(behind) if found[row]]
            numbers = group.numbers([window.indices[place] for place in wrong])
            counts = [(each.computed[row], each.mirror[row]) for each in window.blocks]
            told = ", ".join(
                f"{counts[p][0]} > {counts[p][1]} on rank {n}" for p, n in zip(wrong, numbers, strict=True)
            )
            yield Finding(
                check=self.NAME,
                severity=Severity.WARNING,
                step=int(window.steps[at]),
                phase=Phase.INPUTS,
                text=f"the device's count overtook the host's mirror: {told}",
                remedy=self.REMEDY,
                request=int(block.request[row]),
                life=life_of(block, row),
                row=in_step,
                ranks=numbers,
                # Where it is so on every rank, the mirror that the scheduler sends to all of them may be what is wrong.
                blamed=numbers if len(wrong) < len(behind) else (),
                fields=("num_computed", "num_computed_mirror"),
                values=tuple(
                    Value(number, "num_computed", str(counts[p][0]))
                    for p, number in zip(wrong, numbers, strict=True)
                ),
                t_ns=min(int(each.t_ns[at]) for each in window.blocks),
            )
