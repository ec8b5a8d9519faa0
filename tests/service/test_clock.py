"""The collector's clock, and when it tells the watch that time has passed."""

from stagewatch.monitor.clock import Clock
from stagewatch.monitor.ticks import PAUSE_S, START_GRACE_S, Ticks

S = 10**9
HOUR = 3600 * S


class Clocks:
    """A wall clock and a steady one, set by hand."""

    def __init__(self) -> None:
        self.wall, self.steady = 1000 * HOUR, 0
        self.clock = Clock(lambda: self.wall, lambda: self.steady)

    def passes(self, ns: int) -> int:
        """Time passes on both; how much of it the clock saw."""
        before = self.clock.now_ns()
        self.wall, self.steady = self.wall + ns, self.steady + ns
        return self.clock.now_ns() - before


def test_it_is_the_wall_clock_while_that_runs_true() -> None:
    clocks = Clocks()
    for _ in range(100):
        assert clocks.passes(S) == S
    assert clocks.clock.now_ns() == clocks.wall


def test_a_wall_clock_set_back_or_forward_is_followed_slowly() -> None:
    for jump in (-HOUR, HOUR):
        clocks = Clocks()
        clocks.wall += jump
        assert clocks.passes(0) == 0
        assert clocks.passes(30 * S) == 30 * S + (3 * S if jump > 0 else -3 * S)
        for _ in range(400):
            clocks.passes(100 * S)
        assert clocks.clock.now_ns() == clocks.wall


def test_it_begins_no_earlier_than_what_was_told_before() -> None:
    clocks = Clocks()
    clocks.clock.not_before(clocks.wall + HOUR)
    assert clocks.clock.now_ns() == clocks.wall + HOUR
    assert 0 < clocks.passes(S) < S


def due(*at_s: float) -> list[float]:
    ticks = Ticks()
    return [second for second in at_s if ticks.is_due(int(second * S))]


def test_one_tick_a_second_after_the_grace_of_a_start() -> None:
    seconds = [100 + tenth / 10 for tenth in range(200)]
    assert due(*seconds) == [100 + START_GRACE_S + second for second in range(5)]


def test_a_pause_is_a_start() -> None:
    """A collector that was stopped for a minute did not hear anybody: none of them was silent."""
    begin = [100 + second for second in range(20)]
    resumed = [180 + second for second in range(20)]
    assert PAUSE_S < 60
    assert due(*begin, *resumed) == [115, 116, 117, 118, 119, 195, 196, 197, 198, 199]
