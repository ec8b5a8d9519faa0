"""Incidents as text for a terminal of any width, page by page where it is long."""

import os
import shlex
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from typing import Final, Self, TextIO

from stagewatch.agents.terminal import printable
from stagewatch.monitor.incidents import Report

__all__ = ["Style", "incident_text", "paged", "printable", "wrapped"]

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


def paged(text: str, *, wanted: bool = True) -> None:
    """Print text; through a pager where it is longer than the terminal, and only on one.

    The pager is what PAGER says, else `less` where it is installed. It passes our colours on and ends by itself
    where the text fits.
    """
    lines = shutil.get_terminal_size((80, 24)).lines
    if not (wanted and sys.stdout.isatty() and sys.stdin.isatty()) or text.count("\n") + 2 < lines:
        print(text)
        return
    given = os.environ.get("PAGER")
    command = shlex.split(given) if given else ["less"] if shutil.which("less") else []
    try:
        pager = subprocess.Popen(  # noqa: S603  # the user's own choice
            command, stdin=subprocess.PIPE, text=True, env={"LESS": "FRX", **os.environ}
        )
    except (OSError, ValueError, IndexError):
        print(text)
        return
    try:
        pager.communicate(text + "\n")
    except (BrokenPipeError, KeyboardInterrupt):
        pager.wait()


def incident_text(incident: Report, style: Style, *, names_engine: bool = False) -> str:
    """One incident: what, where, since when, who, the chain of cause, each rank's values, the remedy."""
    lines = [style.paint(incident.severity.upper(), incident.severity) + f" {incident.check}"]
    lines.append(f"  incident {incident.id}")
    if names_engine:
        replica = f", replica {incident.dp}" if incident.dp else ""
        lines.append(wrapped(f"  engine {printable(incident.instance)}{replica}", style, "  "))
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
