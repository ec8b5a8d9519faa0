"""Where to push, from our flags and OpenTelemetry's own variables."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import urlsplit

from stagewatch.agents.errors import SettingsError

Signal = Literal["traces", "metrics", "logs"]
Protocol = Literal["grpc", "http/protobuf"]

SIGNALS: Final[tuple[Signal, ...]] = ("metrics", "logs", "traces")
PROTOCOLS: Final[tuple[Protocol, ...]] = ("grpc", "http/protobuf")
ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
PROTOCOL: Final = "OTEL_EXPORTER_OTLP_PROTOCOL"
DISABLED: Final = "OTEL_SDK_DISABLED"


@dataclass(frozen=True, slots=True)
class OtlpSettings:
    """What to push and how. Signals not in `protocols` are off."""

    endpoint: str
    """Base URL given by our flag; empty where OpenTelemetry's variables say it, which the exporters read themselves."""
    protocols: Mapping[Signal, Protocol]

    def endpoint_of(self, signal: Signal) -> str | None:
        """What to hand to a signal's exporter; None to let it read the environment."""
        if not self.endpoint:
            return None
        if self.protocols[signal] == "grpc":
            return self.endpoint
        return f"{self.endpoint.rstrip('/')}/v1/{signal}"


def settings_of(endpoint: str, protocol: str, environment: Mapping[str, str]) -> OtlpSettings | None:
    """The settings that our flags and the environment give; None if nothing is to be pushed. Raises SettingsError.

    ``endpoint`` and ``protocol`` are empty where the flags were not given; they win over OpenTelemetry's variables.
    """
    if environment.get(DISABLED, "").strip().lower() == "true":
        return None
    if endpoint:
        _check_endpoint(endpoint)
    protocols = {
        signal: _protocol(signal, protocol, environment)
        for signal in SIGNALS
        if _is_on(signal, endpoint, environment)
    }
    return OtlpSettings(endpoint, protocols) if protocols else None


def _check_endpoint(endpoint: str) -> None:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(
            f"--otlp-endpoint {endpoint!r} is no address: write http://HOST:4317 or https://HOST:4317"
        )
    if parts.username or parts.password or parts.query:
        raise SettingsError(
            "--otlp-endpoint carries more than an address: give credentials by OTEL_EXPORTER_OTLP_HEADERS"
        )


def _is_on(signal: Signal, endpoint: str, environment: Mapping[str, str]) -> bool:
    name = signal.upper()
    chosen = environment.get(f"OTEL_{name}_EXPORTER", "").strip().lower()
    if chosen and "otlp" not in chosen.split(","):
        return False
    if chosen or endpoint:
        return True
    return bool(environment.get(ENDPOINT) or environment.get(f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT"))


def _protocol(signal: Signal, given: str, environment: Mapping[str, str]) -> Protocol:
    variable = f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL"
    found = given or environment.get(variable) or environment.get(PROTOCOL) or "grpc"
    if found not in PROTOCOLS:
        raise SettingsError(f"OTLP protocol {found!r} is not spoken here: choose {' or '.join(PROTOCOLS)}")
    return found
