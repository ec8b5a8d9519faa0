"""The push itself: a thread for incidents, OpenTelemetry's own for metrics, bounded queues before both."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import Final, TypeVar

from opentelemetry.context import Context
from opentelemetry.sdk._logs.export import LogRecordExportResult
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExportResult

from stagewatch.agents.errors import one_line
from stagewatch.monitor.incidents import Incident, Severity
from stagewatch.monitor.observers import Snapshot
from stagewatch.monitor.otlp import story
from stagewatch.monitor.otlp.exporters import log_exporter, metric_exporter, span_exporter
from stagewatch.monitor.otlp.observed import WithObserved
from stagewatch.monitor.otlp.settings import OtlpSettings
from stagewatch.monitor.otlp.story import Told

log = logging.getLogger("stagewatch.otlp")

WAITING_MAX: Final = 512
"""Incidents that wait to be pushed; past it the newest are dropped, and counted."""
AT_ONCE_MAX: Final = 64
CLOSE_S: Final = 3.0
"""Time to push what waits when the collector ends."""

T = TypeVar("T")
Dropped = Callable[[str, str, int], None]


class Push:
    """Pushes to one receiver. Raises SettingsError where the exporters cannot be made.

    ``dropped(place, reason, amount)`` is called from any thread.
    """

    def __init__(self, settings: OtlpSettings) -> None:
        # OpenTelemetry's exporters log each failed try; we tell once, and count.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self.resource: Final = Resource.create(
            {"service.name": "stagewatch", "service.version": version("stagewatch")}
        )
        self.readers: list[MetricReader] = []
        """For the meter provider: it closes them."""
        self._now: Callable[[], Snapshot] | None = None
        self._dropped: Dropped = lambda place, reason, amount: None
        if "metrics" in settings.protocols:
            exporter = WithObserved(
                metric_exporter(settings), lambda: self._now and self._now(), self._metrics_told
            )
            self.readers.append(PeriodicExportingMetricReader(exporter))
        self._logs = log_exporter(settings) if "logs" in settings.protocols else None
        self._spans = span_exporter(settings) if "traces" in settings.protocols else None
        self._waiting: deque[tuple[str, Told]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._failing: dict[str, bool] = {}
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)

    def start(self, now: Callable[[], Snapshot], dropped: Dropped) -> None:
        """Begin; ``now`` gives what observed metrics read."""
        self._now, self._dropped = now, dropped
        self._thread.start()

    @property
    def traces(self) -> bool:
        """Whether traces are pushed."""
        return self._spans is not None

    def context_of(self, incident: Incident) -> Context:
        """The context in which an incident's latency is recorded: it makes the trace the exemplar."""
        return (
            story.context_of(incident) if self.traces and incident.severity > Severity.NOTICE else Context()
        )

    def event(self, told: Told) -> None:
        """Push an incident as a log event. Never waits."""
        if self._logs is not None:
            self._put("logs", told)

    def trace(self, told: Told) -> None:
        """Push the steps around an incident as a trace. Never waits."""
        if self._spans is not None:
            self._put("traces", told)

    def close(self) -> None:
        """Push what waits, for `CLOSE_S` at most; what is left is counted."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        for sink in (self._logs, self._spans):
            if sink is not None:
                with suppress(Exception):  # it ends anyhow
                    sink.shutdown()
        with self._wake:
            left = len(self._waiting)
            self._waiting.clear()
        if left:
            self._dropped("otlp", "failed", left)

    def _put(self, signal: str, told: Told) -> None:
        with self._wake:
            if len(self._waiting) < WAITING_MAX and not self._closing:
                self._waiting.append((signal, told))
                self._wake.notify()
                return
        self._dropped("otlp", "queue_full", 1)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                taken = [self._waiting.popleft() for _ in range(min(len(self._waiting), AT_ONCE_MAX))]
            for signal, export in (("logs", self._export_logs), ("traces", self._export_traces)):
                chosen = [told for kind, told in taken if kind == signal]
                if chosen:
                    self._told(signal, self._tried(export, chosen), len(chosen))

    def _tried(self, export: Callable[[list[Told]], bool], chosen: list[Told]) -> str:
        """Empty, or why it failed."""
        try:
            return "" if export(chosen) else "the receiver did not take it"
        except Exception as error:  # noqa: BLE001  # whatever an exporter raises must not end the thread
            return one_line(error)

    def _export_logs(self, chosen: list[Told]) -> bool:
        assert self._logs is not None  # noqa: S101  # else nothing of it waits
        records = [story.log_record(told, self.resource) for told in chosen]
        return self._logs.export(records) is LogRecordExportResult.SUCCESS

    def _export_traces(self, chosen: list[Told]) -> bool:
        assert self._spans is not None  # noqa: S101  # else nothing of it waits
        spans = [span for told in chosen for span in story.spans(told, self.resource)]
        return self._spans.export(spans) is SpanExportResult.SUCCESS

    def _metrics_told(self, result: MetricExportResult) -> None:
        self._told(
            "metrics", "" if result is MetricExportResult.SUCCESS else "the receiver did not take them", 1
        )

    def _told(self, signal: str, failure: str, amount: int) -> None:
        """Count a failure, and tell the first of a row of them, and its end."""
        if failure:
            self._dropped("otlp", "failed", amount)
        if bool(failure) != self._failing.get(signal, False):
            self._failing[signal] = bool(failure)
            if failure:
                log.warning("OTLP: %s cannot be pushed: %s; counted from now on, not told", signal, failure)
            else:
                log.info("OTLP: %s are pushed again", signal)
