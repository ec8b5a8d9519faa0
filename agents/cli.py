"""The program `stagewatch-agent`: what runs beside the engine."""

from collections.abc import Sequence

from stagewatch.agents import commandline, commands

SUMMARY = "The node side of stagewatch: ships what an engine's ranks recorded, and looks after it."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (or the command line) names; return the exit status."""
    return commandline.main("stagewatch-agent", SUMMARY, commands, "sidecar", argv)
