"""What the lab's driver tells whoever started it, as JSON lines on its stdout."""

import msgspec

from stagewatch.agents.lab.fault import Injection
from stagewatch.agents.lab.messages import Output


class Started(msgspec.Struct, frozen=True, tag=True):
    """All ranks have been forked."""

    instance: str
    pids: dict[str, int]
    """Process of each rank, by its name as in ``dp0.pp1.tp0``."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A request finished, or goes on."""

    tick: int
    output: Output


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The run is over."""

    error: str
    """Empty if it came to its end."""
    steps: int
    ticks: int
    preemptions: int
    exit_codes: dict[str, int]
    injections: list[Injection]


Event = Started | Progress | Ended
