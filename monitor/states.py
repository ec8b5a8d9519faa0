"""What the watch says of engines and ranks, for outputs to show."""

from dataclasses import dataclass
from typing import Literal

from stagewatch.agents.identity import Identity, Rank
from stagewatch.monitor.incidents import Incident, Severity

ChangeKind = Literal["opened", "raised", "updated"]


@dataclass(frozen=True, slots=True)
class Change:
    """An incident was opened, or rose in severity, or learned more."""

    kind: ChangeKind
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
    """Row counts by verdict: ``CONSISTENT``, ``DIVERGED``, and the reasons of INDETERMINATE in lower case."""
    worst: Severity | None
    wedged: str
    """Empty, or why the engine is considered stuck."""
    drafts_accepted: int = 0
    """Draft tokens that the last stage accepted. Context, never a verdict: acceptance collapses without divergence
    and looks normal with it."""
    drafts_rejected: int = 0
    rows_sampled: int = 0
    rows_repeated: int = 0
    """Sampled rows that repeat, token for token, what their request's last step yielded. A symptom, no verdict."""
    late_rows: int = 0
    """Rows that came twice, or after their step had its verdict; they were left out."""
    late_records: int = 0
    """Payloads and masks of which the same is true, and calls given up."""
