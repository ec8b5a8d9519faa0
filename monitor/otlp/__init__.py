"""Push over OTLP: metrics, incidents as log events, and the steps around them as traces."""
