"""A short memory of aligned evidence, for explaining what was found. Bounded in rows; never on the hot path."""

from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np

from stagewatch.agents.evidence import InputsBlock
from stagewatch.monitor.windows import InputsWindow, PayloadWindow

STEPS_KEPT: Final = 512
"""Steps remembered. Must exceed the longest gap between two steps of a request that blame looks back over."""


_SENT_COLUMNS: Final = ("num_sampled", "num_rejected", "tokens_digest", "draft_digest")


@dataclass(frozen=True, slots=True)
class SentRow:
    """What the last stage sent for one row."""

    step: int
    num_sampled: int
    num_rejected: int
    last_digest: int
    draft_digest: int
    drafts: int


@dataclass(frozen=True, slots=True)
class Seen:
    """One row of a window."""

    window: InputsWindow
    row: int
    step: int

    @property
    def reference(self) -> InputsBlock:
        """The last stage's first rank's block."""
        return self.window.blocks[-1]


class History:
    """Windows of the newest steps, oldest dropped first."""

    def __init__(self) -> None:
        self._inputs: deque[InputsWindow] = deque()
        self._sent: deque[PayloadWindow] = deque()
        self._steps = 0

    def remember(self, inputs: InputsWindow | None, sent: PayloadWindow | None) -> None:
        """Add a chunk's windows."""
        if inputs is not None:
            self._inputs.append(inputs)
            self._steps += len(inputs.steps)
            while len(self._inputs) > 1 and self._steps - len(self._inputs[0].steps) >= STEPS_KEPT:
                self._steps -= len(self._inputs.popleft().steps)
        if sent is not None:
            self._sent.append(sent)
            oldest = self._inputs[0].steps[0] if self._inputs else 0
            while len(self._sent) > 1 and self._sent[0].steps[-1] < oldest:
                self._sent.popleft()

    def row_at(self, step: int, row_in_step: int) -> Seen | None:
        """The row at a position of a step's batch."""
        for window in reversed(self._inputs):
            steps = window.steps
            if steps[0] > step:
                continue
            at = int(np.searchsorted(steps, step))
            if at < len(steps) and steps[at] == step and row_in_step < window.blocks[0].rows[at]:
                return Seen(window, int(window.blocks[0].rows[:at].sum()) + row_in_step, step)
            return None
        return None

    def previous(self, request: int, generation: int, before: int) -> Seen | None:
        """The newest row of a (request, generation) at a step below ``before``."""
        for window in reversed(self._inputs):
            if window.steps[0] >= before:
                continue
            block = window.blocks[-1]
            rows = np.flatnonzero((block.request == np.uint64(request)) & (block.generation == generation))
            for row in rows[::-1]:
                step = int(window.steps[window.locate(int(row))[0]])
                if step < before:
                    return Seen(window, int(row), step)
        return None

    def complete(self, first: int, last: int) -> bool:
        """Whether every step from ``first`` to ``last`` is remembered."""
        present = sum(int(((w.steps >= first) & (w.steps <= last)).sum()) for w in self._inputs)
        return present == last - first + 1

    def sent(self, step: int, request: int) -> SentRow | None:
        """What the last stage sent for a request at a step; None if unknown or if its TP ranks disagree."""
        for window in reversed(self._sent):
            block = window.blocks[0]
            at = int(np.searchsorted(block.step, step))
            if at == len(block.step) or block.step[at] != step:
                continue
            start = int(block.rows[:at].sum())
            rows = np.flatnonzero(block.request[start : start + int(block.rows[at])] == np.uint64(request))
            if not len(rows):
                return None
            row = start + int(rows[0])
            if any(len(set(window.values(column, row).tolist())) > 1 for column in _SENT_COLUMNS):
                return None
            return SentRow(
                step,
                int(block.num_sampled[row]),
                int(block.num_rejected[row]),
                int(block.last_digest[row]),
                int(block.draft_digest[row]),
                int(block.drafts[at]),
            )
        return None
