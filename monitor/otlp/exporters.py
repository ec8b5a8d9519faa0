"""OpenTelemetry's OTLP exporters, made for a signal and its protocol."""

from collections.abc import Sequence
from typing import Protocol

from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk._logs.export import LogRecordExportResult
from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from stagewatch.agents.errors import SettingsError
from stagewatch.monitor.otlp.settings import OtlpSettings


class SpanSink(Protocol):
    """The part of a span exporter that is used."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult: ...  # noqa: D102
    def shutdown(self) -> None: ...  # noqa: D102


class LogSink(Protocol):
    """The part of a log exporter that is used."""

    def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult: ...  # noqa: D102
    def shutdown(self) -> None: ...  # noqa: D102


def metric_exporter(settings: OtlpSettings) -> MetricExporter:
    """The exporter of metrics. Raises SettingsError where it cannot be made."""
    endpoint = settings.endpoint_of("metrics")
    try:
        if settings.protocols["metrics"] == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as OverGrpc

            return OverGrpc(endpoint)
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as OverHttp

        return OverHttp(endpoint)
    except (ImportError, ValueError, OSError) as error:
        raise _unusable(error) from None


def span_exporter(settings: OtlpSettings) -> SpanSink:
    """The exporter of spans. Raises SettingsError where it cannot be made."""
    endpoint = settings.endpoint_of("traces")
    try:
        if settings.protocols["traces"] == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

            return OverGrpc(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

        return OverHttp(endpoint)
    except (ImportError, ValueError, OSError) as error:
        raise _unusable(error) from None


def log_exporter(settings: OtlpSettings) -> LogSink:
    """The exporter of log events. Raises SettingsError where it cannot be made."""
    endpoint = settings.endpoint_of("logs")
    try:
        if settings.protocols["logs"] == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter as OverGrpc

            return OverGrpc(endpoint)
        from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter as OverHttp

        return OverHttp(endpoint)
    except (ImportError, ValueError, OSError) as error:
        raise _unusable(error) from None


def _unusable(error: Exception) -> SettingsError:
    if isinstance(error, ImportError):
        return SettingsError("pushing over OTLP needs more than is installed: pip install 'stagewatch[otlp]'")
    return SettingsError(f"OTLP cannot be set up: {error}: look at the OTEL_EXPORTER_OTLP_ variables")
