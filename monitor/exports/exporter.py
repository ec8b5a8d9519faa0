"""What every exporter is: somebody who sees all evidence go by, and is then told what the checks made of it.

An exporter's memory does not grow with the recording: it writes while it sees, or keeps a bounded part.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from stagewatch.agents.errors import StagewatchError
from stagewatch.agents.evidence import Evidence
from stagewatch.agents.identity import Identity
from stagewatch.monitor.blocks import select
from stagewatch.monitor.incidents import Incident
from stagewatch.monitor.newfile import new_private_file
from stagewatch.monitor.pieces import BLOCKS
from stagewatch.monitor.replay import Tap
from stagewatch.monitor.story.filters import Steps
from stagewatch.monitor.story.names import Names
from stagewatch.monitor.story.verdicts import Summary
from stagewatch.monitor.watch import Watch

PRIVATE = 0o600
"""Mode of what is written: request ids are your users' data."""


class ExportError(StagewatchError):
    """Nothing can be written as asked."""


@dataclass(frozen=True, slots=True)
class Found:
    """What the whole replay found."""

    watch: Watch
    summary: Summary
    incidents: tuple[Incident, ...]
    """Those wanted, worst first."""
    names: Names
    again: Callable[[Sequence[Tap]], None]
    """Replay once more, without the checks, for taps that know by now what to look for."""


class Exporter(Protocol):
    """One format. It is a tap over the evidence that is wanted."""

    def see(self, identity: Identity, evidence: Evidence) -> None:
        """One batch of a rank, in the order recorded."""
        ...

    def finish(self, found: Found) -> list[str]:
        """Write the rest; say what was written, and what could not be, in lines."""
        ...


class Wanted:
    """A tap that hands on what an engine recorded of some steps."""

    def __init__(self, tap: Tap, engine: str, steps: Steps) -> None:
        self._tap = tap
        self._engine = engine
        self._steps = steps
        self.steps_seen = 0
        """Records of inputs handed on."""

    def see(self, identity: Identity, evidence: Evidence) -> None:
        """Hand on what is wanted of one batch."""
        if self._engine not in ("", identity.instance):
            return
        evidence = _within(evidence, self._steps)
        self.steps_seen += 0 if evidence.inputs is None else len(evidence.inputs.step)
        self._tap.see(identity, evidence)


def _within(evidence: Evidence, steps: Steps) -> Evidence:
    parts: dict[str, Any] = {}
    for name in BLOCKS:
        block = getattr(evidence, name)
        if block is not None:
            keep = (block.step >= steps[0]) & (block.step <= steps[1])
            block = select(block, keep) if keep.any() else None
        parts[name] = block
    return Evidence(evidence.first_seq, evidence.next_seq, evidence.lost, **parts)


def needed(module: str, what: str) -> Any:
    """A module that only exports need. Raises ExportError, which says how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ExportError(
            f"{what} needs {error.name}, which is not installed: pip install 'stagewatch[export]'"
        ) from None


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that is there under its name once it is whole, for its owner alone. Raises ExportError."""
    try:
        with new_private_file(path) as file:
            yield file
    except OSError as error:
        raise ExportError(f"{path}: cannot be written: {error.strerror or error}") from None
