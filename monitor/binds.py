"""Binds as columns: which slot a rank gave to which request, for the check that watches slots change owners."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.evidence import I64, EventBlock
from stagewatch.agents.record import U64, Kind

_BIND: Final = int(Kind.BIND)
SLOTS_MAX: Final = 1 << 20
"""Slot numbers believed; what is kept of a slot is kept in a table."""


@dataclass(frozen=True, slots=True)
class Binds:
    """Slots that one rank gave to requests; every column has one entry per bind. ``step`` is the ordinal before."""

    step: I64
    slot: I64
    generation: I64
    request: U64
    t_ns: I64

    def __len__(self) -> int:
        return len(self.step)

    @classmethod
    def of(cls, events: EventBlock) -> "Binds":
        """The binds among a rank's events."""
        at = np.flatnonzero(events.kind == _BIND)
        if not len(at):
            return NO_BINDS
        at = at[(events.slot[at] >= 0) & (events.slot[at] < SLOTS_MAX)]
        slot, generation = events.slot[at].astype(np.int64), events.generation[at].astype(np.int64)
        return cls(events.step[at], slot, generation, events.request[at], events.t_ns[at])

    def part(self, first: int, end: int) -> "Binds":
        """Binds ``first`` to ``end`` (exclusive)."""
        kept = slice(first, end)
        return Binds(
            self.step[kept], self.slot[kept], self.generation[kept], self.request[kept], self.t_ns[kept]
        )

    def where(self, keep: NDArray[np.bool_]) -> "Binds":
        """The marked binds."""
        return Binds(
            self.step[keep], self.slot[keep], self.generation[keep], self.request[keep], self.t_ns[keep]
        )

    def at(self, step: I64) -> "Binds":
        """The same binds under other ordinals."""
        return replace(self, step=step)


_NONE: Final = np.zeros(0, np.int64)
NO_BINDS: Final = Binds(_NONE, _NONE, _NONE, np.zeros(0, np.uint64), _NONE)


def join_binds(parts: Sequence[Binds]) -> Binds:
    """Binds of one rank, one part after the other; at least one part."""
    if len(parts) == 1:
        return parts[0]
    columns = ("step", "slot", "generation", "request", "t_ns")
    return Binds(*(np.concatenate([getattr(part, column) for part in parts]) for column in columns))
