"""The collector's clock: close to the wall clock, but it neither jumps nor goes back.

Silence and stalls are judged by how long ago a rank was heard. A wall clock that is set an hour forward would make
every rank look silent, and one set back an hour would make none look so until the hour has passed.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

SLEW: Final = 10
"""It runs at most one part in so many faster or slower while it makes up for a difference."""


class Clock:
    """Nanoseconds since the epoch. Any thread may ask."""

    def __init__(
        self,
        wall_ns: Callable[[], int] = time.time_ns,
        steady_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._wall_ns = wall_ns
        self._steady_ns = steady_ns
        self._now = wall_ns()
        self._steady = steady_ns()
        self._lock = threading.Lock()

    def now_ns(self) -> int:
        """The time; never less than at the last call."""
        with self._lock:
            steady = self._steady_ns()
            elapsed = max(steady - self._steady, 0)
            difference = self._wall_ns() - (self._now + elapsed)
            most = elapsed // SLEW
            self._now += elapsed + min(max(difference, -most), most)
            self._steady = steady
            return self._now

    def not_before(self, t_ns: int) -> None:
        """From now on no time is before ``t_ns``, which was told when the clock stood elsewhere."""
        with self._lock:
            self._now = max(self._now, t_ns)
