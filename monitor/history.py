"""A short memory of aligned evidence, for explaining what was found and for what spans two steps of a request.

Windows are kept whole and looked at only to explain. What every row needs of its request's last step is kept as
columns (`links`).
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import numpy as np

from stagewatch.agents.evidence import InputsBlock, join
from stagewatch.monitor.links import LINK_STEPS, SENT_COLUMNS, Links, Rows
from stagewatch.monitor.states import StepSeen
from stagewatch.monitor.windows import InputsWindow, PayloadWindow, Window, life_of, lives_of

STEPS_KEPT: Final = 512
"""Steps remembered."""
LOOK_BACK_STEPS: Final = 256
"""How far back a row's last step is looked for; less than is kept, so that cutting evidence up changes nothing."""


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
        """The last stage's last rank's block."""
        return self.window.blocks[-1]


def _joined(windows: Iterable[Window[Any]]) -> deque[Window[Any]]:
    """The same steps in as few windows as there are changes of who is in them."""
    joined: deque[Window[Any]] = deque()
    for (group, indices), parts in groupby(windows, lambda window: (window.group, window.indices)):
        blocks = zip(*(part.blocks for part in parts), strict=True)
        joined.append(Window(group, indices, tuple(join(list(column)) for column in blocks)))
    return joined


class History:
    """Windows of the newest steps, oldest dropped first."""

    def __init__(self) -> None:
        self._inputs: deque[InputsWindow] = deque()
        self._sent: deque[PayloadWindow] = deque()
        self._rows = Rows()
        self._links: Links | None = None

    def remember(self, inputs: InputsWindow | None, sent: PayloadWindow | None) -> None:
        """Add a chunk's windows, before they are judged."""
        if inputs is not None:
            self._inputs.append(inputs)
            self._rows.add(inputs)
        if sent is not None:
            self._sent.append(sent)
            self._rows.note_sent(sent)
        self._links = None if inputs is None else self._rows.link()

    def forget(self) -> None:
        """Drop what is too old, once a chunk was judged."""
        newest = int(self._inputs[-1].steps[-1]) if self._inputs else 0
        self._rows.forget(newest - LINK_STEPS)
        while len(self._inputs) > 1 and self._inputs[0].steps[-1] <= newest - STEPS_KEPT:
            self._inputs.popleft()
        while len(self._sent) > 1 and self._sent[0].steps[-1] <= newest - STEPS_KEPT:
            self._sent.popleft()

    @property
    def links(self) -> Links | None:
        """The present chunk's inputs, row by row beside their request's last step; None without inputs."""
        return self._links

    def __getstate__(self) -> dict[str, Any]:
        """For saving: windows of like ranks as one, which is a hundred times less to write down."""
        return self.__dict__ | {
            "_inputs": _joined(self._inputs),
            "_sent": _joined(self._sent),
            "_links": None,
        }

    def moments(self, first: int, last: int) -> Iterator[StepSeen]:
        """What each rank recorded of steps ``first`` to ``last``, as far as they are remembered."""
        for window in self._inputs:
            for at in np.flatnonzero((window.steps >= first) & (window.steps <= last)).tolist():
                for index, block in zip(window.indices, window.blocks, strict=True):
                    rank = window.group.ranks[index]
                    yield StepSeen(rank, int(window.steps[at]), int(block.t_ns[at]), int(block.rows[at]))

    def row_at(self, step: int, row_in_step: int) -> Seen | None:
        """The row at a position of a step's batch."""
        for window in reversed(self._inputs):
            steps = window.steps
            if steps[0] > step:
                continue
            at = int(np.searchsorted(steps, step))
            if at < len(steps) and steps[at] == step and row_in_step < window.blocks[0].rows[at]:
                return Seen(window, int(window.starts[at]) + row_in_step, step)
            return None
        return None

    def previous(self, request: int, life: int, before: int) -> Seen | None:
        """The newest row of a (request, life) at a step below ``before``."""
        return self._newest(request, life, before)

    def life(self, request: int, upto: int) -> int | None:
        """A request's life at its newest step up to ``upto``; None if unknown."""
        seen = self._newest(request, None, upto + 1)
        return None if seen is None else life_of(seen.reference, seen.row)

    def holder(self, index: int, slot: int, generation: int, before: int) -> Seen | None:
        """The newest row below step ``before`` that ran in a slot of rank ``index``; None if unknown."""
        for window in reversed(self._inputs):
            if window.steps[-1] < before - LOOK_BACK_STEPS:
                break
            block = window.blocks[index]
            end = int(window.starts[np.searchsorted(window.steps, before)])
            rows = np.flatnonzero((block.slot[:end] == slot) & (block.generation[:end] == generation))
            if len(rows):
                row = int(rows[-1])
                return Seen(window, row, int(window.steps[window.locate(row)[0]]))
        return None

    def _newest(self, request: int, life: int | None, before: int) -> Seen | None:
        for window in reversed(self._inputs):
            if window.steps[0] >= before:
                continue
            if window.steps[-1] < before - LOOK_BACK_STEPS:
                return None
            block = window.blocks[-1]
            end = int(window.starts[np.searchsorted(window.steps, before)])
            found = block.request[:end] == np.uint64(request)
            if life is not None:
                found &= lives_of(block)[:end] == life
            rows = np.flatnonzero(found)
            if len(rows):
                row = int(rows[-1])
                step = int(window.steps[window.locate(row)[0]])
                return Seen(window, row, step) if step >= before - LOOK_BACK_STEPS else None
        return None

    def complete(self, first: int, last: int) -> bool:
        """Whether every step from ``first`` to ``last`` is remembered."""
        present = 0
        for window in self._inputs:
            a, b = np.searchsorted(window.steps, [first, last + 1])
            present += int(b - a)
        return present == last - first + 1

    def sent(self, step: int, request: int) -> SentRow | None:
        """What the last stage sent for a request at a step; None if unknown or if its TP ranks disagree."""
        for window in reversed(self._sent):
            block = window.blocks[0]
            at = int(np.searchsorted(block.step, step))
            if at == len(block.step) or block.step[at] != step:
                continue
            start = int(window.starts[at])
            rows = np.flatnonzero(block.request[start : start + int(block.rows[at])] == np.uint64(request))
            if not len(rows):
                return None
            row = start + int(rows[0])
            if any(len(set(window.values(column, row).tolist())) > 1 for column in SENT_COLUMNS):
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
