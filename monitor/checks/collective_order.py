"""I7: the ordered list of collectives that each rank enters, with sizes and dtypes.

Collectives are recorded before the call, so a mismatch is on record even if the call never returns. Libraries
differ: NCCL hangs on unequal sizes, gloo lets them pass and delivers garbage.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from stagewatch.monitor.blame import outvoted
from stagewatch.monitor.calls import POINT_TO_POINT, Calls, Entry, Names, join_calls, peers
from stagewatch.monitor.checks.base import Chunk, Finding, Phase
from stagewatch.monitor.history import History
from stagewatch.monitor.incidents import Severity, Value
from stagewatch.monitor.windows import Group

ACROSS_REPLICAS: Final = "dp"
"""Communicators whose names begin so have members in other data-parallel replicas."""


class CollectiveOrder:
    """Ranks that share a communicator must enter the same calls, of the same size, in the same order."""

    NAME: ClassVar = "collective-order"
    INVARIANT: ClassVar = "I7"
    COMPARES: ClassVar = "per communicator and step, the ordered operations with element count and dtype"
    SEVERITY: ClassVar = "critical"
    EXCEPTIONS: ClassVar = (
        "point-to-point calls, whose ends differ; steps of which a rank's record is incomplete; calls that a rank may "
        "yet enter; communicators across data-parallel replicas, which the check for stalls compares"
    )
    REMEDY: ClassVar = (
        "Ranks enter different collectives: NCCL will hang, gloo will deliver wrong data. If sampled tokens are sent "
        "narrower than they are received, the engine predates working PP with speculation: use vLLM 0.30 or later."
    )

    def __init__(self) -> None:
        self._names_known = 0
        self._communicators: list[tuple[str, NDArray[np.bool_]]] = []

    def _communicators_of(self, names: Names) -> list[tuple[str, NDArray[np.bool_]]]:
        """Communicators within the group, and which numbers are calls of theirs that are not between two ranks."""
        if self._names_known != len(names.texts):
            found: dict[str, NDArray[np.bool_]] = {}
            for code, text in enumerate(names.texts):
                communicator, _, rest = text.partition(" ")
                if communicator.startswith(ACROSS_REPLICAS) or rest.partition(" ")[0] in POINT_TO_POINT:
                    continue
                found.setdefault(communicator, np.zeros(Names.MAX + 1, np.bool_))[code] = True
            self._names_known = len(names.texts)
            self._communicators = sorted(found.items(), key=lambda item: item[0])
        return self._communicators

    def examine(self, chunk: Chunk, group: Group, history: History) -> Iterable[Finding]:
        """Compare whole steps; of steps that some rank has not left, what all peers have entered so far."""
        if not chunk.calls:
            return
        calls = [join_calls([done, ahead]) for done, ahead in zip(chunk.calls, chunk.ahead, strict=True)]
        for communicator, belongs in self._communicators_of(chunk.names):
            for indices in peers(group, communicator):
                own = [_of(calls[index], belongs) for index in indices]
                if all(_equal(own[0], other) for other in own[1:]):
                    continue
                left = min(chunk.left[index] for index in indices)
                yield from self._compare(group, communicator, indices, own, left, chunk)

    def _compare(
        self,
        group: Group,
        communicator: str,
        indices: Sequence[int],
        calls: Sequence[Calls],
        left: int,
        chunk: Chunk,
    ) -> Iterator[Finding]:
        for step in np.unique(np.concatenate([own.step for own in calls])).tolist():
            if not chunk.whole(step):
                continue
            here = [[*own.where(own.step == step).entries(chunk.names)] for own in calls]
            if step > left:
                shortest = min(map(len, here))
                here = [entries[:shortest] for entries in here]
            found = self._difference(group, communicator, indices, here, step)
            if found is not None:
                yield found

    def _difference(
        self,
        group: Group,
        communicator: str,
        indices: Sequence[int],
        lists: Sequence[Sequence[Entry]],
        step: int,
    ) -> Finding | None:
        for place in range(max(map(len, lists))):
            sizes = [mine[place].size if place < len(mine) else "none" for mine in lists]
            if len(set(sizes)) == 1:
                continue
            blamed = outvoted(group, indices, sizes)
            described = ", ".join(
                f"{size} on rank {group.number(i)}" for i, size in zip(indices, sizes, strict=True)
            )
            return Finding(
                check=self.NAME,
                severity=Severity.CRITICAL,
                step=step,
                phase=Phase.CALLS,
                text=f"call {place + 1} of the step on {communicator} differs: {described}",
                remedy=self.REMEDY,
                row=indices[0],
                ranks=blamed or group.numbers(indices),
                blamed=blamed,
                fields=("collective",),
                values=tuple(
                    Value(group.number(i), "collective", size) for i, size in zip(indices, sizes, strict=True)
                ),
                t_ns=min(entry.t_ns for mine in lists for entry in mine),
            )
        return None


def _of(calls: Calls, belongs: NDArray[np.bool_]) -> Calls:
    if not len(calls):
        return calls
    own = belongs[calls.code]
    return calls if own.all() else calls.where(own)


def _equal(one: Calls, other: Calls) -> bool:
    return (
        np.array_equal(one.step, other.step)
        and np.array_equal(one.code, other.code)
        and np.array_equal(one.numel, other.numel)
    )
