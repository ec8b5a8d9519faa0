"""What the watch says of engines and ranks, for outputs to show."""

from dataclasses import dataclass
from typing import Literal

from stagewatch.agents.identity import Identity, Node, Rank
from stagewatch.monitor.incidents import Incident, Severity

ChangeKind = Literal["opened", "raised", "updated"]


@dataclass(frozen=True, slots=True)
class Change:
    """An incident was opened, or rose in severity, or learned more."""

    kind: ChangeKind
    incident: Incident


@dataclass(frozen=True, slots=True)
class StepSeen:
    """One rank's step, as it recorded it."""

    rank: Rank
    step: int
    t_ns: int
    """The rank's wall clock when the step's inputs were ready."""
    rows: int


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
    """Time until the ring's writer overtakes the sidecar; negative if unknown."""
    lost_records: int
    """Records that never came: overwritten or damaged in the ring, or left out by the sidecar."""
    left_out_records: int = 0
    """Of the lost ones, those that the sidecar had: the collector refused them, or no frame could hold them."""
    late_rows: int = 0
    """Rows that came twice, or after their step had its verdict."""
    late_records: int = 0
    """Payloads and masks of which the same is true, and calls given up."""
    probe_drops: int = 0
    """Records that the probe had to give up, as its last heartbeat says."""
    probe_ns: int = 0
    """Host time spent in the probe and its hooks, as far as heartbeats came; divide by `probe_steps`."""
    probe_steps: int = 0
    probe_p99_ns: int = 0
    """99th percentile of the probe's time of one step, over recent steps."""
    node: Node | None = None
    """What its sidecar told of itself last."""
    ended: bool = False
    """Whether the engine shut the rank down in good order: its silence is no news."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """When incidents of one kind were seen bad, first and last: what alerts and dashboards go by.

    Stays as it is once nothing is bad any more, and is the same after a restart of the collector.
    """

    check: str
    severity: Severity
    stage: int
    """The stage blamed; -1 where nobody is."""
    first_ns: int
    """Wall clock of the first bad step."""
    last_ns: int
    """Wall clock at which the newest bad step was judged."""


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
    rows_excluded: int = 0
    """Rows that the engine's mask dropped from the broadcast although they may have sampled."""
    rows_harmed: int = 0
    """Of these, rows whose request was found diverged afterwards."""
    broadcast_bytes: int = 0
    """Bytes that the last stage's first rank broadcast to the earlier stages."""
    broadcast_steps: int = 0
    """Steps with such a broadcast."""
    broadcast_rows: int = 0
    broadcast_rows_fixed: int = 0
    """Rows broadcast that the faulty mask of vLLM 0.23 to 0.29 would have left out: what the fix costs."""
    troubles: tuple[Trouble, ...] = ()
    heard_ns: int = 0
    """When any rank was last heard of."""

    @property
    def ended(self) -> bool:
        """Whether the engine was shut down in good order: every rank that could still say so did."""
        return any(rank.ended for rank in self.ranks) and all(
            rank.ended or not rank.armed for rank in self.ranks
        )
