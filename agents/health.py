"""Whether a sidecar is alive: it touches a file at every look for rings, and whoever asks compares the file's age.

It says that the event loop turns, which also reads and ships, and nothing more. A collector that is away does not
make a sidecar ill: the rings bridge that, and a restart would not help.
"""

import logging
import time
from pathlib import Path
from typing import Final

from stagewatch.agents.errors import SettingsError

log = logging.getLogger("stagewatch.sidecar")

AGE_S_MAX: Final = 15.0
"""Thirty looks for rings: a host so busy is slow, beyond that something hangs."""


class Pulse:
    """The side that is alive. Does nothing without a file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._failed = False

    def beat(self) -> None:
        """Touch the file. A file that cannot be touched costs the health, not the shipping; it is told once."""
        if self._path is None:
            return
        try:
            self._path.touch(mode=0o600)
        except OSError as error:
            if not self._failed:
                log.warning(
                    "health file %s cannot be touched: %s: give another --health-file",
                    self._path,
                    error.strerror,
                )
            self._failed = True
            return
        self._failed = False


def age_s(path: Path) -> float:
    """Seconds since the last beat, below zero where the clock was set back. Raises SettingsError."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError as error:
        raise SettingsError(
            f"health file {path} cannot be read: {error.strerror}: has a sidecar with this --health-file started?"
        ) from None
