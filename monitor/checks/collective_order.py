"""I7: the ordered list of collectives that each rank enters, with sizes and dtypes.

Collectives are recorded before the call, so a mismatch is on record even if the call never returns. Libraries
differ: NCCL hangs on unequal sizes, gloo lets them pass and delivers garbage.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from stagewatch.agents.evidence import EventBlock
from stagewatch.agents.record import Kind
from stagewatch.monitor.checks.base import Chunk, Finding, Phase
from stagewatch.monitor.history import History
from stagewatch.monitor.incidents import Severity, Value
from stagewatch.monitor.windows import Group

POINT_TO_POINT: Final = frozenset({"send", "receive", "recv", "isend", "irecv"})
"""Operations whose two ends differ by nature."""
WAITING_MAX: Final = 65_536


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective of one rank."""

    step: int
    what: str
    """Group, operation and dtype."""
    numel: int
    t_ns: int

    @property
    def group(self) -> str:
        """Name of the communicator."""
        return self.what.partition(" ")[0]

    @property
    def op(self) -> str:
        """Name of the operation."""
        return self.what.split(" ")[1] if " " in self.what else ""

    @property
    def size(self) -> str:
        """For people: what, and how many elements."""
        return f"{self.what} of {self.numel}"


def entries(events: EventBlock) -> Iterator[Entry]:
    """The collectives among a rank's events, in order."""
    places = np.flatnonzero(events.kind == Kind.COLLECTIVE)
    steps, numels, times = (
        events.step[places].tolist(),
        events.numel[places].tolist(),
        events.t_ns[places].tolist(),
    )
    for place, step, numel, t_ns in zip(places.tolist(), steps, numels, times, strict=True):
        yield Entry(step, events.text[place], numel, t_ns)


def peers(group: Group, name: str) -> list[tuple[int, ...]]:
    """Sets of rank indices that share communicators of a name: by stage for ``tp...``, across stages for ``pp...``."""
    pp, tp = group.sizes.pp, group.sizes.tp
    if name.startswith("tp"):
        return [tuple(range(stage * tp, (stage + 1) * tp)) for stage in range(pp)]
    if name.startswith("pp"):
        return [tuple(range(t, pp * tp, tp)) for t in range(tp)]
    return [tuple(range(pp * tp))]


class CollectiveOrder:
    """Ranks that share a communicator must enter the same calls, of the same size, in the same order."""

    NAME: ClassVar = "collective-order"
    COMPARES: ClassVar = "per communicator and step, the ordered operations with element count and dtype"
    EXCEPTIONS: ClassVar = (
        "point-to-point calls, whose ends differ; steps of which a rank's record is incomplete; communicators "
        "across data-parallel replicas"
    )
    REMEDY: ClassVar = (
        "Ranks enter different collectives: NCCL will hang, gloo will deliver wrong data. If sampled tokens are sent "
        "narrower than they are received, the engine predates working PP with speculation: use vLLM 0.30 or later."
    )

    def __init__(self) -> None:
        self._waiting: dict[int, deque[Entry]] = {}

    def examine(self, chunk: Chunk, group: Group, history: History) -> Iterable[Finding]:
        """Compare the collectives of steps that every rank has left behind."""
        for index, events in chunk.events:
            self._waiting.setdefault(index, deque(maxlen=WAITING_MAX)).extend(entries(events))
        done: dict[int, list[Entry]] = {}
        for index, waiting in self._waiting.items():
            done[index] = []
            while waiting and waiting[0].step < chunk.complete_to:
                entry = waiting.popleft()
                if _comparable(entry) and entry.step > chunk.incomplete_to:
                    done[index].append(entry)
        yield from compare(self.NAME, self.REMEDY, group, done)
        yield from self._ahead(chunk, group)

    def _ahead(self, chunk: Chunk, group: Group) -> Iterator[Finding]:
        """Compare what ranks entered so far in steps that some have not left: the call may never return."""
        steps = sorted({entry.step for waiting in self._waiting.values() for entry in waiting})
        for step in steps:
            if step < chunk.complete_to or step <= chunk.incomplete_to:
                continue
            here = {
                index: [entry for entry in waiting if entry.step == step and _comparable(entry)]
                for index, waiting in self._waiting.items()
            }
            yield from compare(self.NAME, self.REMEDY, group, here, entered_by_all=True)


def _comparable(entry: Entry) -> bool:
    return entry.op not in POINT_TO_POINT and not entry.group.startswith("dp")


def compare(
    check: str, remedy: str, group: Group, done: dict[int, list[Entry]], *, entered_by_all: bool = False
) -> Iterator[Finding]:
    """Findings for every communicator whose ranks' lists differ, at the first difference of each step.

    With ``entered_by_all`` only calls that every peer has entered are compared: the rest may yet come.
    """
    names = {entry.group for mine in done.values() for entry in mine}
    for name in sorted(names):
        for indices in peers(group, name):
            lists = [[entry for entry in done.get(index, []) if entry.group == name] for index in indices]
            if entered_by_all:
                shortest = min(len(mine) for mine in lists)
                lists = [mine[:shortest] for mine in lists]
            calls = [[(entry.step, entry.what, entry.numel) for entry in mine] for mine in lists]
            if all(mine == calls[0] for mine in calls[1:]):
                continue
            steps = sorted({entry.step for mine in lists for entry in mine})
            for step in steps:
                here = [[entry for entry in mine if entry.step == step] for mine in lists]
                finding = _difference(check, remedy, group, name, indices, here, step)
                if finding is not None:
                    yield finding


def _difference(
    check: str,
    remedy: str,
    group: Group,
    name: str,
    indices: Sequence[int],
    lists: Sequence[Sequence[Entry]],
    step: int,
) -> Finding | None:
    longest = max(len(mine) for mine in lists)
    for place in range(longest):
        sizes = [mine[place].size if place < len(mine) else "none" for mine in lists]
        if len(set(sizes)) == 1:
            continue
        common, count = Counter(sizes).most_common(1)[0]
        blamed: tuple[int, ...] = ()
        if count * 2 > len(sizes) > 2:
            blamed = group.numbers([i for i, size in zip(indices, sizes, strict=True) if size != common])
        described = ", ".join(
            f"{size} on rank {group.number(i)}" for i, size in zip(indices, sizes, strict=True)
        )
        return Finding(
            check=check,
            severity=Severity.CRITICAL,
            step=step,
            phase=Phase.SENT,
            text=f"call {place + 1} of the step on {name} differs: {described}",
            remedy=remedy,
            ranks=blamed or group.numbers(indices),
            blamed=blamed,
            fields=("collective",),
            values=tuple(
                Value(group.number(i), "collective", size) for i, size in zip(indices, sizes, strict=True)
            ),
            t_ns=min(entry.t_ns for mine in lists for entry in mine),
        )
    return None
