"""`stagewatch-agent dump`: what rings hold, as one file to carry away."""

import argparse
import contextlib
import os
import secrets
import sys
import textwrap
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from stagewatch.agents.credentials import key_from_text, read_key_file
from stagewatch.agents.digest import KEY_SIZE
from stagewatch.agents.dumpfile import SUFFIX, DumpWriter
from stagewatch.agents.dumping import RingSummary, dump, key_beside, privacy_of, rings_of
from stagewatch.agents.errors import RingError, SettingsError
from stagewatch.agents.options import DIGEST_KEY
from stagewatch.agents.ring import RingReader
from stagewatch.agents.terminal import printable

HELP: Final = "write what rings hold into one file that `stagewatch replay` opens anywhere"
DESCRIPTION: Final = (
    "Write what the rings of a killed, ended or running engine hold into one file, and say what is in it. The rings "
    "are only read. Tokens become keyed digests, as a sidecar would send them: with the key of the ring directory, "
    "where a sidecar made one, else with a key for this dump alone. `stagewatch replay FILE` opens it anywhere."
)
EPILOG: Final = (
    "Dumps of several nodes can be replayed together if all were made with one key (--key-file). Exit status: 0 "
    "written, 2 nothing that can be used."
)
WIDTH: Final = 80


class Told(msgspec.Struct, frozen=True):
    """What ``--json`` prints."""

    output: str
    bytes: int
    raw_tokens: bool
    rings: list[RingSummary]
    left_out: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "rings", nargs="+", metavar="RING", help="a ring (NAME.ring), or a directory of rings"
    )
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        help=f"file to write; without it INSTANCE{SUFFIX} here, or rings{SUFFIX} of several engines",
    )
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    parser.add_argument(
        "--key-file",
        type=Path,
        help=f"file that holds the digest key, 32 hex digits; {DIGEST_KEY} can hold the key itself",
    )
    parser.add_argument(
        "--raw-tokens",
        action="store_true",
        help="write token values too, not only their digests: they are your users' data",
    )
    parser.add_argument(
        "--pseudonymise", action="store_true", help="write keyed digests in place of request ids"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Write the dump and say what is in it."""
    if not all(name.strip() for name in args.rings):
        raise SettingsError("RING is empty: name a ring or a directory (`.` for this one)")
    rings = rings_of([Path(name) for name in args.rings])
    privacy = privacy_of(_key(args, rings), raw_tokens=args.raw_tokens, pseudonymise=args.pseudonymise)
    output = args.output or _default_output(rings)
    with DumpWriter(output, replace=args.force) as writer:
        summaries, left_out = dump(rings, privacy, writer)
    for why in left_out:
        print(f"stagewatch-agent: left out: {printable(why)}", file=sys.stderr)
    told = Told(str(output), writer.bytes_written, args.raw_tokens, summaries, left_out)
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(told), indent=2).decode() + "\n")
    else:
        print(text_of(told))
    return 0


def _key(args: argparse.Namespace, rings: list[Path]) -> bytes:
    if args.key_file is not None:
        return read_key_file(args.key_file)
    given = os.environ.get(DIGEST_KEY)
    if given:
        return key_from_text(given, DIGEST_KEY)
    return key_beside(rings) or secrets.token_bytes(KEY_SIZE)


def _default_output(rings: list[Path]) -> Path:
    names: set[str] = set()
    for path in rings:
        with contextlib.suppress(RingError), contextlib.closing(RingReader(path)) as reader:
            names.add(reader.identity.instance)
    name = names.pop() if len(names) == 1 else "rings"
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name).lstrip(".")
    return Path(f"{safe[:100] or 'rings'}{SUFFIX}")


def text_of(told: Told) -> str:
    """The summary as text of at most `WIDTH` columns."""
    lines: list[str] = []
    for ring in told.rings:
        lines += _folded(f"{printable(ring.ring)}: {printable(ring.engine)}, {ring.state}", "  ")
        steps = f"steps {ring.first_step} to {ring.last_step}" if ring.last_step else "no step"
        lost = f", {ring.lost} overwritten or damaged before" if ring.lost else ""
        lines += _folded(f"  {ring.records} records, {steps}{lost}", "    ")
        if ring.last_ns:
            when = datetime.fromtimestamp(ring.last_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            lines += _folded(f"  last record {when}, {ring.rows} rows in the last batch", "    ")
        if ring.last_call:
            lines += _folded(f"  last call entered: {printable(ring.last_call)}", "    ")
        if ring.health and ring.health != "armed":
            lines += _folded(f"  probe disarmed: {printable(ring.health)}", "    ")
    tokens = "with token values" if told.raw_tokens else "digests only"
    lines += _folded(f"{printable(told.output)}: {told.bytes} bytes, {tokens}", "  ")
    lines += _folded(f"Next: stagewatch replay {printable(told.output)}", "  ")
    return "\n".join(lines)


def _folded(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
