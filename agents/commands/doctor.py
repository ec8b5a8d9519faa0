"""stagewatch-agent doctor: is the installed engine exposed, and what would be watched."""

import argparse
import contextlib
import sys
import textwrap
from typing import Final

import msgspec

from stagewatch.agents.doctor import Examination, examine

HELP: Final = "inspect the installed engine without starting it"
DESCRIPTION: Final = (
    "Look at the vLLM of this environment: its variant, whether its broadcast mask is sound (by running it on the "
    "published cases), what it is exposed to, what stagewatch would hook. Run it with the engine's own Python."
)
EPILOG: Final = "Exit status: 0 sound, 1 exposed, 2 cannot tell."
WIDTH: Final = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--no-plugins", action="store_true", help="do not apply the engine's general plugins before looking"
    )


def run(args: argparse.Namespace) -> int:
    """Examine and report; return the exit status."""
    # vLLM logs to standard output unless told otherwise, which is where a machine reads our one object.
    with contextlib.redirect_stdout(sys.stderr):
        found = examine(plugins=not args.no_plugins)
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    else:
        print(table(found))
    return found.status


def table(found: Examination) -> str:
    """The examination as text of at most `WIDTH` columns."""
    lines = [
        *_entry("verdict", f"{found.verdict.upper()}: {found.why}"),
        *_entry("engine", f"vLLM {found.engine_version}"),
        *_entry("variant", f"{found.variant}: {found.shape}"),
        *_entry("mask", f"{found.mask}: {found.mask_why}"),
    ]
    if found.cases:
        lines += ["", "  case  since  expected  found     "]
        for case in found.cases:
            answer = case.error or _mask(case.found)
            row = f"  {case.case:<4}  {case.since:<5}  {_mask(case.expected):<8}  {answer:<8}"
            lines.append(f"{row}  {'' if case.passed else 'WRONG'}".rstrip()[:WIDTH])
    lines += ["", "exposed to"]
    for exposure in found.exposures:
        lines += _entry(f"  {exposure.answer}", f"{exposure.name}: {exposure.why}")
    lines += ["", "hooks"]
    lines += [f"  {hook}" for hook in found.hooked]
    lines += ["", "not watched"]
    for text in found.not_hooked:
        lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
    lines += ["", *_entry("would arm", found.arming)]
    return "\n".join(line.rstrip() for line in lines)


def _entry(name: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"{name:<11}", subsequent_indent=" " * 11)


def _mask(mask: tuple[bool, ...] | None) -> str:
    return "None" if mask is None else ", ".join("T" if value else "F" for value in mask)
