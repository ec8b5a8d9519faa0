"""The lattice as SVG: ranks down, steps across, as the live page draws it. Shapes say what colours say."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from stagewatch.monitor.picture import DIFFERS, EXCLUDED, FROZEN
from stagewatch.monitor.showing import Showing

CELL, LANE, LABEL, AXIS = 12, 20, 132, 22
"""Pixels."""
COLUMNS_MAX: Final = 160
"""Columns of a picture; where there are more steps, several share one."""
BEFORE, AFTER = 12, 36
"""Steps shown around the first bad step of an incident."""


@dataclass(slots=True)
class Column:
    """What one column of a lattice shows: a step, or several."""

    first: int
    last: int
    differing: list[bool]
    """By rank."""
    excluded: bool
    frozen: list[bool]
    drift: list[int]
    unknown: str
    """Why nothing of it was compared; empty where something was."""


def columns_of(shown: Showing, ranks: int, first: int, last: int) -> list[Column]:
    """The picture of steps ``first`` to ``last``, at most `COLUMNS_MAX` columns of them."""
    places = {step: place for place, step in enumerate(shown.step) if first <= step <= last}
    gaps = [gap for gap in shown.uncompared if gap[0] <= last and gap[1] >= first]
    if not places and not gaps:
        return []
    begin = max(first, min([*places, *(gap[0] for gap in gaps)]))
    end = min(last, max([*places, *(gap[1] for gap in gaps)]))
    width = -(-(end - begin + 1) // COLUMNS_MAX)
    found = [
        Column(at, min(at + width - 1, end), [False] * ranks, False, [False] * ranks, [0] * ranks, "")
        for at in range(begin, end + 1, width)
    ]
    for step, place in places.items():
        column = found[(step - begin) // width]
        for rank, rows in enumerate(shown.differing[place]):
            column.differing[rank] |= rows > 0
    for place, step in enumerate(shown.marks.step):
        if not begin <= step <= end:
            continue
        column, state = found[(step - begin) // width], shown.marks.state[place]
        column.excluded |= bool(state & EXCLUDED)
        for rank in shown.marks.ranks[place] if state & DIFFERS else ():
            column.frozen[rank] |= bool(state & FROZEN)
            column.drift[rank] = column.drift[rank] or shown.marks.drift[place]
    for column in found:
        if not any(step in places for step in range(column.first, column.last + 1)):
            column.unknown = next(
                (why for a, b, why in gaps if a <= column.last and b >= column.first), "not recorded"
            )
    return found


def lattice_svg(
    columns: Sequence[Column], names: Sequence[str], early: int, title: str, marked_step: int = 0
) -> str:
    """An SVG picture. ``names`` of the ranks, first stage first.

    The first ``early`` of them belong to earlier stages, which a broadcast is for. ``marked_step`` gets a frame.
    """
    width, height = LABEL + len(columns) * CELL + 8, AXIS + len(names) * LANE + 4
    parts = [
        f'<svg class="cells" role="img" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'aria-label="{escape(title)}">',
    ]
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 1000) if n * CELL >= 56)
    for place, column in enumerate(columns):
        if place % every == 0:
            x = LABEL + place * CELL
            parts.append(f'<text class="axis" x="{x + 2}" y="{AXIS - 8}">{column.first}</text>')
    for rank, name in enumerate(names):
        y = AXIS + rank * LANE
        parts.append(f'<text class="lane" x="4" y="{y + 14}">{escape(name)}</text>')
        for place, column in enumerate(columns):
            parts.append(_cell(column, rank, LABEL + place * CELL, y, rank < early))
    for place, column in enumerate(columns):
        if marked_step and column.first <= marked_step <= column.last:
            x = LABEL + place * CELL
            parts.append(
                f'<rect class="mark" x="{x - 1}" y="{AXIS - 1}" width="{CELL + 1}" height="{len(names) * LANE}"/>'
            )
    return "".join([*parts, "</svg>"])


def _cell(column: Column, rank: int, x: int, y: int, is_early: bool) -> str:
    width, height = CELL - 1, LANE - 2
    steps = (
        f"step {column.first}" if column.first == column.last else f"steps {column.first} to {column.last}"
    )
    if column.unknown:
        lines = "".join(f"M{x} {y + line}h{width}" for line in range(1, height, 4))
        return f'<path class="none" d="{lines}"><title>{steps}: {escape(column.unknown)}</title></path>'
    differs = column.differing[rank]
    said = "differs from the last stage" if differs else "agrees with the last stage"
    shapes = [
        f'<rect class="{"differs" if differs else "same"}" x="{x}" y="{y}" width="{width}" height="{height}"/>'
    ]
    if differs and column.frozen[rank]:
        said += ", frozen on an old token"
        shapes.append(f'<path class="stroke" d="M{x} {y + height / 2}h{width}"/>')
    elif differs and column.drift[rank]:
        said += f", positions {column.drift[rank]:+d}"
        down = column.drift[rank] < 0
        a, b = (y + 4, y + height - 4) if down else (y + height - 4, y + 4)
        shapes.append(f'<path class="stroke" d="M{x} {a}L{x + width} {b}"/>')
    elif differs:
        cross = f"M{x + 2} {y + 2}L{x + width - 2} {y + height - 2}M{x + width - 2} {y + 2}L{x + 2} {y + height - 2}"
        shapes.append(f'<path class="stroke" d="{cross}"/>')
    if column.excluded and is_early:
        said += ", a row was dropped from the broadcast"
        shapes.append(f'<path class="excluded" d="M{x} {y}h{width}l-{width / 2} 8z"/>')
    return f"<g><title>{steps}: {said}</title>{''.join(shapes)}</g>"
