"""Observed metrics in a push: put beside what the SDK collected, for the exporter to send as one."""

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)

from stagewatch.monitor.instruments import INSTRUMENTS
from stagewatch.monitor.observers import OBSERVERS, Snapshot


class WithObserved(MetricExporter):
    """Another exporter, given the observed metrics, too. ``now`` may have nothing to tell yet."""

    def __init__(
        self,
        exporter: MetricExporter,
        now: Callable[[], Snapshot | None],
        told: Callable[[MetricExportResult], None],
    ) -> None:
        # What the exporter prefers is how OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE reaches the reader.
        super().__init__(exporter._preferred_temporality, exporter._preferred_aggregation)
        self._exporter: Final = exporter
        self._now = now
        self._told = told
        self._start_ns: Final = time.time_ns()

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        """Send both."""
        result = MetricExportResult.FAILURE
        try:
            result = self._exporter.export(self._joined(metrics_data), timeout_millis, **kwargs)
        finally:
            self._told(result)
        return result

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """As the exporter does."""
        return self._exporter.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """As the exporter does."""
        self._exporter.shutdown(timeout_millis, **kwargs)

    def _joined(self, data: MetricsData) -> MetricsData:
        now = self._now()
        if now is None or not data.resource_metrics:
            return data
        first = data.resource_metrics[0]
        scope = first.scope_metrics[0]
        metrics = [*scope.metrics, *observed_metrics(now, self._start_ns, time.time_ns())]
        joined = ScopeMetrics(scope.scope, metrics, scope.schema_url)
        resource = ResourceMetrics(first.resource, [joined, *first.scope_metrics[1:]], first.schema_url)
        return MetricsData([resource, *data.resource_metrics[1:]])


def observed_metrics(now: Snapshot, start_ns: int, now_ns: int) -> Iterator[Metric]:
    """Every observed metric that has something to tell, as OpenTelemetry's own."""
    for item in INSTRUMENTS:
        observe = OBSERVERS.get(item.name)
        if observe is None:
            continue
        points = [
            NumberDataPoint(
                {name: label for name, label in zip(item.labels, labels, strict=True) if label},
                start_ns,
                now_ns,
                value,
            )
            for value, labels in observe(now)
        ]
        if points:
            data = (
                Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
                if item.kind == "observed counter"
                else Gauge(points)
            )
            yield Metric(item.name, item.help, item.unit, data)
