"""How far a long replay has come: one line on a terminal, nothing anywhere else."""

import sys
import time
from typing import Final, Self, TextIO

_WIDTH: Final = 24
_EVERY_S: Final = 0.1
_QUIET_S: Final = 0.7
"""What takes less is not worth a bar."""


class ProgressBar:
    """Draws on ``stream`` if it is a terminal. Used as a context manager, so that the line is gone at the end."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._wanted = self._stream.isatty()
        self._began = self._drawn = time.monotonic()
        self._shown = False

    def at(self, done_bytes: int, total_bytes: int) -> None:
        """So much of so much was read."""
        if not self._wanted or not total_bytes:
            return
        now = time.monotonic()
        if now - self._drawn < _EVERY_S or now - self._began < _QUIET_S:
            return
        self._drawn, self._shown = now, True
        share = min(done_bytes / total_bytes, 1.0)
        bar = "#" * round(share * _WIDTH)
        text = f"\r[{bar:<{_WIDTH}}] {share:4.0%}  {done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB"
        self._stream.write(text)
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
