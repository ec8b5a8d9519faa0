"""Push over OTLP: metrics, incidents as log events, and the steps around them as traces.

Off unless an endpoint is given. Everything that talks to the receiver runs on threads of its own, behind bounded
queues; what does not get through is counted. The exporters are OpenTelemetry's, so its environment variables hold:
``OTEL_EXPORTER_OTLP_ENDPOINT``, ``_PROTOCOL``, ``_HEADERS``, ``_TIMEOUT`` and those of each signal.
"""
