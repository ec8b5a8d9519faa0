"""Ending by a signal and leaving nothing behind: it unwinds like an exception, but not half-way through a start."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Final

ENDING: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class Unwinding:
    """Turns the signals that end a process into SystemExit, raised where they come or at the end of `held`.

    What is started and not yet written down where it is ended from would outlive us if the exception came between the
    two. `held` closes that gap. For the main thread, once in a process.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._pending = 0
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores SIGHUP, and means it
                signal.signal(number, self._end)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Until the block is left, a signal to end waits. Raises SystemExit(128 + signal) then."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._pending and not self._depth:
                raise SystemExit(128 + self._pending)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            return  # the unwinding that the first one began is what the second one wants, too
        self._pending = number
        if not self._depth:
            raise SystemExit(128 + number)
