"""stagewatch export: recordings as Parquet tables, a Perfetto timeline, or a report in one HTML file."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from stagewatch.monitor.exports.exporter import Exporter, ExportError, Found, Wanted, new_file
from stagewatch.monitor.exports.html import HtmlExporter
from stagewatch.monitor.exports.parquet import ParquetExporter
from stagewatch.monitor.exports.perfetto import PerfettoExporter
from stagewatch.monitor.incidents import Incident, report
from stagewatch.monitor.pieces import STEP_MAX
from stagewatch.monitor.progress import ProgressBar
from stagewatch.monitor.replay import Tap, replay
from stagewatch.monitor.sources import Recordings, SourceError, open_recordings
from stagewatch.monitor.story.filters import Filters, add_filter_arguments, filters_of, paths_of
from stagewatch.monitor.story.names import Names
from stagewatch.monitor.story.verdicts import missing_text, summary
from stagewatch.monitor.watch import Watch

HELP: Final = "write recordings as Parquet tables, a Perfetto timeline, or a report in one HTML file"
DESCRIPTION: Final = (
    "Run the checks over recordings, as `stagewatch replay` does over the same SOURCEs, and write them for other "
    "programs. `parquet`: a directory of tables for pandas, polars, DuckDB. `perfetto`: a timeline for "
    "ui.perfetto.dev. `html`: a report that opens anywhere and fetches nothing. docs/replay.md describes them. "
    "Token values are left out unless --raw-tokens says otherwise; request ids are in each of them."
)
EPILOG: Final = "Exit status: 0 written, 2 unusable input, or nothing to write."
OUTPUTS: Final = {
    "parquet": "stagewatch-parquet",
    "perfetto": "stagewatch.pftrace",
    "html": "stagewatch.html",
}
"""Formats, and what is written where no --output is given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("format", choices=OUTPUTS, help="what to write")
    parser.add_argument("words", nargs="+", metavar="SOURCE", help="what to read, as of `stagewatch replay`")
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        help="file to write, of Parquet the directory; without it one named after the format, here",
    )
    parser.add_argument("--force", action="store_true", help="replace what exists")
    parser.add_argument(
        "--raw-tokens",
        action="store_true",
        help="write token values too, where the recording holds them: they are your users' data",
    )
    add_filter_arguments(parser, "write", "incidents of this request")


def run(args: argparse.Namespace) -> int:
    """Replay and write; return the exit status."""
    filters = filters_of(args)
    paths = paths_of(args.words)
    recordings = open_recordings(paths, raw=args.raw_tokens)
    for why in recordings.left_out:
        _say(f"left out: {why}")
    output = args.output or Path(OUTPUTS[args.format])
    _must_be_free(output, force=args.force)
    names = Names()
    with _exporter(args.format, output, names, paths) as exporter:
        told = _export(recordings, exporter, names, filters, raw=args.raw_tokens)
    print("\n".join(told if args.format == "parquet" else [f"{output}: {told[0]}", *told[1:]]))
    return 0


def _export(
    recordings: Recordings, exporter: Exporter, names: Names, filters: Filters, *, raw: bool
) -> list[str]:
    wanted = Wanted(exporter, filters.engine, filters.steps)
    watch = Watch()

    def again(taps: Sequence[Tap]) -> None:
        with ProgressBar() as progress:
            replay(recordings, None, taps=taps, progress=progress, tokens=raw)

    with ProgressBar() as progress:
        missing = replay(recordings, watch, taps=[names, wanted], progress=progress, tokens=raw)
    for why in missing_text(missing, recordings):
        _say(why)
    if not wanted.steps_seen:
        narrowed = filters.engine or filters.steps != (0, STEP_MAX)
        way = "widen --engine or --step" if narrowed else "give recordings of a run that served requests"
        raise SourceError(f"no step to write: {way}")
    incidents = tuple(sorted((i for i in watch.incidents() if filters.takes(report(i))), key=_worst_first))
    return exporter.finish(Found(watch, summary(watch, []), incidents, names, again))


def _worst_first(incident: Incident) -> tuple[int, str, int, int, str]:
    return -incident.severity, incident.instance, incident.dp, incident.first_bad_step, incident.id


@contextmanager
def _exporter(wanted: str, output: Path, names: Names, paths: Sequence[Path]) -> Iterator[Exporter]:
    if wanted == "parquet":
        with ParquetExporter(output, names) as parquet:
            yield parquet
        return
    with new_file(output) as file:
        if wanted == "perfetto":
            yield PerfettoExporter(file)
        else:
            yield HtmlExporter(
                file, f"stagewatch: {', '.join(path.name or str(path) for path in paths)}"[:200]
            )


def _must_be_free(output: Path, *, force: bool) -> None:
    taken = any(output.iterdir()) if output.is_dir() else output.exists()
    if taken and not force:
        raise ExportError(f"{output} exists: name another with --output, or replace it with --force")


def _say(what: str) -> None:
    print(f"stagewatch: {what}", file=sys.stderr)
