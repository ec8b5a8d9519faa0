"""When the watch is told that time has passed: the same live, as the journal is read back, and in a replay."""

from typing import Final

START_GRACE_S: Final = 15.0
"""After a start, sidecars have so long to come back before silence counts against their ranks."""
PAUSE_S: Final = 5.0
"""Having done nothing for so long, the collector was stopped, as at a start: it is the one who did not listen."""


class Ticks:
    """When the watch is to be told that time has passed: each second, but not while ranks had no chance to be heard.

    That is for `START_GRACE_S` after a start, and after a pause of more than `PAUSE_S`, live as in the journal.
    """

    def __init__(self) -> None:
        self._second = 0
        self._quiet_until_ns = 0
        self._asked_ns = 0

    def is_due(self, now_ns: int) -> bool:
        """Whether to tick at ``now_ns``."""
        if now_ns - self._asked_ns > PAUSE_S * 1e9:
            self._quiet_until_ns = now_ns + int(START_GRACE_S * 1e9)
        self._asked_ns = max(now_ns, self._asked_ns)
        second = now_ns // 10**9
        if second <= self._second or now_ns < self._quiet_until_ns:
            return False
        self._second = second
        return True
