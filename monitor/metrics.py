"""The collector's metrics: counters and histograms of OpenTelemetry's, observed ones read from the state.

`/metrics` and the push over OTLP tell the same: both take counters and histograms from the SDK, each through a
reader of its own, and observed metrics from `stagewatch.monitor.observers`.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, Protocol

from opentelemetry.context import Context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricReader
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, choose_encoder

from stagewatch.monitor.exposition import OfDeployments, Series
from stagewatch.monitor.incidents import Incident, Severity
from stagewatch.monitor.instruments import DROPS, INSTRUMENTS, REFUSALS
from stagewatch.monitor.observers import Snapshot

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
INTERNAL_PLACES: Final = ("watch", "store", "otlp")
CLOSE_MS: Final = 3000
DEPLOYMENTS_MAX: Final = 256
"""Deployments whose incidents have series of their own; a sidecar chooses its deployment's name."""
OTHERS: Final = "(others)"
"""The deployment under which the incidents of all further ones are counted. No deployment can be called so."""


class Pushed(Protocol):
    """What a push needs of the metrics, and they of it."""

    @property
    def readers(self) -> Sequence[MetricReader]: ...  # noqa: D102
    @property
    def resource(self) -> Resource: ...  # noqa: D102

    def context_of(self, incident: Incident) -> Context:
        """The context in which an incident's latency is recorded: its trace becomes the exemplar."""
        ...


class Metrics:
    """All instruments of one collector. `snapshot` is asked at each scrape and push, on the asker's thread."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        pushed: Pushed | None = None,
    ) -> None:
        self._snapshot = snapshot
        self._pushed = pushed
        self._lock = threading.Lock()
        self._drops: Counter[tuple[str, str]] = Counter()
        self._incidents: Counter[tuple[str, str, str]] = Counter()
        self._deployments: set[str] = set()
        self._scraped = InMemoryMetricReader()
        self._provider = MeterProvider(
            [self._scraped, *(pushed.readers if pushed else ())],
            resource=pushed.resource if pushed else None,
            views=[_buckets(item.name, item.buckets) for item in INSTRUMENTS if item.buckets],
            shutdown_on_exit=False,
        )
        meter = self._provider.get_meter("stagewatch")
        self._counters = {
            item.name: meter.create_counter(item.name, item.unit, item.help)
            for item in INSTRUMENTS
            if item.kind == "counter"
        }
        self._histograms = {
            item.name: meter.create_histogram(item.name, item.unit, item.help)
            for item in INSTRUMENTS
            if item.kind == "histogram"
        }
        self._registry = CollectorRegistry()
        self._registry.register(Series(self._scraped, self.now))
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """A counter that is born at 1 has no increase that an alert could see."""
        for reason in REFUSALS:
            self.count("stagewatch.ingest.refused", 0, reason=reason)
        for place in INTERNAL_PLACES:
            self.count("stagewatch.internal.errors", 0, place=place)
        for item in INSTRUMENTS:
            if item.kind == "counter" and not item.labels:
                self.count(item.name, 0)

    def now(self) -> Snapshot:
        """The state, with what was counted here."""
        found = self._snapshot()
        with self._lock:
            drops = Counter(found.drops)
            drops.update(self._drops)
            return replace(found, incidents=dict(self._incidents), drops=drops)

    def count(self, name: str, amount: int = 1, **labels: str) -> None:
        """Add to a counter. Any thread."""
        self._counters[name].add(amount, labels)

    def drop(self, place: str, reason: str, amount: int = 1) -> None:
        """Count what had to be left out; (place, reason) is one of `DROPS`. Any thread."""
        if (place, reason) not in DROPS:
            raise ValueError(f"no drop is known as {place}, {reason}")
        with self._lock:
            self._drops[place, reason] += amount

    def journal_synced(self, seconds: float) -> None:
        """One group commit took ``seconds`` for its sync."""
        self._histograms["stagewatch.journal.sync"].record(seconds)

    def incident(self, incident: Incident) -> None:
        """An incident reached its severity."""
        with self._lock:
            key = (self._counted_as(incident.deployment), incident.check, incident.severity.word)
            self._incidents[key] += 1
        if incident.severity > Severity.NOTICE and incident.raised_ns >= incident.first_bad_ns > 0:
            seconds = (incident.raised_ns - incident.first_bad_ns) / 1e9
            labels = dict(zip(("deployment", "check", "severity"), key, strict=True))
            context = self._pushed.context_of(incident) if self._pushed else None
            self._histograms["stagewatch.detection.latency"].record(seconds, labels, context)

    def _counted_as(self, deployment: str) -> str:
        if len(self._deployments) < DEPLOYMENTS_MAX:
            self._deployments.add(deployment)
        return deployment if deployment in self._deployments else OTHERS

    def scrape(self, accept: str = "", deployments: frozenset[str] | None = None) -> tuple[bytes, str]:
        """(text, content type) for a scraper that accepts ``accept``; only OpenMetrics carries exemplars.

        Given deployments, only their series: what has no deployment tells of all of them together.
        """
        registry = self._registry if deployments is None else OfDeployments(self._registry, deployments)
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    def render(self, deployments: frozenset[str] | None = None) -> bytes:
        """The plain text for a scraper that says nothing of what it accepts."""
        return self.scrape("", deployments)[0]

    def close(self) -> None:
        """Stop the provider: what is pushed is pushed once more, if that does not take longer than `CLOSE_MS`."""
        with suppress(Exception):  # the receiver is gone, or slow
            self._provider.shutdown(CLOSE_MS)


def _buckets(name: str, bounds: Sequence[float]) -> View:
    return View(instrument_name=name, aggregation=ExplicitBucketHistogramAggregation(bounds))
