"""Every fault of the registry against the whole watch: what is found EQUALS what was injected, and nothing else."""

import pytest
from simulated import (
    REGISTRY,
    Expected,
    Run,
    expected,
    feed_cut,
    feed_live,
    feed_lossy,
    found,
    plan,
    reports,
    settle,
)

from stagewatch.monitor.watch import Watch

SILENT = {name for name, fault in REGISTRY.items() if not fault.INVARIANTS}
"""Controls: ranks go on agreeing, so there is nothing to find."""


def from_step(name: str) -> int:
    return 3 if name in ("all-chunk-broadcast", "width-mismatch") else 20


def assert_found(run: Run, cut_seed: int, *, harmed: bool = True) -> int:
    """Return how many incidents there were. ``harmed``: some request must have run again after it was struck."""
    name = run.sim.fault.NAME
    assert run.injections, f"the fault found no opportunity: {run.config.line}"
    watch = Watch()
    told = feed_live(run, watch)
    settle(run, watch)
    must = expected(run)
    assert not harmed or bool(must) == (name not in SILENT), run.config.line
    assert found(watch) == must, run.config.line
    late = [incident for incident in told if incident.latency_steps > run.config.pp + 2]
    assert late == [], run.config.line
    assert any(state.wedged for state in watch.states()) == bool(run.wedged), run.config.line
    replayed = Watch()
    feed_cut(run, replayed, cut_seed)
    settle(run, replayed)
    assert reports(replayed) == reports(watch), f"cut {cut_seed}: {run.config.line}"
    return len(must)


@pytest.mark.parametrize("name", REGISTRY)
def test_a_single_strike_is_found_named_and_dated(name: str) -> None:
    """The incidents are those of the requests struck, within pp_size + 2 steps, live and in any other batches."""
    assert_found(Run(plan(name, from_step=from_step(name), times=1, requests=40)), cut_seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize("times", [1, None], ids=["once", "persistent"])
def test_every_strike_is_found_whatever_the_pipeline(name: str, times: int | None) -> None:
    """The same over PP 3 to 5, TP 1 and 2, and several seeds."""
    fault, incidents = REGISTRY[name], 0
    for seed, pp, tp in ((2, 3, 1), (3, 4, 2), (4, 5, 1), (5, 4, 1)):
        config = plan(
            name,
            seed=seed,
            pp=pp,
            tp=max(tp, fault.LEAST.tp),
            from_step=from_step(name),
            times=times,
            requests=50,
        )
        run = Run(config)
        if run.injections:
            incidents += assert_found(run, cut_seed=seed, harmed=False)
    # A single strike may hit a request that never runs again, and so harm nobody.
    assert times == 1 or bool(incidents) == (name not in SILENT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seed", "pp", "spec_tokens"),
    [("stale-slot-write", 1821, 8, 5), ("tp-samples-apart", 1821, 8, 1), ("tp-samples-apart", 2427, 4, 7)],
)
def test_lives_that_follow_each_other_closely_and_last_tokens(
    name: str, seed: int, pp: int, spec_tokens: int
) -> None:
    """Requests that are preempted again and again, the last of which ends with a step that broadcasts nothing."""
    config = plan(name, seed=seed, pp=pp, tp=2, spec_tokens=spec_tokens, from_step=20, requests=40)
    assert_found(Run(config), cut_seed=seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", REGISTRY)
def test_loss_never_blames_a_rank_that_did_nothing(name: str) -> None:
    """With rings overrun at random, less may be seen, or later, but nobody is blamed whom no injection names."""
    run = Run(plan(name, from_step=from_step(name), requests=40))
    guilty: dict[str, set[int]] = {}
    for each in expected(run):
        guilty.setdefault(each.request, set()).update(each.blamed)
    lost = 0
    for seed in range(6):
        watch = Watch()
        lost += feed_lossy(run, watch, seed, share=0.2)
        settle(run, watch)
        innocent: list[Expected] = [
            Expected.of(incident)
            for incident in watch.incidents()
            if not {*incident.blamed} <= guilty.get(incident.request, set())
        ]
        assert innocent == [], f"loss {seed}: {run.config.line}"
    assert lost
