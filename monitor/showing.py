"""A view of an engine's picture as the API gives it: columns in JSON, and nothing of rows that are as they should be.

Numbers that need more than 53 bits never leave: a browser would round them.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np

from stagewatch.monitor.picture import PREFILL, Segment, View

RANKS_NAMED: Final = 64


class Marks(msgspec.Struct, frozen=True):
    """Rows worth a mark, as parallel lists."""

    step: list[int]
    row: list[int]
    """Position in the step's batch."""
    request: list[int]
    """Index into the view's ``requests``."""
    slot: list[int]
    state: list[int]
    """1 differs from the last stage, 2 excluded from the broadcast, 4 prefill, 8 frozen; or'ed."""
    drift: list[int]
    """Tokens by which the rank that is furthest off is ahead of the last stage."""
    ranks: list[list[int]]
    """Indices of the ranks that differ from the last stage."""


class Batches(msgspec.Struct, frozen=True):
    """Every row of every step, rows laid end to end, as parallel lists."""

    request: list[int]
    slot: list[int]
    prefill: list[int]


class Showing(msgspec.Struct, frozen=True):
    """What changed in a picture since a revision. Step columns are parallel lists, oldest step first."""

    revision: int
    """Give it as ``after`` to hear of what changed since."""
    step: list[int]
    t_ms: list[int]
    """Wall clock of the step, milliseconds since the epoch."""
    rows: list[int]
    differing: list[list[int]]
    """Per step and rank, rows in which the rank differs from the last stage."""
    uncompared: list[tuple[int, int, str]]
    """(first step, last step, reason) of steps whose rows could not be compared."""
    requests: list[str]
    marks: Marks
    batches: Batches | None
    """Only when asked for."""


def showing(view: View, name_of: Callable[[int], str], *, batches: bool) -> Showing:
    """``view`` for the API; ``name_of`` gives a request's id for its key."""
    segments = view.segments
    marked = [np.flatnonzero(segment.state & ~np.uint8(PREFILL)) for segment in segments]
    keys = _joined(
        [s.request if batches else s.request[rows] for s, rows in zip(segments, marked, strict=True)]
    )
    known, index = np.unique(keys, return_inverse=True)
    every = _split(
        index, [len(s.request) if batches else len(rows) for s, rows in zip(segments, marked, strict=True)]
    )
    return Showing(
        revision=view.revision,
        step=_joined([segment.step for segment in segments]).tolist(),
        t_ms=(_joined([segment.t_ns for segment in segments]) // 10**6).tolist(),
        rows=_joined([segment.rows for segment in segments]).tolist(),
        differing=[row for segment in segments for row in segment.differing.tolist()],
        uncompared=[(gap.first, gap.last, gap.reason) for gap in view.uncompared],
        requests=[name_of(int(key)) for key in known],
        marks=_marks(
            segments, marked, [of[rows] if batches else of for of, rows in zip(every, marked, strict=True)]
        ),
        batches=_batches(segments, index) if batches else None,
    )


def _marks(segments: tuple[Segment, ...], marked: list[Any], index: list[Any]) -> Marks:
    step, row = [], []
    for segment, rows in zip(segments, marked, strict=True):
        starts = segment.starts
        at = np.searchsorted(starts, rows, side="right") - 1
        step.append(segment.step[at])
        row.append(rows - starts[at])

    def column(name: str) -> Any:
        return _joined([getattr(segment, name)[rows] for segment, rows in zip(segments, marked, strict=True)])

    bits = column("ranks").astype(np.uint64)
    return Marks(
        step=_joined(step).tolist(),
        row=_joined(row).tolist(),
        request=_joined(index).tolist(),
        slot=column("slot").tolist(),
        state=column("state").tolist(),
        drift=column("drift").tolist(),
        ranks=[[rank for rank in range(RANKS_NAMED) if word >> rank & 1] for word in bits.tolist()],
    )


def _batches(segments: tuple[Segment, ...], index: Any) -> Batches:
    return Batches(
        request=index.tolist(),
        slot=_joined([segment.slot for segment in segments]).tolist(),
        prefill=_joined([(segment.state & PREFILL) // PREFILL for segment in segments]).tolist(),
    )


def _joined(parts: list[Any]) -> Any:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _split(column: Any, lengths: list[int]) -> list[Any]:
    return np.split(column, np.cumsum(lengths)[:-1]) if lengths else []
