"""What the lab's driver tells whoever started it, as JSON lines on its stdout."""

import msgspec

from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.fault import Injection
from stagewatch.agents.lab.faults_process import Act
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


class Acted(msgspec.Struct, frozen=True, tag=True):
    """The script of a process fault has come to something that is not the lab's to do."""

    act: Act
    struck: tuple[Rank, ...]


Event = Started | Progress | Acted | Ended
