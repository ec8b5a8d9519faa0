"""The watch: evidence in, incidents out. Everything between the collector's door and its outputs.

Single-threaded and deterministic: what it says depends only on the evidence and on the times it is told.
"""

from dataclasses import dataclass, field
from typing import Literal

from stagewatch.agents.evidence import Evidence
from stagewatch.agents.identity import Identity, Rank
from stagewatch.monitor.incidents import Incident, Severity


@dataclass(frozen=True, slots=True)
class Change:
    """An incident was opened, or rose in severity, or learned more."""

    kind: Literal["opened", "raised", "updated"]
    incident: Incident


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank as last heard of."""

    identity: Identity
    armed: bool
    reason: str
    """Why it is not armed."""
    last_step: int
    last_heard_ns: int
    margin_s: float
    lost_records: int


@dataclass(frozen=True, slots=True)
class EngineState:
    """One data-parallel replica of one life of an engine."""

    deployment: str
    instance: str
    dp: int
    ranks: tuple[RankState, ...]
    missing: tuple[Rank, ...]
    """Ranks of the group that were never heard of."""
    compared_to: int
    """Every step up to this ordinal has its verdicts."""
    verdicts: dict[str, int]
    """Row counts by verdict: ``consistent``, ``diverged``, and ``indeterminate:REASON`` for each reason."""
    worst: Severity | None
    wedged: str
    """Empty, or why the engine is considered stuck."""


@dataclass
class Watch:
    """All engines of one collector. Raises nothing for bad evidence: it is counted and judged INDETERMINATE."""

    engines: dict[tuple[str, int], object] = field(default_factory=dict)

    def hello(self, identity: Identity) -> None:
        """A rank's stream begins, or begins again."""
        raise NotImplementedError

    def take(self, instance: str, rank: Rank, evidence: Evidence, margin_s: float, now_ns: int) -> list[Change]:
        """Take one batch of a rank that said hello, and judge whatever became comparable."""
        raise NotImplementedError

    def tick(self, now_ns: int) -> list[Change]:
        """Judge what only the passing of time can tell: silent ranks, stalls. Call about once a second."""
        raise NotImplementedError

    def states(self) -> list[EngineState]:
        """Every engine, newest first."""
        raise NotImplementedError
