"""stagewatch replay: the checks over recordings, and the story after the fact."""

import argparse
import sys
from collections.abc import Callable
from typing import Final

import msgspec

from stagewatch.monitor.incidents import Severity
from stagewatch.monitor.progress import ProgressBar
from stagewatch.monitor.sources import open_recordings
from stagewatch.monitor.story.errors import NotFoundError
from stagewatch.monitor.story.filters import add_filter_arguments, filters_of, paths_of
from stagewatch.monitor.story.teller import Teller
from stagewatch.monitor.story.verdicts import Summary, why_nothing
from stagewatch.monitor.text import Style, paged

HELP: Final = (
    "run the checks over recordings, and tell the story of an incident, a request, a step, two ranks"
)
DESCRIPTION: Final = (
    "Run the same alignment and checks over recordings as the collector runs live, and tell what happened. SOURCE is a "
    "collector's data directory, a ring left by an engine (NAME.ring), a dump (`stagewatch-agent dump`), a bundle "
    "(`stagewatch bundle`), a trace "
    "(NAME.rankN.jsonl), or a directory of these; give all ranks of a run. COMMAND is "
    "one of: `incidents` (what was found; without COMMAND, too), `show INCIDENT` (all of one: where the ranks part, "
    "the chain of cause, what the fixed mask changes), `request ID` (a request's whole life), `step N` (every row on "
    "every rank), `diff RANK RANK` (two ranks, row by row). The beginning of an id is enough where only one "
    "begins so."
)
EPILOG: Final = (
    "Exit status: 0 nothing at warning or above, 1 incidents, 2 unusable input, or nothing in it to compare; of the "
    "other commands 0, or 2 where what is asked for is not there. A SOURCE named like a command: write ./NAME."
)
OPERANDS: Final = {"incidents": 0, "show": 1, "request": 1, "step": 1, "diff": 2}
"""Commands, and how many operands each takes."""
NOTHING_COMPARED: Final = 2
_INDETERMINATE: Final = "INDETERMINATE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "words", nargs="+", metavar="SOURCE... [COMMAND]", help="what to replay, and what to tell"
    )
    add_filter_arguments(parser, "tell", "of this request")
    parser.add_argument(
        "--raw-tokens", action="store_true", help="show what rings hold as token values, not only as digests"
    )
    parser.add_argument("--no-pager", action="store_true", help="print long text at once, on a terminal, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Replay and tell; return the exit status."""
    sources, command, operands = parted(args.words)
    filters = filters_of(args)
    recordings = open_recordings(paths_of(sources), raw=args.raw_tokens)
    for why in recordings.left_out:
        _say(f"left out: {why}")
    with ProgressBar() as progress:
        teller = Teller(recordings, filters, progress)
        answer = _COMMANDS[command](teller, operands)
    for why in teller.missing():
        _say(why)
    style = Style.for_stream(sys.stdout)
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode() + "\n")
    else:
        paged(teller.text(answer, style), wanted=not args.no_pager)
    return _status(answer, teller) if isinstance(answer, Summary) else 0


def parted(words: list[str]) -> tuple[list[str], str, list[str]]:
    """(sources, command, its operands). Raises NotFoundError where they do not fit."""
    at = next((place for place, word in enumerate(words) if place and word in OPERANDS), len(words))
    command = words[at] if at < len(words) else "incidents"
    operands = words[at + 1 :]
    if len(operands) != OPERANDS[command]:
        takes = ("takes no more words", "takes one word more", "takes two words more")[OPERANDS[command]]
        raise NotFoundError(f"{command} {takes}, not {len(operands)}: see `stagewatch replay --help`")
    return words[:at], command, operands


_COMMANDS: Final[dict[str, Callable[[Teller, list[str]], object]]] = {
    "incidents": lambda teller, words: teller.incidents(),
    "show": lambda teller, words: teller.show(words[0]),
    "request": lambda teller, words: teller.request(words[0]),
    "step": lambda teller, words: teller.step(words[0]),
    "diff": lambda teller, words: teller.diff(words[0], words[1]),
}


def _status(found: Summary, teller: Teller) -> int:
    if any(incident.severity != Severity.NOTICE.word for incident in teller.all_incidents):
        return 1
    if found.rows == found.verdicts[_INDETERMINATE]:
        _say(f"nothing was compared: {why_nothing(found)}")
        return NOTHING_COMPARED
    return 0


def _say(what: str) -> None:
    print(f"stagewatch: {what}", file=sys.stderr)
