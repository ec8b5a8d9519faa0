"""What each rank did when: records put into steps, and broadcasts matched with what became of them.

A step of a rank lasts from its first record to its last; in it each record lasts until the next one. Times are the
host's own and are nudged by nanoseconds, so that one record of a rank never begins before another has ended.
Recordings without a clock (traces) are drawn with a millisecond a step.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from stagewatch.agents.bodies import Kind
from stagewatch.agents.evidence import Evidence

STEP_NS: Final = 1_000_000
"""Length of a step where there is no clock."""
_APART_NS: Final = 4
"""Least distance of two records of a rank."""
PENDING_MAX: Final = 1 << 14
"""Broadcasts that wait for those who consume them; past it the oldest are drawn as they are."""
_NAMES: Final = {
    "inputs": "inputs",
    "mask": "mask",
    "sent": "broadcast",
    "received": "receive",
    "consumed": "consume",
}


@dataclass(frozen=True, slots=True)
class Made:
    """One record of a rank."""

    seq: int
    t_ns: int
    kind: str
    step: int
    at: int
    rows: int
    skipped: bool
    text: str = ""

    @property
    def name(self) -> str:
        """What it is called on the timeline."""
        if self.kind == "collective":
            return self.text or "collective"
        about = f" of step {self.step}" if self.kind in ("received", "consumed") else ""
        return _NAMES[self.kind] + about + (" (nothing)" if self.skipped else "")


@dataclass(slots=True)
class Part:
    """One record within its step: what is drawn inside it."""

    made: Made
    begin_ns: int
    end_ns: int
    flows: list[int] = field(default_factory=list)
    """Ids of the flows that begin here."""
    ended_flows: list[int] = field(default_factory=list)


@dataclass(slots=True)
class StepSlice:
    """One step of a rank."""

    step: int
    begin_ns: int
    end_ns: int
    rows: int
    parts: list[Part]


def records_of(evidence: Evidence) -> list[Made]:
    """What is drawn of one batch of a rank, in the order recorded."""
    found: list[Made] = []
    for kind in _NAMES:
        block: Any = getattr(evidence, kind)
        if block is None:
            continue
        count = len(block.seq)
        at = block.at.tolist() if hasattr(block, "at") else [-1] * count
        skipped = block.skipped.tolist() if hasattr(block, "skipped") else [0] * count
        columns = (block.seq, block.t_ns, block.step, block.rows)
        for (seq, t_ns, step, rows), before, skip in zip(
            zip(*(column.tolist() for column in columns), strict=True), at, skipped, strict=True
        ):
            found.append(Made(seq, t_ns, kind, step, before, rows, bool(skip)))
    events = evidence.events
    if events is not None:
        for place in np.flatnonzero(events.kind == Kind.COLLECTIVE).tolist():
            seq, t_ns, step = int(events.seq[place]), int(events.t_ns[place]), int(events.step[place])
            found.append(Made(seq, t_ns, "collective", step, -1, 0, False, events.text[place]))
    found.sort(key=lambda made: made.seq)
    return found


class Lane:
    """One rank's records, put into steps."""

    def __init__(self) -> None:
        self._open: StepSlice | None = None
        self._free_ns = 0
        """The first moment that is still free."""
        self.clock = False
        """Whether its records have times."""

    def take(self, made: Made) -> StepSlice | None:
        """Add a record; return the step that it ends."""
        ended = None
        step = self._step_of(made)
        if self._open is not None and step not in (None, self._open.step):
            ended = self.close()
        self.clock = self.clock or made.t_ns > 0
        begin = max(made.t_ns or (step or made.step) * STEP_NS, self._free_ns)
        if self._open is None:
            at = made.step if step is None else step
            self._open = StepSlice(at, begin - 1, begin + 2, 0, [])
        elif self._open.parts:
            self._open.parts[-1].end_ns = begin - 2
        self._open.parts.append(Part(made, begin, begin + 1))
        self._open.end_ns = begin + 2
        if made.kind == "inputs":
            self._open.rows = made.rows
        self._free_ns = begin + _APART_NS
        return ended

    def close(self) -> StepSlice | None:
        """End the step that is open; return it."""
        ended, self._open = self._open, None
        return ended

    def _step_of(self, made: Made) -> int | None:
        """The step that a record opens, or None where it belongs to the one that is open."""
        if made.kind == "inputs":
            return made.step
        if made.kind == "consumed" and made.at >= 0:
            return made.at
        return None


@dataclass(slots=True)
class _Broadcast:
    sent: tuple[int, Part] | None = None
    taken: list[tuple[int, Part]] = field(default_factory=list)


class Flows:
    """Matches each broadcast with those who took it. ``draw(track, part)`` draws a part once its flows are known."""

    def __init__(self, draw: Callable[[int, Part], None]) -> None:
        self._draw = draw
        self._pending: OrderedDict[tuple[Any, ...], _Broadcast] = OrderedDict()
        self.paired = 0
        """Flows drawn, each from a broadcast to one who took it."""
        self.unpaired = 0
        """Payloads taken whose broadcast is not on record."""

    def sent(self, key: tuple[Any, ...], track: int, part: Part, takers: int) -> None:
        """A broadcast that ``takers`` ranks are to take."""
        found = self._of(key)
        if found.sent is not None:
            self._settle(self._pending.pop(key))
            found = self._of(key)
        found.sent = track, part
        self._look(key, found, takers)

    def taken(self, key: tuple[Any, ...], track: int, part: Part, takers: int) -> None:
        """A rank took a broadcast."""
        found = self._of(key)
        found.taken.append((track, part))
        self._look(key, found, takers)

    def finish(self) -> None:
        """Draw all that waits."""
        for found in self._pending.values():
            self._settle(found)
        self._pending.clear()

    def _of(self, key: tuple[Any, ...]) -> _Broadcast:
        found = self._pending.get(key)
        if found is None:
            found = self._pending[key] = _Broadcast()
            if len(self._pending) > PENDING_MAX:
                self._settle(self._pending.popitem(last=False)[1])
        return found

    def _look(self, key: tuple[Any, ...], found: _Broadcast, takers: int) -> None:
        if found.sent is not None and len(found.taken) >= takers:
            self._settle(self._pending.pop(key))

    def _settle(self, found: _Broadcast) -> None:
        for _, part in found.taken:
            if found.sent is None:
                self.unpaired += 1
                continue
            self.paired += 1
            found.sent[1].flows.append(self.paired)
            part.ended_flows.append(self.paired)
        for track, part in self._drawn(found):
            self._draw(track, part)

    def _drawn(self, found: _Broadcast) -> Iterator[tuple[int, Part]]:
        if found.sent is not None:
            yield found.sent
        yield from found.taken
