"""`stagewatch bundle`: an incident with all that belongs to it, as one file that opens anywhere."""

import argparse
import sys
from pathlib import Path

import msgspec

from stagewatch.agents.credentials import given_token
from stagewatch.agents.options import TOKEN
from stagewatch.agents.tls import ClientTls, add_tls_arguments
from stagewatch.monitor.bundlefile import SUFFIX
from stagewatch.monitor.bundling import JournalOrigin, Origin, Packed, make_bundle
from stagewatch.monitor.progress import ProgressBar
from stagewatch.monitor.remote import CollectorOrigin
from stagewatch.monitor.sources import open_recordings
from stagewatch.monitor.text import printable

HELP = "pack an incident with its evidence into one file that opens anywhere"
DESCRIPTION = (
    "Pack one incident into a zip archive: a report to read (report.html, report.txt), the incident and what the ranks "
    "said of themselves as JSON, and the evidence of all ranks around it, which `stagewatch replay FILE` opens like "
    "any other recording. Asks the running collector of --collector, or reads a data directory with --from. "
    "Secrets are not in it, and token values only with --raw-tokens, where they were recorded at all."
)
EPILOG = "Exit status: 0 written, 2 nothing that can be used."


class Told(msgspec.Struct, frozen=True):
    """What ``--json`` prints."""

    output: str
    bytes: int
    incident: str
    first_step: int
    last_step: int
    whole: bool
    reproduces: bool
    raw_tokens: bool
    raw_left_out: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "incident", metavar="INCIDENT", help="its id; with --from the beginning of it is enough"
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        help="a collector's data directory, or a bundle, instead of a running collector",
    )
    parser.add_argument(
        "--collector",
        default="http://127.0.0.1:8765",
        help="the collector's address: http://HOST:PORT or https://HOST:PORT",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        help="file that holds a token of scope read, for --raw-tokens of scope admin, too; "
        f"{TOKEN} can hold the token itself",
    )
    add_tls_arguments(parser)
    parser.add_argument(
        "--output", "-o", type=Path, help=f"file to write; without it incident-ID{SUFFIX} here"
    )
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    parser.add_argument(
        "--raw-tokens",
        action="store_true",
        help="pack token values, too, where they were recorded: they are your users' data",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Pack, and say what is in it."""
    with ProgressBar() as progress:
        origin: Origin
        if args.source is not None:
            recordings = open_recordings([args.source])
            origin = JournalOrigin(recordings, progress)
        else:
            origin = CollectorOrigin(args.collector, _token(args), ClientTls.of(args))
            if origin.is_exposed:
                print(
                    "stagewatch: token and evidence cross the network in clear: prefer https://",
                    file=sys.stderr,
                )
        packed = make_bundle(
            origin,
            args.incident,
            lambda incident_id: args.output or Path(f"incident-{incident_id}{SUFFIX}"),
            raw_tokens=args.raw_tokens,
            replace=args.force,
        )
    told = _told(packed)
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(told), indent=2).decode() + "\n")
    else:
        print(text_of(told))
    return 0


def _token(args: argparse.Namespace) -> str:
    way_out = f"give the collector's by --token-file or {TOKEN}, or a data directory by --from"
    return given_token(args.token_file, TOKEN, way_out)


def _told(packed: Packed) -> Told:
    manifest = packed.manifest
    return Told(
        str(packed.path),
        packed.bytes,
        manifest.incident,
        manifest.first_step,
        manifest.last_step,
        manifest.whole,
        manifest.reproduces,
        manifest.raw_tokens,
        manifest.raw_left_out,
    )


def text_of(told: Told) -> str:
    """What was packed, as text."""
    tokens = "with token values" if told.raw_tokens else "digests only"
    if told.raw_left_out:
        tokens += " (token values were recorded: --raw-tokens packs them)"
    lines = [
        f"{printable(told.output)}: {told.bytes} bytes, steps {told.first_step} to {told.last_step}, {tokens}"
    ]
    if not told.reproduces:
        lines.append(
            "Not all that was said of the incident can be said from what is left of its evidence: see its report."
        )
    lines.append(f"Next: stagewatch replay {printable(told.output)} show {told.incident}")
    return "\n".join(lines)
