"""The program `stagewatch`: the collector side."""

from collections.abc import Sequence

from stagewatch.agents import commandline
from stagewatch.monitor import commands

SUMMARY = "Says, within a few steps, when the ranks of an engine no longer agree about a request."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (or the command line) names; return the exit status."""
    return commandline.main("stagewatch", SUMMARY, commands, "monitor", argv)
