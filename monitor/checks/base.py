"""What a check is: something that looks at aligned evidence and says what it found.

Two shapes. A `RowCheck` compares the ranks' inputs row by row; it is vectorised, and explains only rows
that differ. A `ChunkCheck` looks at everything that became comparable together and may remember.
Both are made once per group of ranks, so state of theirs is never shared between engines.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.evidence import InputsBlock, PayloadBlock
from stagewatch.monitor.binds import Binds
from stagewatch.monitor.calls import Calls, Names
from stagewatch.monitor.history import History, Seen
from stagewatch.monitor.incidents import Severity, Value
from stagewatch.monitor.ordinals import Shift
from stagewatch.monitor.windows import Group, InputsWindow, MaskWindow, PayloadWindow


class Phase(enum.IntEnum):
    """Where in a step something happens. Findings are told in the order (step, phase)."""

    CONSUMED = 0
    INPUTS = 1
    MASK = 2
    SENT = 3
    RECEIVED = 4
    CALLS = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing one check found at one step."""

    check: str
    severity: Severity
    step: int
    phase: Phase
    text: str
    """For the chain of cause: what happened, without the step."""
    remedy: str
    request: int = 0
    """Request key; 0 where it concerns the whole engine."""
    life: int = 0
    """Which of a request's lives it concerns (see `windows.life_of`): a preempted request comes back as another."""
    row: int = 0
    """Position among the findings of one check and step; only orders them."""
    ranks: tuple[int, ...] = ()
    blamed: tuple[int, ...] = ()
    fields: tuple[str, ...] = ()
    values: tuple[Value, ...] = ()
    t_ns: int = 0
    covers: tuple[tuple[int, int], ...] = ()
    """Further (request, life) whose findings from this step on follow from this one."""
    of_step: bool = True
    """Whether it tells of something that happened in the step, and so shares a cause with others of that step."""
    absolves: bool = False
    """The cause lies with no rank that is found wrong later, or nobody can tell: the incident blames no one else."""


@dataclass(frozen=True, slots=True)
class Unaligned:
    """A step at which ranks recorded different batches; rows cannot be compared by position."""

    step: int
    indices: tuple[int, ...]
    blocks: tuple[InputsBlock, ...]


@dataclass(frozen=True, slots=True)
class Shifted:
    """Ranks whose ordinals stopped to count what the others' count."""

    indices: tuple[int, ...]
    batches: int
    """How many more batches than the others they counted; fewer where negative."""
    renumbered: tuple[int, ...]
    """Ranks that lack batches, and are renumbered."""
    shift: Shift
    outvoted: bool
    """Whether most of more than two ranks count alike."""
    t_ns: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Everything of a group that became comparable at once. What it holds ascends from chunk to chunk."""

    inputs: InputsWindow | None = None
    mask: MaskWindow | None = None
    """Of steps alone at which all ranks ran the same batch; so are `sent` and `received`."""
    dropped: tuple[tuple[int, Seen], ...] = ()
    """Rows of `mask` that some rank drops although they may have sampled, beside what they fed."""
    sent: PayloadWindow | None = None
    received: tuple[tuple[int, PayloadBlock], ...] = ()
    """(rank index, what it received); early stages only."""
    consumed: tuple[tuple[int, PayloadBlock], ...] = ()
    unaligned: tuple[Unaligned, ...] = ()
    shifted: tuple[Shifted, ...] = ()
    gaps: tuple[tuple[int, int], ...] = ()
    """First and last step of stretches that some rank's records do not cover, because its ring was overrun."""
    calls: tuple[Calls, ...] = ()
    """Per rank, the calls of steps that every rank has left behind."""
    left: tuple[int, ...] = ()
    """Per rank, the newest step that it has left behind: it will enter no more calls of it."""
    ahead: tuple[Calls, ...] = ()
    """Per rank, calls of later steps so far. They come again, in ``calls``."""
    names: Names = field(default_factory=Names)
    binds: tuple[tuple[int, Binds], ...] = ()
    """(rank index, slots given to requests since the last chunk)."""

    def whole(self, step: int) -> bool:
        """Whether no rank lost records of a step."""
        return not any(first <= step <= last for first, last in self.gaps)


class RowCheck(Protocol):
    """Compares ranks' inputs, row by row."""

    NAME: ClassVar[str]
    INVARIANT: ClassVar[str]
    COMPARES: ClassVar[str]
    SEVERITY: ClassVar[str]
    EXCEPTIONS: ClassVar[str]
    REMEDY: ClassVar[str]

    def differs(self, window: InputsWindow) -> NDArray[np.bool_] | None:
        """Rows that this check objects to: bool [rows], or None where there are none."""
        ...

    def explain(self, window: InputsWindow, row: int, history: History) -> Finding:
        """Say what is wrong with a row that `differs` marked."""
        ...


class ChunkCheck(Protocol):
    """Looks at whole chunks."""

    NAME: ClassVar[str]
    INVARIANT: ClassVar[str]
    COMPARES: ClassVar[str]
    SEVERITY: ClassVar[str]
    EXCEPTIONS: ClassVar[str]
    REMEDY: ClassVar[str]

    def examine(self, chunk: Chunk, group: Group, history: History) -> Iterable[Finding]:
        """Findings of this chunk, in any order."""
        ...
