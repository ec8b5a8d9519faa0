"""What the watch does by the column it could do row by row, and would say the same: every incident, every count."""

import msgspec
import numpy as np
import pytest
from plain import PlainOwners, plainly
from simulated import REGISTRY, Run, feed_cut, feed_lossy, plan, reports, settle
from soak import drawn

from stagewatch.agents.lab.simulator import SimConfig
from stagewatch.monitor.binds import Binds
from stagewatch.monitor.checks.slot_generation import _Owners
from stagewatch.monitor.watch import Watch


def says(run: Run, seed: int, *, lossy: bool) -> tuple[bytes, str, list[bytes]]:
    """Incidents, states with their verdict counts, and pictures of a run, its records cut up by ``seed``."""
    watch = Watch()
    if lossy:
        feed_lossy(run, watch, seed, share=0.05)
    else:
        feed_cut(run, watch, seed)
    settle(run, watch)
    engines = [
        engine for state in watch.states() if (engine := watch.engine((state.instance, state.dp))) is not None
    ]
    seen = [
        np.concatenate([part.request, part.state.astype(np.uint64), part.ranks]).tobytes()
        for engine in engines
        for part in engine.picture.view(0, 10**9).segments
    ]
    return reports(watch), repr(watch.states()), seen


def assert_same(run: Run, seed: int, patch: pytest.MonkeyPatch) -> None:
    fast = [says(run, seed, lossy=lossy) for lossy in (False, True)]
    with patch.context() as plain:
        plainly(plain)
        assert [says(run, seed, lossy=lossy) for lossy in (False, True)] == fast, run.config.line


QUICK = ("old-mask", "stale-slot-write", "cadence-unguarded", "op-dropped")


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_looks_the_same_by_row_and_by_column(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(plan(name, from_step=20, times=None, requests=12))
    assert msgspec.json.decode(says(run, 3, lossy=False)[0]) != []
    assert_same(run, 3, monkeypatch)


def test_a_benign_run_looks_the_same_by_row_and_by_column(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(Run(SimConfig.benign(5, pp=3, tp=2, spec_tokens=4, requests=15)), 5, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", REGISTRY)
def test_every_fault_looks_the_same_by_row_and_by_column(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early = name in ("all-chunk-broadcast", "width-mismatch")
    assert_same(Run(plan(name, from_step=3 if early else 20, times=None, requests=25)), 7, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(6))
def test_benign_runs_of_any_shape_look_the_same_by_row_and_by_column(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = drawn(seed)
    config = SimConfig.benign(
        seed, pp=config.pp, tp=config.tp, dp=config.dp, spec_tokens=config.spec_tokens, requests=40
    )
    assert_same(Run(config), seed, monkeypatch)


@pytest.mark.parametrize("seed", range(20))
def test_slots_change_owners_alike_bind_by_bind_and_all_at_once(seed: int) -> None:
    """GIVEN binds of few slots, generations and requests, WHEN taken in any cut, THEN the same are found."""
    rng = np.random.default_rng(seed)
    clever, plain = _Owners(), PlainOwners()
    for _ in range(10):
        count = int(rng.integers(1, 30))
        columns = [rng.integers(low, 4, count) for low in (0, 1)]
        request = rng.integers(1, 4, count).astype(np.uint64)
        binds = Binds(np.arange(count), columns[0], columns[1], request, np.arange(count))
        assert clever.bind(binds) == plain.bind(binds)
        assert [clever.at(slot) for slot in range(5)] == [plain.at(slot) for slot in range(5)]
