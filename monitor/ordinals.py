"""Ordinals that ranks have in common, where one of them counted otherwise.

A rank numbers the batches it executed. Where its recorder missed one, or it really executed one more or less than the
others, all its later ordinals are off by a constant. `shifts` finds that. A batch that only some ranks have keeps an
ordinal of its own, and the ranks that lack it are renumbered from there on, so that what is not on record of them is
seen to be missing.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from stagewatch.agents.evidence import I64, EventBlock, Evidence
from stagewatch.agents.record import Kind
from stagewatch.monitor.blocks import KINDS

SHIFTS_MAX: Final = 64
"""Shifts of one rank remembered one by one; what comes is far newer than the oldest."""


@dataclass(frozen=True, slots=True)
class Shift:
    """A rank lacks ``missing`` batches from ``step`` on: what it counted as ``step`` comes after them."""

    step: int
    missing: int

    def of(self, steps: I64) -> I64:
        """The ordinals in common of a rank's own."""
        return steps + np.where(steps >= self.step, self.missing, 0)

    def of_step(self, step: int) -> int:
        """The ordinal in common of one of a rank's own."""
        return step + self.missing if step >= self.step else step

    def of_block(self, kind: str, block: Any) -> Any:
        """A block under ordinals in common."""
        if kind == "consumed":
            return replace(block, step=self.of(block.step), at=self.of(block.at))
        return replace(block, step=self.of(block.step))

    def of_events(self, events: EventBlock) -> EventBlock:
        """Events under ordinals in common."""
        bound = events.kind == Kind.BIND  # a bind is recorded under the ordinal before the step it belongs to
        return replace(events, step=np.where(bound, self.of(events.step + 1) - 1, self.of(events.step)))


class Ordinals:
    """How one rank's own ordinals become those in common."""

    def __init__(self) -> None:
        self._shifts: deque[Shift] = deque()

    def add(self, shift: Shift) -> None:
        """From now on, also this. ``shift.step`` is an ordinal in common as of before."""
        self._shifts.append(shift)
        if len(self._shifts) > SHIFTS_MAX:
            first, second = self._shifts.popleft(), self._shifts.popleft()
            self._shifts.appendleft(Shift(1, first.missing + second.missing))

    def of_step(self, step: int) -> int:
        """The ordinal in common of an own one."""
        for shift in self._shifts:
            step = shift.of_step(step)
        return step

    def of(self, steps: I64) -> I64:
        """The ordinals in common of own ones."""
        for shift in self._shifts:
            steps = shift.of(steps)
        return steps

    def of_evidence(self, evidence: Evidence) -> Evidence:
        """Evidence of the rank under ordinals in common."""
        for shift in self._shifts:
            changed: dict[str, Any] = {
                kind: shift.of_block(kind, block)
                for kind in KINDS
                if (block := getattr(evidence, kind)) is not None
            }
            if evidence.events is not None:
                changed["events"] = shift.of_events(evidence.events)
            evidence = replace(evidence, **changed)
        return evidence
