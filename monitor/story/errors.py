"""What a story is asked for and is not there."""

from collections.abc import Sequence

from stagewatch.agents.errors import StagewatchError
from stagewatch.agents.terminal import printable

_TOLD_MAX = 5


class NotFoundError(StagewatchError):
    """No such incident, request, step or rank, or more than one."""


def told_in_line(names: Sequence[str]) -> str:
    """A few names in one line; they may come from clients."""
    told = ", ".join(printable(name[:80]) for name in names[:_TOLD_MAX])
    return told if len(names) <= _TOLD_MAX else f"{told} and {len(names) - _TOLD_MAX} more"
