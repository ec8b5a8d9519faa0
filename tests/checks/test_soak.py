"""Two minutes of everything legitimate on a fresh seed, and a moment of it on a known one."""

import time

import pytest
from soak import commit, drawn, leg, soak


def test_a_busy_engine_is_silent() -> None:
    each = leg(drawn(11), 2_000, 11)
    assert each.silent, (each.told(), each.incidents[:3], each.verdicts)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_fresh_seed_is_silent() -> None:
    seed = time.time_ns() // 10**9
    for number, each in enumerate(soak(10_000_000, seed, seconds=110)):
        assert each.silent, (
            f"tests/checks/soak.py --seed {seed + number} --request-steps {each.request_steps}, commit {commit()}",
            each.incidents[:3],
            each.verdicts,
        )
