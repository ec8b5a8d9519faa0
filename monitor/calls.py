"""Collective calls as columns: what each rank entered, step by step, in few enough bytes to compare by array."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.evidence import I64, EventBlock
from stagewatch.agents.record import Kind
from stagewatch.monitor.windows import Group

_COLLECTIVE: Final = int(Kind.COLLECTIVE)
"""Looking a member up in an enumeration costs more than comparing a column with its number."""
POINT_TO_POINT: Final = frozenset({"send", "receive", "recv", "isend", "irecv"})
"""Operations whose two ends differ by nature."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One call of one rank."""

    step: int
    what: str
    """Group, operation and dtype."""
    numel: int
    t_ns: int

    @property
    def group(self) -> str:
        """Name of the communicator."""
        return self.what.partition(" ")[0]

    @property
    def op(self) -> str:
        """Name of the operation."""
        return self.what.split(" ")[1] if " " in self.what else ""

    @property
    def size(self) -> str:
        """For people: what, and how many elements where that is known."""
        return f"{self.what} of {self.numel}" if self.numel >= 0 else self.what


class Names:
    """Numbers for the texts ``group op dtype`` of a group's calls, so that calls compare as integers."""

    MAX: Final = 4096

    def __init__(self) -> None:
        self._code_of: dict[str, int] = {}
        self.texts: list[str] = []

    def codes(self, texts: Sequence[str]) -> I64:
        """The number of each text; a new one for a text never seen."""
        known = self._code_of
        try:
            return np.array([known[text] for text in texts], np.int64)
        except KeyError:
            for text in texts:
                if text not in known and len(known) < self.MAX:
                    known[text] = len(self.texts)
                    self.texts.append(text)
            return np.array([known.get(text, self.MAX) for text in texts], np.int64)

    def text(self, code: int) -> str:
        """The text of a number."""
        return self.texts[code] if code < len(self.texts) else "other other other"


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of one rank in the order it entered them; every column has one entry per call."""

    step: I64
    code: I64
    numel: I64
    t_ns: I64

    def __len__(self) -> int:
        return len(self.step)

    @classmethod
    def of(cls, events: EventBlock, names: Names) -> Self:
        """The calls among a rank's events."""
        places = np.flatnonzero(events.kind == _COLLECTIVE)
        texts = events.text
        codes = names.codes([texts[place] for place in places.tolist()])
        return cls(events.step[places], codes, events.numel[places], events.t_ns[places])

    def where(self, keep: NDArray[np.bool_]) -> "Calls":
        """The marked calls."""
        return Calls(self.step[keep], self.code[keep], self.numel[keep], self.t_ns[keep])

    def at(self, step: I64) -> "Calls":
        """The same calls under other ordinals."""
        return replace(self, step=step)

    def entries(self, names: Names) -> Iterator[Entry]:
        """One object per call; for explaining, never on the hot path."""
        columns = (self.step.tolist(), self.code.tolist(), self.numel.tolist(), self.t_ns.tolist())
        for step, code, numel, t_ns in zip(*columns, strict=True):
            yield Entry(step, names.text(code), numel, t_ns)


NO_CALLS: Final = Calls(*(np.zeros(0, np.int64) for _ in range(4)))


def join_calls(parts: Sequence[Calls]) -> Calls:
    """Calls of one rank, one part after the other."""
    parts = [part for part in parts if len(part.step)]
    if not parts:
        return NO_CALLS
    if len(parts) == 1:
        return parts[0]
    return Calls(
        np.concatenate([part.step for part in parts]),
        np.concatenate([part.code for part in parts]),
        np.concatenate([part.numel for part in parts]),
        np.concatenate([part.t_ns for part in parts]),
    )


def peers(group: Group, name: str) -> list[tuple[int, ...]]:
    """Sets of rank indices that share communicators of a name: by stage for ``tp...``, across stages for ``pp...``."""
    pp, tp = group.sizes.pp, group.sizes.tp
    if name.startswith("tp"):
        return [tuple(range(stage * tp, (stage + 1) * tp)) for stage in range(pp)]
    if name.startswith("pp"):
        return [tuple(range(t, pp * tp, tp)) for t in range(tp)]
    return [tuple(range(pp * tp))]
