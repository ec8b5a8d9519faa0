"""The picture: what an engine's newest steps looked like, rank by rank and row by row, for people to look at.

No verdict is taken from it. It follows the verdicts, is bounded in steps and rows, and keeps the steps around the
first bad step of the newest incidents for longer than the rest.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.blocks import I64, InputsBlock
from stagewatch.agents.record import I32, U8, U64
from stagewatch.monitor.checks.base import Chunk
from stagewatch.monitor.history import History, Seen
from stagewatch.monitor.windows import InputsWindow, life_of, starts_of

STEPS_KEPT: Final = 2048
ROWS_KEPT: Final = 65_536
"""About 1 MB of columns."""
AROUND_STEPS: Final = 32
"""Steps kept before and after the first bad step of an incident."""
INCIDENTS_KEPT: Final = 32
"""Newest incidents whose surroundings are kept."""
FROZEN_ROWS_MAX: Final = 256
"""Differing rows of one chunk that are looked at for a state that stands still."""
JOINED: Final = 64
"""Segments saved as one."""

DIFFERS: Final = 1
"""Some rank holds or feeds something else than the last stage."""
EXCLUDED: Final = 2
"""The engine's mask dropped the row from the broadcast although it may have sampled."""
PREFILL: Final = 4
FROZEN: Final = 8
"""A rank's last sampled token stands still while the last stage's moves."""

_STEP_COLUMNS: Final = ("step", "t_ns", "rows", "revision", "differing")
_ROW_COLUMNS: Final = ("request", "slot", "state", "drift", "ranks")
_COMPARED: Final = ("ids_digest", "position", "position_shape", "last_digest", "draft_digest", "computed")


@dataclass(slots=True)
class Segment:
    """Some consecutive compared steps. Step columns: [steps]; row columns: [rows], laid end to end."""

    step: I64
    t_ns: I64
    """Wall clock of the first rank to record the step."""
    rows: I32
    revision: I64
    """When the picture of the step last changed; counts changes of the whole picture."""
    differing: I32
    """Rows in which a rank differs from the last stage: [steps, ranks]."""
    request: U64
    slot: I32
    state: U8
    """`DIFFERS`, `EXCLUDED`, `PREFILL` and `FROZEN`, or'ed."""
    drift: I32
    """Position fed by the rank that is furthest off, less the last stage's; 0 where they agree."""
    ranks: U64
    """Bit i: rank i of the group differs from the last stage (the first 64 ranks)."""
    touched: int
    """The newest of ``revision``."""

    @property
    def starts(self) -> I64:
        """Where each step's rows begin, and where the last one's end: int64 [steps + 1]."""
        return starts_of(self.rows)

    def chosen(self, steps: NDArray[np.bool_]) -> "Segment":
        """Some of its steps."""
        rows = np.repeat(steps, self.rows)
        of_steps = {name: getattr(self, name)[steps] for name in _STEP_COLUMNS}
        of_rows = {name: getattr(self, name)[rows] for name in _ROW_COLUMNS}
        return Segment(**of_steps, **of_rows, touched=self.touched)


@dataclass(frozen=True, slots=True)
class Uncompared:
    """Steps that have no cells."""

    first: int
    last: int
    revision: int
    reason: str
    """``batch_differs``: ranks ran different batches; ``gap``: some rank's records of it were lost."""


@dataclass(frozen=True, slots=True)
class View:
    """What changed in a picture after a revision, oldest step first."""

    revision: int
    segments: tuple[Segment, ...]
    uncompared: tuple[Uncompared, ...]


class Picture:
    """The picture of one group."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._segments: deque[Segment] = deque()
        self._kept: deque[Segment] = deque()
        """What is older, of steps around incidents."""
        self._uncompared: deque[Uncompared] = deque(maxlen=STEPS_KEPT)
        self._around: deque[int] = deque(maxlen=INCIDENTS_KEPT)
        self._revision = 0
        self._rows = 0
        """Rows of ``_segments``."""
        self._kept_rows = 0

    def __getstate__(self) -> dict[str, Any]:
        """For saving: fewer segments, since each array costs more to write down than what is in it."""
        return self.__dict__ | {"_segments": _joined(self._segments), "_kept": _joined(self._kept)}

    def add(self, chunk: Chunk, differing: NDArray[np.bool_] | None, history: History) -> None:
        """Add what became comparable. ``differing``: bool [rows of ``chunk.inputs``], or None where all agree."""
        self._revision += 1
        if chunk.inputs is not None and len(chunk.inputs.steps):
            segment = self._segment(chunk.inputs, differing, history)
            if len(segment.request) > ROWS_KEPT or len(segment.step) > STEPS_KEPT:
                segment = segment.chosen(_newest(segment))
            self._segments.append(segment)
            self._rows += len(segment.request)
        for found in chunk.unaligned:
            self._uncompared.append(Uncompared(found.step, found.step, self._revision, "batch_differs"))
        for first, last in chunk.gaps:
            if not any((u.first, u.last) == (first, last) for u in self._uncompared):
                self._uncompared.append(Uncompared(first, last, self._revision, "gap"))
        for _, seen in chunk.dropped:
            self._exclude(seen)
        self._forget()

    def keep_around(self, step: int) -> None:
        """Keep the steps around the first bad step of an incident."""
        if step not in self._around:
            self._around.append(step)

    def view(self, after: int, steps_max: int) -> View:
        """The newest ``steps_max`` steps, those kept for incidents included, that changed after revision ``after``."""
        found: list[Segment] = []
        for segment in (*reversed(self._segments), *reversed(self._kept)):
            if segment.touched <= after or steps_max <= 0:
                continue
            changed = segment.revision > after
            count = int(changed.sum())
            if count > steps_max:
                changed[np.flatnonzero(changed)[:-steps_max]] = False
            steps_max -= count
            found.append(segment if changed.all() else segment.chosen(changed))
        uncompared = tuple(gap for gap in self._uncompared if gap.revision > after)
        return View(self._revision, tuple(reversed(found)), uncompared)

    def _segment(
        self, window: InputsWindow, differing: NDArray[np.bool_] | None, history: History
    ) -> Segment:
        reference = window.blocks[-1]
        steps, rows = len(window.steps), len(reference.request)
        segment = Segment(
            step=window.steps.copy(),
            t_ns=np.min([block.t_ns for block in window.blocks], axis=0),
            rows=reference.rows.copy(),
            revision=np.full(steps, self._revision, np.int64),
            differing=np.zeros((steps, self._ranks), np.int32),
            request=reference.request.copy(),
            slot=reference.slot.copy(),
            state=np.where(reference.prefilling != 0, PREFILL, 0).astype(np.uint8),
            drift=np.zeros(rows, np.int32),
            ranks=np.zeros(rows, np.uint64),
            touched=self._revision,
        )
        if differing is not None and differing.any():
            self._mark(segment, window, np.flatnonzero(differing), history)
        return segment

    def _mark(self, segment: Segment, window: InputsWindow, rows: I64, history: History) -> None:
        """Write down, of rows that differ, which ranks do and how."""
        reference = window.blocks[-1]
        segment.state[rows] |= DIFFERS
        place = np.searchsorted(window.starts, rows, side="right") - 1
        for index, block in zip(window.indices, window.blocks, strict=True):
            other = _differs(block, reference, rows)
            if not other.any():
                continue
            np.add.at(segment.differing[:, index], place[other], 1)
            if index < 64:
                segment.ranks[rows[other]] |= np.uint64(1 << index)
            drift = block.position[rows].astype(np.int64) - reference.position[rows]
            further = np.abs(drift) > np.abs(segment.drift[rows])
            segment.drift[rows[further]] = drift[further]
        for row in rows[:FROZEN_ROWS_MAX].tolist():
            if _stands_still(window, row, int(window.steps[window.locate(row)[0]]), history):
                segment.state[row] |= FROZEN

    def _exclude(self, seen: Seen) -> None:
        row = seen.row - int(seen.window.starts[seen.window.locate(seen.row)[0]])
        for segment in reversed(self._segments):
            if segment.step[0] > seen.step:
                continue
            at = int(np.searchsorted(segment.step, seen.step))
            if at < len(segment.step) and segment.step[at] == seen.step and row < segment.rows[at]:
                segment.state[int(segment.starts[at]) + row] |= EXCLUDED
                segment.revision[at] = segment.touched = self._revision
            return

    def _forget(self) -> None:
        if not self._segments:
            return
        newest = int(self._segments[-1].step[-1])
        while len(self._segments) > 1 and (
            self._rows > ROWS_KEPT or self._segments[0].step[-1] <= newest - STEPS_KEPT
        ):
            oldest = self._segments.popleft()
            self._rows -= len(oldest.request)
            near = self._near(oldest.step)
            if near.any():
                self._kept.append(oldest.chosen(near))
                self._kept_rows += len(self._kept[-1].request)
        while self._kept and (self._kept_rows > ROWS_KEPT or not self._near(self._kept[0].step).any()):
            self._kept_rows -= len(self._kept.popleft().request)
        while self._uncompared and self._uncompared[0].last <= newest - STEPS_KEPT:
            self._uncompared.popleft()

    def _near(self, steps: I64) -> NDArray[np.bool_]:
        around = np.fromiter(self._around, np.int64, len(self._around))
        near: NDArray[np.bool_] = (np.abs(steps[:, None] - around) <= AROUND_STEPS).any(axis=1)
        return near


def _joined(segments: Iterable[Segment]) -> deque[Segment]:
    """The same steps in fewer segments, small enough that the oldest can still be let go of a part at a time."""
    parts = [*segments]
    return deque(_join(parts[at : at + JOINED]) for at in range(0, len(parts), JOINED))


def _join(parts: Sequence[Segment]) -> Segment:
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in (*_STEP_COLUMNS, *_ROW_COLUMNS)
    }
    return Segment(**columns, touched=max(part.touched for part in parts))


def _newest(segment: Segment) -> NDArray[np.bool_]:
    """The newest steps of a segment that fit into a picture, at least one."""
    rows = np.cumsum(segment.rows[::-1])[::-1]
    fits = (rows <= ROWS_KEPT) & (np.arange(len(rows))[::-1] < STEPS_KEPT)
    fits[-1] = True
    return fits


def _differs(block: InputsBlock, reference: InputsBlock, rows: I64) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = np.logical_or.reduce(
        [getattr(block, name)[rows] != getattr(reference, name)[rows] for name in _COMPARED]
    )
    return found


def _stands_still(window: InputsWindow, row: int, step: int, history: History) -> bool:
    """Whether some rank's last sampled token is what it was at the row's last step, and the last stage's is not."""
    reference = window.blocks[-1]
    request = int(reference.request[row])
    before = history.previous(request, life_of(reference, row), step)
    if before is None or before.reference.last_digest[before.row] == reference.last_digest[row]:
        return False
    return any(
        then.last_digest[before.row] == now.last_digest[row]
        for then, now in zip(before.window.blocks[:-1], window.blocks[:-1], strict=True)
    )
