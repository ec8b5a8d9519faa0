"""What of the recordings is wanted, as a user says it."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stagewatch.monitor.incidents import Report, Severity
from stagewatch.monitor.pieces import STEP_MAX
from stagewatch.monitor.sources import SourceError
from stagewatch.monitor.story.errors import NotFoundError

_RANKS_MAX: Final = 1 << 24
_SEVERITIES: Final = {severity.word: severity for severity in Severity}

Steps = tuple[int, int]
"""First and last step, both included."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Empty texts and None stand for anything."""

    check: str = ""
    severity: Severity = Severity.NOTICE
    request: str = ""
    rank: int | None = None
    steps: Steps = (0, STEP_MAX)
    engine: str = ""

    def takes(self, incident: Report) -> bool:
        """Whether an incident is wanted."""
        return (
            self.check in ("", incident.check)
            and _SEVERITIES[incident.severity] >= self.severity
            and incident.request.startswith(self.request)
            and (self.rank is None or self.rank in incident.ranks or self.rank in incident.blamed)
            and self.steps[0] <= incident.first_bad_step <= self.steps[1]
            and self.engine in ("", incident.instance)
        )


def add_filter_arguments(parser: argparse.ArgumentParser, verb: str, of_request: str) -> None:
    """Declare the options that narrow what a command does, in words: ``verb`` only ..."""
    parser.add_argument("--check", default="", help=f"{verb} only incidents of this check")
    parser.add_argument(
        "--severity",
        default="notice",
        choices=list(_SEVERITIES),
        help=f"{verb} only incidents of at least this severity",
    )
    parser.add_argument(
        "--request", default="", help=f"{verb} only {of_request}; the beginning of its id is enough"
    )
    parser.add_argument(
        "--rank", type=rank_number, help=f"{verb} only incidents in which this rank's evidence disagrees"
    )
    parser.add_argument(
        "--step",
        type=step_range,
        default="0:",
        metavar="A:B",
        help=f"{verb} only of steps A to B; A:, :B and N are fine",
    )
    parser.add_argument("--engine", default="", help=f"{verb} only of this engine instance")


def filters_of(args: argparse.Namespace) -> Filters:
    """What the options of `add_filter_arguments` say."""
    steps = step_range(args.step) if isinstance(args.step, str) else args.step
    return Filters(args.check, Severity[args.severity.upper()], args.request, args.rank, steps, args.engine)


def step_range(text: str) -> Steps:
    """``A:B``, ``A:``, ``:B`` or ``N``, both ends included; an argparse type."""
    first, colon, last = text.partition(":")
    try:
        begin = int(first) if first.strip() else 0
        end = (int(last) if last.strip() else STEP_MAX) if colon else begin
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is no range of steps: write A:B, A:, :B or N"
        ) from None
    if (not text.strip(": ") and text != ":") or not 0 <= begin <= end <= STEP_MAX:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is no range of steps: A must not exceed B, nor B {STEP_MAX}"
        )
    return begin, end


def rank_number(text: str) -> int:
    """A rank's number in engine order; an argparse type."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number < _RANKS_MAX:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is no rank: give its number, (dp * pp_size + pp) * tp_size + tp"
        )
    return number


def number(text: str, what: str, most: int = STEP_MAX) -> int:
    """A whole number given as an operand. Raises NotFoundError."""
    try:
        found = int(text)
    except ValueError:
        found = -1
    if not 0 <= found <= most:
        raise NotFoundError(f"{text[:40]!r} is no {what}: give a whole number")
    return found


def paths_of(words: list[str]) -> list[Path]:
    """The paths that ``words`` name. Raises SourceError for an empty one, which would mean this directory."""
    if not all(word.strip() for word in words):
        raise SourceError("SOURCE is empty: name a file or a directory (`.` for this one)")
    if any("\0" in word for word in words):
        raise SourceError("SOURCE holds a null character: that names no file")
    return [Path(word) for word in words]
