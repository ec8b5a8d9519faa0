"""Metrics as Prometheus reads them: what OpenTelemetry's SDK and the observers hold, as families of samples."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from opentelemetry.sdk.metrics.export import (
    HistogramDataPoint,
    InMemoryMetricReader,
    NumberDataPoint,
)
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from stagewatch.monitor.instruments import BY_NAME, INSTRUMENTS, Instrument
from stagewatch.monitor.observers import OBSERVERS, Snapshot

Labels = tuple[str, ...]


class Series(Collector):
    """Every family, made anew at each scrape: what is not told any more is gone."""

    def __init__(self, reader: InMemoryMetricReader, now: Callable[[], Snapshot]) -> None:
        self._reader = reader
        self._now = now
        self._exemplars: dict[tuple[str, Labels, int], Exemplar] = {}
        """The newest of each bucket; the SDK hands out each once, and there may be many scrapers."""

    def describe(self) -> Iterable[Metric]:
        """Nothing: the state is not asked before the first scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """One family an instrument, all of one moment."""
        points = self._sdk_points()
        now = self._now()
        for item in INSTRUMENTS:
            observe = OBSERVERS.get(item.name)
            if observe is not None:
                yield _numbers(item, observe(now))
            elif item.kind == "histogram":
                yield self._distribution(item, points.get(item.name, []))
            else:
                yield _numbers(
                    item,
                    (
                        (float(point.value), _labels(item, point))
                        for point in points.get(item.name, [])
                        if isinstance(point, NumberDataPoint)
                    ),
                )

    def _sdk_points(self) -> dict[str, list[object]]:
        data = self._reader.get_metrics_data()
        if data is None:
            return {}
        return {
            metric.name: list(metric.data.data_points)
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name in BY_NAME
        }

    def _distribution(self, item: Instrument, points: list[object]) -> Metric:
        family = HistogramMetricFamily(item.prometheus_name, item.help, labels=item.labels)
        for point in points:
            if not isinstance(point, HistogramDataPoint):
                continue
            labels = _labels(item, point)
            for found in point.exemplars:
                if found.trace_id and found.span_id:
                    place = bisect_left(point.explicit_bounds, found.value)
                    ids = {"trace_id": f"{found.trace_id:032x}", "span_id": f"{found.span_id:016x}"}
                    self._exemplars[item.name, labels, place] = Exemplar(
                        ids, found.value, found.time_unix_nano / 1e9
                    )
            buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
            total = 0
            for place, count in enumerate(point.bucket_counts):
                total += count
                bounds = point.explicit_bounds
                bound = str(float(bounds[place])) if place < len(bounds) else "+Inf"
                exemplar = self._exemplars.get((item.name, labels, place))
                buckets.append((bound, total) if exemplar is None else (bound, total, exemplar))
            family.add_metric(labels, buckets, point.sum)
        return family


class OfDeployments(CollectorRegistry):
    """Another registry's series, as far as they are of some deployments."""

    def __init__(self, whole: CollectorRegistry, deployments: frozenset[str]) -> None:
        super().__init__()
        self._whole: Final = whole
        self._deployments: Final = deployments

    def collect(self) -> Iterator[Metric]:
        """Families that have such series, with nothing else in them."""
        for family in self._whole.collect():
            samples = [s for s in family.samples if s.labels.get("deployment") in self._deployments]
            if samples:
                family.samples = samples
                yield family


def _numbers(item: Instrument, values: Iterable[tuple[float, Labels]]) -> Metric:
    kind = CounterMetricFamily if item.kind.endswith("counter") else GaugeMetricFamily
    family = kind(item.prometheus_name.removesuffix("_total"), item.help, labels=item.labels)
    for value, labels in values:
        family.add_metric(labels, value)
    return family


def _labels(item: Instrument, point: NumberDataPoint | HistogramDataPoint) -> Labels:
    attributes = point.attributes or {}
    return tuple(str(attributes.get(label, "")) for label in item.labels)
