"""Incidents as text for a terminal of any width."""

import os
import shutil
import textwrap
from dataclasses import dataclass
from typing import Final, Self, TextIO

from stagewatch.monitor.incidents import Report

WIDTH_MIN: Final = 40
WIDTH_MAX: Final = 100
_COLOURS: Final = {"critical": "31;1", "warning": "33", "notice": "36", "label": "2", "title": "1"}


@dataclass(frozen=True, slots=True)
class Style:
    """How to write: width in columns, and whether colour is welcome."""

    width: int
    colour: bool

    @classmethod
    def for_stream(cls, stream: TextIO) -> Self:
        """What suits a stream: colour only on a terminal, and not where NO_COLOR is set (no-color.org)."""
        columns = shutil.get_terminal_size((80, 24)).columns
        colour = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        return cls(min(max(columns, WIDTH_MIN), WIDTH_MAX), colour)

    def paint(self, text: str, role: str) -> str:
        """Text in the colour of a role, where colour is welcome."""
        return f"\x1b[{_COLOURS[role]}m{text}\x1b[0m" if self.colour else text


def wrapped(text: str, style: Style, indent: str = "") -> str:
    """Text folded to the style's width; continuation lines are indented."""
    return textwrap.fill(
        text, style.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def printable(text: str) -> str:
    """Text that may come from a client, so that it cannot steer the terminal: quoted if it tries to."""
    return text if text.isprintable() else ascii(text)


def incident_text(incident: Report, style: Style, *, names_engine: bool = False) -> str:
    """One incident: what, where, since when, who, the chain of cause, each rank's values, the remedy."""
    lines = [style.paint(incident.severity.upper(), incident.severity) + f" {incident.check}"]
    if names_engine:
        replica = f", replica {incident.dp}" if incident.dp else ""
        lines.append(wrapped(f"  engine {incident.instance}{replica}", style, "  "))
    about = f"request {printable(incident.request)}" if incident.request else "the engine"
    good = f", last good step {incident.last_good_step}" if incident.last_good_step else ""
    lines.append(wrapped(f"  {about}, first bad step {incident.first_bad_step}{good}", style, "  "))
    if incident.blamed:
        lines.append(wrapped(f"  wrong: {_ranks(incident.blamed)}", style, "  "))
    elif incident.severity == "critical":
        lines.append(
            wrapped(f"  {_ranks(incident.ranks)} disagree; the evidence blames none of them", style, "  ")
        )
    for link in incident.chain:
        lines.append(wrapped(f"  step {link.step:<6} {printable(link.text)}", style, " " * 14))
    lines += _values(incident, style)
    lines.append(wrapped(f"  {incident.remedy}", style, "  "))
    return "\n".join(lines)


def _ranks(ranks: tuple[int, ...]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _values(incident: Report, style: Style) -> list[str]:
    if not incident.values:
        return []
    lines = [style.paint(f"  at step {incident.first_bad_step}", "label")]
    for field in dict.fromkeys(value.field for value in incident.values):
        lines.append(f"    {field}")
        for value in incident.values:
            if value.field == field:
                lines.append(wrapped(f"      rank {value.rank:<3} {value.text}", style, " " * 15))
    return lines
