"""Every metric, declared once: what `/metrics` serves, what is pushed over OTLP and what the docs' table lists.

Names are OpenTelemetry's, with dots; Prometheus sees underscores, the unit and ``_total``. Labels come from
`LABELS`, whose values are bounded; no request id is ever one.
"""

from dataclasses import dataclass
from typing import Final, Literal

from stagewatch.agents import wire

Kind = Literal["counter", "histogram", "observed counter", "observed gauge"]

LABELS: Final = (
    "deployment",
    "engine",
    "dp",
    "stage",
    "tp",
    "check",
    "severity",
    "verdict",
    "place",
    "reason",
)
"""Every label there is."""

LATENCY_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SYNC_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)

RECORD_DROPS: Final = {
    ("probe", "not_stored"): "no buffer was free, or the record did not fit",
    ("ring", "overwritten"): "overwritten or damaged before the sidecar read them",
    ("sidecar", "left_out"): "refused by the collector, or too long for a frame",
    ("alignment", "late_rows"): "rows that came after their step had its verdict",
    ("alignment", "late_records"): "payloads, masks and calls of which the same is true",
}
"""Where evidence of a rank is lost, by (place, reason), and what that means."""

DROPS: Final = {
    ("sidecar", "ring_removed"): "records of a ring that was removed before they were acknowledged",
    ("sidecar", "ring_unreadable"): "records of a ring that a sidecar cannot read on",
    (
        "windows",
        "dropped",
    ): "frozen windows removed for newer ones, and requests for some that newer ones overtook",
    ("windows", "not_frozen"): "windows not asked for in time, because too many waited for a rank's sidecar",
    ("journal", "unreadable"): "entries of the journal that this build cannot read",
    (
        "journal",
        "pinned",
    ): "segments with incidents' evidence removed because such evidence exceeded --pin-bytes",
    ("streams", "forgotten"): "positions of ranks silent for so long that their rings would be taken anew",
    ("store", "pruned"): "incidents beyond what is kept",
    ("events", "slow_reader"): "readers of the event stream disconnected because they were too slow",
    ("otlp", "queue_full"): "incidents not pushed because too many waited",
    ("otlp", "failed"): "incidents, or rounds of metrics, that the receiver did not take in time",
}
"""What stagewatch itself had to leave out, by (place, reason), and what that means."""


REFUSALS: Final = {
    "unauthenticated": "no token that is known",
    "forbidden": "the token is not good for this, or for this deployment",
    "too_many": "more sidecars, ranks, engines or readers than are allowed",
    "protocol": "a sidecar of another version",
    "identity": "a rank that contradicts itself, another rank or an earlier life",
    "no_hello": "evidence of a rank that did not introduce itself",
    "out_of_order": "evidence that does not continue its stream",
    "evidence": "evidence that contradicts itself",
    "malformed": "what is no frame",
    **wire.LIMITS,
}
"""Why frames and requests are refused, by reason."""


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def prometheus_name(self) -> str:
        """As Prometheus spells it."""
        suffix = {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        total = "_total" if self.kind in ("counter", "observed counter") else ""
        return self.name.replace(".", "_") + suffix + total


_ENGINE: Final = ("deployment", "engine", "dp")
_RANK: Final = (*_ENGINE, "stage", "tp")
_TROUBLE: Final = (*_ENGINE, "check", "severity", "stage")


def _counter(name: str, unit: str, text: str, *labels: str) -> Instrument:
    return Instrument(f"stagewatch.{name}", "counter", unit, text, labels)


def _sum(name: str, unit: str, text: str, *labels: str) -> Instrument:
    return Instrument(f"stagewatch.{name}", "observed counter", unit, text, labels)


def _gauge(name: str, unit: str, text: str, *labels: str) -> Instrument:
    return Instrument(f"stagewatch.{name}", "observed gauge", unit, text, labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Instrument:
    return Instrument(f"stagewatch.{name}", "histogram", "s", text, labels, buckets)


ENGINE_INSTRUMENTS: Final = (
    _sum("rows.compared", "{row}", "Batch rows that have a verdict.", *_ENGINE, "verdict", "reason"),
    _gauge("steps.compared", "{step}", "Ordinal up to which every step has verdicts.", *_ENGINE),
    _gauge("engine.wedged", "1", "1 while the engine is stuck.", *_ENGINE),
    _gauge("ranks.missing", "{rank}", "Ranks never heard of.", *_ENGINE),
    _sum(
        "rows.excluded",
        "{row}",
        "Rows that the engine's mask dropped from the broadcast although they may have sampled.",
        *_ENGINE,
    ),
    _sum("rows.harmed", "{row}", "Excluded rows whose request was found diverged afterwards.", *_ENGINE),
    _gauge(
        "trouble.first.timestamp",
        "s",
        "When incidents of a kind began; `stage` is the one blamed, or `undecided`.",
        *_TROUBLE,
    ),
    _gauge(
        "trouble.last.timestamp",
        "s",
        "When something bad of an incident of a kind was last judged. Stands still once all is well.",
        *_TROUBLE,
    ),
    _sum(
        "drafts.accepted",
        "{token}",
        "Draft tokens that the last stage accepted. Context, no verdict.",
        *_ENGINE,
    ),
    _sum("drafts.rejected", "{token}", "Draft tokens that it rejected.", *_ENGINE),
    _sum("rows.sampled", "{row}", "Batch rows that sampled.", *_ENGINE),
    _sum(
        "rows.repeated", "{row}", "Sampled rows that repeat what their request's last step yielded.", *_ENGINE
    ),
    _sum("broadcast.size", "By", "Bytes that the last stage broadcast to the earlier ones.", *_ENGINE),
    _sum("broadcast.steps", "{step}", "Steps with such a broadcast.", *_ENGINE),
    _sum("broadcast.rows", "{row}", "Batch rows in those broadcasts.", *_ENGINE),
    _sum(
        "broadcast.rows.fix.only",
        "{row}",
        "Of these, rows that the faulty mask of vLLM 0.23 to 0.29 would have left out: what the fix costs.",
        *_ENGINE,
    ),
)

RANK_INSTRUMENTS: Final = (
    _gauge("rank.armed", "1", "1 while the rank's probe records.", *_RANK),
    _gauge("rank.heartbeat.age", "s", "Time since the rank was last heard of.", *_RANK),
    _gauge("rank.steps.behind", "{step}", "Steps behind the foremost rank of its engine.", *_RANK),
    _gauge(
        "ring.margin",
        "s",
        "Time until the ring's writer overtakes the sidecar at the present rate; absent if nothing is written.",
        *_RANK,
    ),
    _sum(
        "records.dropped",
        "{record}",
        "What a rank recorded, or should have, and that was never compared.",
        *_RANK,
        "place",
        "reason",
    ),
    _sum("probe.time", "s", "Host time spent in the probe and its hooks.", *_RANK),
    _sum("probe.steps", "{step}", "Steps in which it was spent.", *_RANK),
    _gauge(
        "probe.step.p99", "s", "99th percentile of the probe's time of one step, over recent steps.", *_RANK
    ),
)

OWN_INSTRUMENTS: Final = (
    _sum("incidents", "{incident}", "Incidents that reached a severity.", "deployment", "check", "severity"),
    _histogram(
        "detection.latency",
        "From the first bad step to the incident's reaching a severity, warning or critical.",
        LATENCY_BUCKETS_S,
        "deployment",
        "check",
        "severity",
    ),
    _gauge("engines.watched", "{engine}", "Replicas of engines with series here."),
    _gauge("engines.hidden", "{engine}", "Replicas without, because there are too many."),
    _gauge("rings.refused", "{ring}", "Files in ring directories that sidecars cannot read."),
    _sum("drops", "{item}", "What stagewatch itself had to leave out.", "place", "reason"),
    _counter("ingest.frames", "{frame}", "Frames taken from sidecars."),
    _sum("ingest.duplicates", "{frame}", "Frames that were known already."),
    _counter("ingest.rows", "{row}", "Batch rows taken, each rank's counted."),
    _counter("ingest.size", "By", "Bytes of frames taken."),
    _counter("ingest.refused", "{frame}", "Frames and connections refused, by reason.", "reason"),
    _gauge("ingest.sessions", "{session}", "Sidecars connected."),
    _gauge("journal.size", "By", "Bytes of journal on disk."),
    _gauge("journal.pinned", "By", "Bytes of journal kept only because they hold incidents' evidence."),
    _gauge("journal.waiting", "By", "Bytes of frames not yet durable."),
    _gauge("journal.failing", "1", "1 while the journal cannot be written."),
    _gauge("journal.damaged", "By", "Bytes found unreadable when the journal was last read."),
    _histogram("journal.sync", "Time one group commit waited for the disk.", SYNC_BUCKETS_S),
    _gauge("events.readers", "{reader}", "Readers of the event stream."),
    _counter("internal.errors", "{error}", "Errors of stagewatch itself, by place.", "place"),
)

INSTRUMENTS: Final = (*ENGINE_INSTRUMENTS, *RANK_INSTRUMENTS, *OWN_INSTRUMENTS)
BY_NAME: Final = {item.name: item for item in INSTRUMENTS}
