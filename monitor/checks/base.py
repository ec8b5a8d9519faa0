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

from stagewatch.agents.evidence import EventBlock, InputsBlock
from stagewatch.monitor.history import History
from stagewatch.monitor.incidents import Severity, Value
from stagewatch.monitor.windows import Group, InputsWindow, MaskWindow, PayloadWindow


class Phase(enum.IntEnum):
    """Where in a step something happens. Findings are told in the order (step, phase)."""

    CONSUMED = 0
    INPUTS = 1
    MASK = 2
    SENT = 3
    RECEIVED = 4


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
    generation: int = 0
    row: int = 0
    """Position among the findings of one check and step; only orders them."""
    ranks: tuple[int, ...] = ()
    blamed: tuple[int, ...] = ()
    fields: tuple[str, ...] = ()
    values: tuple[Value, ...] = ()
    t_ns: int = 0
    absolves: bool = False
    """The cause lies with no rank that is found wrong later, or nobody can tell: the incident blames no one else."""


@dataclass(frozen=True, slots=True)
class Unaligned:
    """A step at which ranks recorded different batches; rows cannot be compared by position."""

    step: int
    indices: tuple[int, ...]
    blocks: tuple[InputsBlock, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Everything of a group that became comparable at once. Steps ascend from chunk to chunk."""

    inputs: InputsWindow | None = None
    mask: MaskWindow | None = None
    sent: PayloadWindow | None = None
    received: PayloadWindow | None = None
    consumed: PayloadWindow | None = None
    unaligned: tuple[Unaligned, ...] = ()
    complete_to: int = 0
    """Every rank has left the steps below this one behind, so all they record of them is here."""
    incomplete_to: int = 0
    """Records of steps up to this one may be missing on some rank, because its ring was overrun."""
    events: tuple[tuple[int, EventBlock], ...] = field(default=())
    """(rank index, block) of events that arrived since the last chunk."""


class RowCheck(Protocol):
    """Compares ranks' inputs, row by row."""

    NAME: ClassVar[str]
    COMPARES: ClassVar[str]
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
    COMPARES: ClassVar[str]
    EXCEPTIONS: ClassVar[str]
    REMEDY: ClassVar[str]

    def examine(self, chunk: Chunk, group: Group, history: History) -> Iterable[Finding]:
        """Findings of this chunk, in any order."""
        ...
