"""stagewatch replay: the checks over traces, rings and journals."""

import argparse
import sys
from pathlib import Path
from typing import Final

import msgspec

from stagewatch.monitor.engine import CONSISTENT, DIVERGED
from stagewatch.monitor.incidents import Report, Severity, report
from stagewatch.monitor.replay import open_recordings, replay
from stagewatch.monitor.text import Style, incident_text, wrapped
from stagewatch.monitor.traces import TraceReader
from stagewatch.monitor.watch import Watch

HELP: Final = "run alignment and checks over traces, rings or a journal"
DESCRIPTION: Final = (
    "Run the same alignment and checks over recordings as the collector runs live. PATH is a trace "
    "(NAME.rankN.jsonl), a ring left by an engine (NAME.ring), a directory of either, or a collector's data "
    "directory; give all ranks of a run."
)
EPILOG: Final = (
    "Exit status: 0 nothing at warning or above, 1 incidents, 2 unusable input, or nothing in it to compare."
)
NOTHING_COMPARED: Final = 2
INDETERMINATE: Final = "INDETERMINATE"


class Summary(msgspec.Struct, frozen=True):
    """What ``--json`` prints."""

    steps: int
    rows: int
    verdicts: dict[str, int]
    indeterminate: dict[str, int]
    """Rows of the INDETERMINATE verdict by reason."""
    incidents: list[Report]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="a trace, a ring, or a directory",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Replay and report; return the exit status."""
    recordings = open_recordings(args.paths)
    watch = Watch()
    for why in recordings.left_out:
        print(f"stagewatch: left out: {why}", file=sys.stderr)
    missing = replay(recordings, watch)
    if missing.damaged_bytes or missing.unreadable_entries:
        print(
            f"stagewatch: journal: {missing.damaged_bytes} bytes are torn or damaged and {missing.unreadable_entries} "
            "entries cannot be read: left out",
            file=sys.stderr,
        )
    for source in recordings.sources:
        if isinstance(source, TraceReader):
            _say_what_is_missing(source)
    incidents = watch.incidents()
    found = summary(watch)
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    else:
        _print(found, names_engine=len(watch.states()) > 1)
    if any(incident.severity >= Severity.WARNING for incident in incidents):
        return 1
    if found.rows == found.verdicts[INDETERMINATE]:
        print(f"stagewatch: nothing was compared: {_why_nothing(found)}", file=sys.stderr)
        return NOTHING_COMPARED
    return 0


def _why_nothing(found: Summary) -> str:
    if not found.rows:
        return "no step is recorded: give recordings of a run that served requests"
    return f"{_reasons(found)}: give the recordings of all ranks of the same steps"


def _say_what_is_missing(trace: TraceReader) -> None:
    if trace.cut_off:
        print(f"stagewatch: {trace.file.path}: the last line is cut off and was left out", file=sys.stderr)
    if trace.unknown_lines:
        print(
            f"stagewatch: {trace.file.path}: {trace.unknown_lines} lines of unknown kinds were left out",
            file=sys.stderr,
        )


def summary(watch: Watch) -> Summary:
    """The watch's verdicts and incidents, worst first, without anything that differs from run to run."""
    counts = {CONSISTENT: 0, DIVERGED: 0, INDETERMINATE: 0}
    reasons: dict[str, int] = {}
    for state in watch.states():
        for verdict, rows in state.verdicts.items():
            if verdict in counts:
                counts[verdict] += rows
            else:
                counts[INDETERMINATE] += rows
                reasons[verdict] = reasons.get(verdict, 0) + rows
    incidents = sorted(
        watch.incidents(), key=lambda i: (-i.severity, i.instance, i.dp, i.first_bad_step, i.id)
    )
    return Summary(
        steps=watch.steps(),
        rows=sum(counts.values()),
        verdicts=counts,
        indeterminate=reasons,
        incidents=[report(incident) for incident in incidents],
    )


def _reasons(found: Summary) -> str:
    return ", ".join(
        f"{rows} {reason.replace('_', ' ')}" for reason, rows in sorted(found.indeterminate.items())
    )


def _print(found: Summary, *, names_engine: bool) -> None:
    style = Style.for_stream(sys.stdout)
    for each in found.incidents:
        print(incident_text(each, style, names_engine=names_engine), end="\n\n")
    counts = ", ".join(f"{rows} {verdict}" for verdict, rows in found.verdicts.items())
    print(wrapped(f"{found.steps} steps, {found.rows} rows: {counts}.", style))
    if found.indeterminate:
        print(wrapped(f"Not comparable: {_reasons(found)}.", style))
    severities = [each.severity for each in found.incidents]
    told = ", ".join(
        f"{severities.count(s.word)} {s.word}" for s in reversed(Severity) if s.word in severities
    )
    print(wrapped(f"Incidents: {told or 'none'}.", style))
