"""What checks of liveness look at: how far each rank has come, and when it was last heard of."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from stagewatch.agents.identity import Identity
from stagewatch.monitor.calls import Entry
from stagewatch.monitor.checks.base import Finding
from stagewatch.monitor.windows import Group


@dataclass(frozen=True, slots=True)
class RankProgress:
    """One rank, as far as its evidence tells."""

    index: int
    identity: Identity | None
    """None for a rank never heard of."""
    armed: bool
    reason: str
    newest_step: int
    heard_ns: int
    """Wall clock of the last frame, a heartbeat included."""
    moved_ns: int
    """Wall clock of the last frame that showed progress: a step or a collective."""
    calls: tuple[Entry, ...]
    """Calls of the newest steps, in order; `STEPS_OF_CALLS` steps of them."""
    before: Mapping[tuple[str, str], frozenset[tuple[str, str]]]
    """For each (group, operation): those that came before it in every earlier step of this rank."""
    shared_calls: int
    """Calls entered so far that data-parallel replicas share; negative where records were lost, so that some are not
    counted."""
    last_shared: Entry | None
    lossy: bool
    """Whether records of its newest steps were lost, so that calls may be missing here."""

    def always_before(self, kind: tuple[str, str]) -> frozenset[tuple[str, str]]:
        """Calls, as (group, operation), that never came after ``kind`` in a step with both."""
        return self.before.get(kind, frozenset())


@dataclass(frozen=True, slots=True)
class Progress:
    """All ranks of a group at one moment."""

    group: Group
    ranks: tuple[RankProgress, ...]
    now_ns: int
    first_heard_ns: int
    newest_requests: tuple[str, ...]
    """Requests that joined the batch in the newest step any rank began."""

    @property
    def newest_step(self) -> int:
        """Newest step that any rank began."""
        return max((rank.newest_step for rank in self.ranks), default=0)


class LivenessCheck(Protocol):
    """Looks at progress, about once a second."""

    NAME: ClassVar[str]
    INVARIANT: ClassVar[str]
    COMPARES: ClassVar[str]
    SEVERITY: ClassVar[str]
    EXCEPTIONS: ClassVar[str]
    REMEDY: ClassVar[str]

    def look(self, progress: Progress) -> Iterable[Finding]:
        """Findings at this moment; the same one may be returned again as long as it holds."""
        ...
