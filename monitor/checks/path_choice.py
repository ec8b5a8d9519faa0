"""I13: choices that each rank takes for itself and that must come out the same."""

from collections.abc import Iterable
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.record import UNKNOWN
from stagewatch.monitor.blame import blame
from stagewatch.monitor.checks.base import Chunk, Finding, Phase
from stagewatch.monitor.history import History
from stagewatch.monitor.incidents import Severity, Value
from stagewatch.monitor.windows import Group, InputsWindow


class PathChoice:
    """TP peers run the same graph at the same padded size; every rank plans the same number of drafts."""

    NAME: ClassVar = "path-choice"
    INVARIANT: ClassVar = "I13"
    COMPARES: ClassVar = "graph mode and padded size between TP peers; planned draft tokens between all ranks"
    SEVERITY: ClassVar = "warning; critical when the engine then stands still"
    EXCEPTIONS: ClassVar = "graph mode and padding of different stages; choices that the adapter does not see"
    REMEDY: ClassVar = (
        "Ranks take different paths through the step and will wait for each other in different collectives. Look for "
        "a condition decided per rank: the drafter skipped near max_model_len, graphs captured on one rank only."
    )

    def examine(self, chunk: Chunk, group: Group, history: History) -> Iterable[Finding]:
        """One finding per step and choice that differs."""
        window = chunk.inputs
        if window is None:
            return
        every = tuple(range(len(window.blocks)))
        stages = [tuple(range(s * group.sizes.tp, (s + 1) * group.sizes.tp)) for s in range(group.sizes.pp)]
        yield from self._differs(window, "spec_tokens", every)
        for stage in stages if group.sizes.tp > 1 else []:
            yield from self._differs(window, "graph_mode", stage)
            yield from self._differs(window, "padded_tokens", stage)

    def _differs(self, window: InputsWindow, column: str, indices: tuple[int, ...]) -> Iterable[Finding]:
        values: NDArray[np.int32] = np.stack([getattr(window.blocks[index], column) for index in indices])
        known = (values != UNKNOWN).all(axis=0)
        for at in np.flatnonzero(known & (values != values[0]).any(axis=0)):
            held = [int(value) for value in values[:, at]]
            blamed = blame(window.group, indices, held, expected=None, sampled=False)
            yield Finding(
                check=self.NAME,
                severity=Severity.WARNING,
                step=int(window.steps[at]),
                phase=Phase.INPUTS,
                text=f"{column.replace('_', ' ')} differs between ranks",
                remedy=self.REMEDY,
                ranks=blamed or window.group.numbers(indices),
                blamed=blamed,
                fields=(column,),
                values=tuple(
                    Value(window.group.number(index), column, str(value))
                    for index, value in zip(indices, held, strict=True)
                ),
                t_ns=min(int(window.blocks[index].t_ns[at]) for index in indices),
            )
