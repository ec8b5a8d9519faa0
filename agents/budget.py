"""What the probe may cost the engine, and the guard on it."""

import statistics
import time
from typing import Final


class Budget:
    """Time the probe takes of each step, and the guard on it.

    Looks at windows of `WINDOW` steps: the window's 99th percentile of probe time against its median step
    time, both from the host's monotonic clock. A step's time is that between the first hooks of two steps;
    the median leaves out idle waiting between bursts of requests.
    """

    WINDOW: Final = 512

    def __init__(self, share: float) -> None:
        self.exceeded: str | None = None
        """Why the budget is spent, once it is."""
        self._share = share
        self._step = 0
        self._began_ns = 0
        self._spent_ns = 0
        self._filled = 0
        self._seen = 0
        # Lists: a number is stored in them several times faster than in an array.
        self._costs = [0] * self.WINDOW
        self._times = [0] * self.WINDOW
        self._total_ns = 0
        self._total_steps = 0

    def add(self, step: int, ns: int) -> None:
        """Account ``ns`` to ``step``; a new step closes the one before."""
        self._total_ns += ns
        if step != self._step:
            now = time.monotonic_ns()
            if self._step:
                self._costs[self._filled] = self._spent_ns
                self._times[self._filled] = now - self._began_ns
                self._filled += 1
                if self._filled > self._seen:
                    self._seen = self._filled
                if self._filled == self.WINDOW:
                    self._judge()
                    self._filled = 0
            self._total_steps += 1
            self._step, self._began_ns, self._spent_ns = step, now, 0
        self._spent_ns += ns

    def since_last(self) -> tuple[int, int, int]:
        """(nanoseconds, steps, recent p99 nanoseconds of one step) since the last call."""
        result = (self._total_ns, self._total_steps, self._p99())
        self._total_ns = self._total_steps = 0
        return result

    def _p99(self) -> int:
        if not self._seen:
            return 0
        rank = (99 * self._seen - 1) // 100
        return sorted(self._costs[: self._seen])[rank]

    def _judge(self) -> None:
        if not self._share:
            return
        cost, usual = self._p99(), statistics.median(self._times)
        if cost > self._share * usual:
            self.exceeded = (
                f"budget exceeded: p99 {cost / 1e3:.0f} us of a {usual / 1e6:.2f} ms step, "
                f"allowed {self._share:.2%}"
            )
