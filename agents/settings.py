"""Settings of the probe, read from the environment of the engine's processes.

`VARIABLES` is the one list of them: the docs' table is generated from it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stagewatch.agents.errors import SettingsError

RING_DIR: Final = "STAGEWATCH_RING_DIR"


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: its name, its default as a user would write it, and what it does."""

    name: str
    default: str
    meaning: str


VARIABLES: Final = (
    Variable(
        RING_DIR, "", "Directory of the ring files, best on tmpfs. Unset: stagewatch does nothing at all."
    ),
    Variable("STAGEWATCH_DEPLOYMENT", "default", "Name of the deployment the engine belongs to."),
    Variable("STAGEWATCH_RING_BYTES", "67108864", "Size of each rank's ring in bytes (64 KiB to 4 GiB)."),
    Variable("STAGEWATCH_HEARTBEAT_S", "1", "Seconds between a rank's heartbeats."),
    Variable(
        "STAGEWATCH_BUDGET_SHARE",
        "0.05",
        "Share of a step's time the probe may take at its 99th percentile before it disarms; 0: no limit.",
    ),
    Variable(
        "STAGEWATCH_RINGS_KEPT",
        "2",
        "Rings of ended engines kept per rank; older ones are removed at arming.",
    ),
    Variable(
        "STAGEWATCH_FIXED_MASK",
        "0",
        "1: replace a broadcast mask that is proven faulty by the fixed one, on all ranks or none.",
    ),
)


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """What the variables say, checked."""

    ring_dir: Path
    deployment: str
    ring_bytes: int
    heartbeat_s: float
    budget_share: float
    rings_kept: int
    fixed_mask: bool

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "ProbeSettings | None":
        """The settings, or None where stagewatch is not asked for. Raises SettingsError for a bad value."""
        if not environment.get(RING_DIR):
            return None
        values = {variable.name: environment.get(variable.name) or variable.default for variable in VARIABLES}
        return cls(
            ring_dir=Path(values[RING_DIR]),
            deployment=_name("STAGEWATCH_DEPLOYMENT", values),
            ring_bytes=_whole("STAGEWATCH_RING_BYTES", values, 1 << 16, 1 << 32),
            heartbeat_s=_number("STAGEWATCH_HEARTBEAT_S", values, 0.01, 3600),
            budget_share=_number("STAGEWATCH_BUDGET_SHARE", values, 0, 1),
            rings_kept=_whole("STAGEWATCH_RINGS_KEPT", values, 0, 1000),
            fixed_mask=_flag("STAGEWATCH_FIXED_MASK", values),
        )


def _name(variable: str, values: Mapping[str, str]) -> str:
    value = values[variable]
    if not 1 <= len(value) <= 64 or not all(c.isalnum() or c in "._-" for c in value) or not value.isascii():
        raise SettingsError(
            f"{variable}={value!r} must be 1 to 64 letters, digits, dots, dashes or underscores"
        )
    return value


def _number(variable: str, values: Mapping[str, str], least: float, most: float) -> float:
    try:
        value = float(values[variable])
    except ValueError:
        raise SettingsError(f"{variable}={values[variable]!r} is not a number") from None
    if not least <= value <= most:
        raise SettingsError(f"{variable}={values[variable]} is outside {least:.10g} to {most:.10g}")
    return value


def _whole(variable: str, values: Mapping[str, str], least: int, most: int) -> int:
    value = _number(variable, values, least, most)
    if not value.is_integer():
        raise SettingsError(f"{variable}={values[variable]} is not a whole number")
    return int(value)


def _flag(variable: str, values: Mapping[str, str]) -> bool:
    value = values[variable]
    if value not in ("0", "1"):
        raise SettingsError(f"{variable}={value!r} must be 0 or 1")
    return value == "1"
