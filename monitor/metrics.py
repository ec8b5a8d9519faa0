"""Metrics, declared once in `INSTRUMENTS`: what `/metrics` serves and what the docs' table lists.

Names are OpenTelemetry's, with dots; Prometheus sees underscores, the unit and ``_total``. Labels come from
a bounded set; no request id is ever one. Engines beyond the newest `ENGINES_MAX` are left out and counted.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector as PrometheusCollector

from stagewatch.monitor.incidents import Incident, Severity
from stagewatch.monitor.journal import Health
from stagewatch.monitor.states import EngineState, RankState

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
ENGINES_MAX: Final = 64
LATENCY_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SYNC_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)

Kind = Literal["counter", "histogram", "observed counter", "observed gauge"]


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def prometheus_name(self) -> str:
        """As Prometheus spells it."""
        suffix = {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        total = "_total" if self.kind in ("counter", "observed counter") else ""
        return self.name.replace(".", "_") + suffix + total


_ENGINE = ("deployment", "engine", "dp")
_RANK = (*_ENGINE, "stage", "tp")

INSTRUMENTS: Final = (
    Instrument(
        "stagewatch.rows.compared",
        "observed counter",
        "{row}",
        "Batch rows that have a verdict.",
        (*_ENGINE, "verdict", "reason"),
    ),
    Instrument(
        "stagewatch.incidents",
        "counter",
        "{incident}",
        "Incidents that reached a severity.",
        ("deployment", "check", "severity"),
    ),
    Instrument(
        "stagewatch.detection.latency",
        "histogram",
        "s",
        "From the first bad step to the incident's reaching a severity.",
        ("check", "severity"),
    ),
    Instrument(
        "stagewatch.steps.compared",
        "observed gauge",
        "{step}",
        "Ordinal up to which every step has verdicts.",
        _ENGINE,
    ),
    Instrument("stagewatch.ranks.missing", "observed gauge", "{rank}", "Ranks never heard of.", _ENGINE),
    Instrument("stagewatch.rank.armed", "observed gauge", "1", "1 while the rank's probe records.", _RANK),
    Instrument(
        "stagewatch.rank.heartbeat.age",
        "observed gauge",
        "s",
        "Time since the rank was last heard of.",
        _RANK,
    ),
    Instrument(
        "stagewatch.rank.steps.behind",
        "observed gauge",
        "{step}",
        "Steps behind the foremost rank of its engine.",
        _RANK,
    ),
    Instrument(
        "stagewatch.ring.margin",
        "observed gauge",
        "s",
        "Time until the ring's writer overtakes the sidecar at the present rate.",
        _RANK,
    ),
    Instrument(
        "stagewatch.records.lost",
        "observed counter",
        "{record}",
        "Records overwritten or damaged in the ring before they were shipped.",
        _RANK,
    ),
    Instrument(
        "stagewatch.drops",
        "counter",
        "{item}",
        "What the collector itself had to leave out, by place and reason.",
        ("place", "reason"),
    ),
    Instrument("stagewatch.ingest.frames", "counter", "{frame}", "Frames taken from sidecars."),
    Instrument(
        "stagewatch.ingest.duplicates", "observed counter", "{frame}", "Frames that were known already."
    ),
    Instrument("stagewatch.ingest.rows", "counter", "{row}", "Batch rows taken, each rank's counted."),
    Instrument("stagewatch.ingest.size", "counter", "By", "Bytes of frames taken."),
    Instrument(
        "stagewatch.ingest.refused",
        "counter",
        "{frame}",
        "Frames and connections refused, by reason.",
        ("reason",),
    ),
    Instrument("stagewatch.ingest.sessions", "observed gauge", "{session}", "Sidecars connected."),
    Instrument("stagewatch.journal.size", "observed gauge", "By", "Bytes of journal on disk."),
    Instrument("stagewatch.journal.waiting", "observed gauge", "By", "Bytes of frames not yet durable."),
    Instrument("stagewatch.journal.failing", "observed gauge", "1", "1 while the journal cannot be written."),
    Instrument(
        "stagewatch.journal.damaged",
        "observed gauge",
        "By",
        "Bytes found unreadable when the journal was last read.",
    ),
    Instrument("stagewatch.journal.sync", "histogram", "s", "Time one group commit waited for the disk."),
    Instrument("stagewatch.events.readers", "observed gauge", "{reader}", "Readers of the event stream."),
    Instrument(
        "stagewatch.internal.errors",
        "counter",
        "{error}",
        "Errors of stagewatch itself, by place.",
        ("place",),
    ),
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What observed metrics read: the state at one moment."""

    engines: Sequence[EngineState]
    journal: Health
    sessions: int
    duplicates: int
    readers: int
    now_ns: int
    """By the clock that ranks are heard by."""


class Metrics:
    """All instruments of one collector. `snapshot` is asked at each scrape, on the scraper's thread."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._registry = CollectorRegistry()
        self._provider = MeterProvider(
            [
                PrometheusMetricReader(
                    registry=self._registry, scope_info_enabled=False, disable_target_info=True
                )
            ],
            views=[
                _buckets("stagewatch.detection.latency", LATENCY_BUCKETS_S),
                _buckets("stagewatch.journal.sync", SYNC_BUCKETS_S),
            ],
            shutdown_on_exit=False,
        )
        meter = self._provider.get_meter("stagewatch")
        self._counters = {}
        self._histograms = {}
        for item in INSTRUMENTS:
            match item.kind:
                case "counter":
                    self._counters[item.name] = meter.create_counter(item.name, item.unit, item.help)
                case "histogram":
                    self._histograms[item.name] = meter.create_histogram(item.name, item.unit, item.help)
                case _:
                    pass  # read from the state at each scrape
        self._registry.register(_Observed(snapshot))

    def count(self, name: str, amount: int = 1, **labels: str) -> None:
        """Add to a counter."""
        self._counters[name].add(amount, labels)

    def journal_synced(self, seconds: float) -> None:
        """One group commit took ``seconds`` for its sync."""
        self._histograms["stagewatch.journal.sync"].record(seconds)

    def incident(self, incident: Incident) -> None:
        """An incident reached its severity."""
        labels = {"check": incident.check, "severity": incident.severity.word}
        self._counters["stagewatch.incidents"].add(1, {"deployment": incident.deployment, **labels})
        if incident.severity > Severity.NOTICE and incident.raised_ns >= incident.first_bad_ns > 0:
            seconds = (incident.raised_ns - incident.first_bad_ns) / 1e9
            self._histograms["stagewatch.detection.latency"].record(seconds, labels)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def close(self) -> None:
        """Stop the provider."""
        self._provider.shutdown()


class _Observed(PrometheusCollector):
    """The observed instruments, made anew at each scrape.

    Not OpenTelemetry's own: it keeps every label set it ever saw, and past 2000 of them, which are a few hundred
    starts of an engine, takes no new one.
    """

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[Metric]:
        """Nothing: the state is not asked before the first scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """One family an instrument, all of one moment."""
        now = self._snapshot()
        for item in INSTRUMENTS:
            observe = OBSERVERS.get(item.name)
            if observe is None:
                continue
            family_type = CounterMetricFamily if item.kind == "observed counter" else GaugeMetricFamily
            family = family_type(item.prometheus_name.removesuffix("_total"), item.help, labels=item.labels)
            for value, labels in observe(now):
                family.add_metric(labels, value)
            yield family


Observed = Iterable[tuple[float, tuple[str, ...]]]


def _engines(now: Snapshot) -> Sequence[EngineState]:
    return now.engines[-ENGINES_MAX:]


def _engine_labels(engine: EngineState) -> tuple[str, ...]:
    return engine.deployment, engine.instance, str(engine.dp)


def _by_engine(value: Callable[[EngineState], float]) -> Callable[[Snapshot], Observed]:
    return lambda now: [(value(engine), _engine_labels(engine)) for engine in _engines(now)]


def _heartbeat_ages(now: Snapshot) -> Observed:
    return _by_rank(lambda engine, rank: max(now.now_ns - rank.last_heard_ns, 0) / 1e9)(now)


def _by_rank(value: Callable[[EngineState, RankState], float]) -> Callable[[Snapshot], Observed]:
    return lambda now: [
        (
            value(engine, rank),
            (*_engine_labels(engine), str(rank.identity.rank.pp), str(rank.identity.rank.tp)),
        )
        for engine in _engines(now)
        for rank in engine.ranks
    ]


def _verdicts(now: Snapshot) -> Observed:
    for engine in _engines(now):
        for word, rows in engine.verdicts.items():
            settled = word in ("CONSISTENT", "DIVERGED")
            labels = (word.lower(), "") if settled else ("indeterminate", word)
            yield rows, (*_engine_labels(engine), *labels)


def _single(value: Callable[[Snapshot], float]) -> Callable[[Snapshot], Observed]:
    return lambda now: [(value(now), ())]


def _steps_behind(engine: EngineState, rank: RankState) -> float:
    return max(other.last_step for other in engine.ranks) - rank.last_step


OBSERVERS: Final[dict[str, Callable[[Snapshot], Observed]]] = {
    "stagewatch.rows.compared": _verdicts,
    "stagewatch.steps.compared": _by_engine(lambda engine: engine.compared_to),
    "stagewatch.ranks.missing": _by_engine(lambda engine: len(engine.missing)),
    "stagewatch.rank.armed": _by_rank(lambda engine, rank: int(rank.armed)),
    "stagewatch.rank.heartbeat.age": _heartbeat_ages,
    "stagewatch.rank.steps.behind": _by_rank(_steps_behind),
    "stagewatch.ring.margin": _by_rank(lambda engine, rank: rank.margin_s),
    "stagewatch.records.lost": _by_rank(lambda engine, rank: rank.lost_records),
    "stagewatch.ingest.sessions": _single(lambda now: now.sessions),
    "stagewatch.ingest.duplicates": _single(lambda now: now.duplicates),
    "stagewatch.journal.size": _single(lambda now: now.journal.bytes_kept),
    "stagewatch.journal.waiting": _single(lambda now: now.journal.bytes_waiting),
    "stagewatch.journal.failing": _single(lambda now: int(bool(now.journal.failure))),
    "stagewatch.journal.damaged": _single(lambda now: now.journal.damaged_bytes),
    "stagewatch.events.readers": _single(lambda now: now.readers),
}


def _buckets(name: str, bounds: Sequence[float]) -> View:
    return View(instrument_name=name, aggregation=ExplicitBucketHistogramAggregation(bounds))
