"""Everything legitimate at once: the watch says nothing, and every row is CONSISTENT or not comparable for a reason."""

import random
from collections import Counter

import pytest
from simulated import Run, feed_cut, feed_live, feed_lossy, found, hello, settle, take

from stagewatch.agents.lab.simulator import SimConfig
from stagewatch.monitor.alignment import GAP, NOT_CONSUMED
from stagewatch.monitor.engine import CONSISTENT
from stagewatch.monitor.watch import Watch


def verdicts(watch: Watch) -> Counter[str]:
    counts: Counter[str] = Counter()
    for state in watch.states():
        counts.update({verdict: rows for verdict, rows in state.verdicts.items() if rows})
    return counts


def drawn(seed: int, requests: int = 30) -> SimConfig:
    """A benign run of any shape: PP 2 to 8, TP 1 to 4, DP 1 to 2, K 0 to 7."""
    rng = random.Random(seed)
    return SimConfig.benign(
        seed,
        pp=rng.randint(2, 8),
        tp=rng.choice((1, 1, 2, 3, 4)),
        dp=rng.randint(1, 2),
        spec_tokens=rng.randint(0, 7),
        requests=requests,
    )


def assert_silent(config: SimConfig, seed: int) -> None:
    run, watch = Run(config), Watch()
    feed_cut(run, watch, seed)
    settle(run, watch)
    assert found(watch) == [], config.line
    assert verdicts(watch) == {CONSISTENT: run.sim.request_steps}, config.line


@pytest.mark.parametrize("pp,tp,spec_tokens", [(2, 1, 0), (3, 2, 5), (4, 1, 7)])
def test_a_sound_pipeline_is_silent(pp: int, tp: int, spec_tokens: int) -> None:
    """Aborts, preemption, slot reuse, chunks, cached and remote prefills, streaming input, variable K and width."""
    assert_silent(SimConfig.benign(7, pp=pp, tp=tp, spec_tokens=spec_tokens, requests=30), seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(12))
def test_a_sound_pipeline_of_any_shape_is_silent(seed: int) -> None:
    assert_silent(drawn(seed), seed)


@pytest.mark.parametrize("seed", range(3))
def test_rings_overrun_anywhere_raise_no_alarm(seed: int) -> None:
    """GIVEN stretches of records missing from any rank, THEN their rows are counted as gaps and nothing is said."""
    run, watch = Run(SimConfig.benign(seed, pp=3, tp=2, requests=30)), Watch()
    assert feed_lossy(run, watch, seed, share=0.1)
    settle(run, watch)
    counts = verdicts(watch)
    assert found(watch) == []
    assert counts[GAP] > 0
    assert counts.keys() <= {CONSISTENT, GAP, NOT_CONSUMED}


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_killed_in_the_middle_of_a_step_raises_no_alarm(seed: int) -> None:
    """GIVEN one rank's stream ends between two records, WHEN the evidence ends, THEN nothing is said of the rest."""
    rng = random.Random(seed)
    run, watch = Run(SimConfig.benign(seed, pp=3, tp=2, requests=20)), Watch()
    hello(run, watch)
    victim = rng.choice(run.sim.ranks)
    for rank, own in run.records.items():
        take(run, watch, rank, 0, rng.randrange(len(own) // 2, len(own)) if rank == victim else len(own))
    watch.finish()
    assert found(watch) == []
    assert verdicts(watch)[NOT_CONSUMED] > 0


def test_records_handed_over_twice_count_once() -> None:
    """GIVEN batches that overlap what was taken already, THEN verdicts are as if each record came once."""
    run, watch = Run(SimConfig.benign(3, pp=3, requests=20)), Watch()
    hello(run, watch)
    for rank, own in run.records.items():
        for first in range(0, len(own), 40):
            take(run, watch, rank, max(first - 15, 0), min(first + 40, len(own)))
            take(run, watch, rank, first, min(first + 40, len(own)))
    watch.finish()
    assert found(watch) == []
    assert verdicts(watch) == {CONSISTENT: run.sim.request_steps}
    assert sum(state.late_rows for state in watch.states()) > 0
    assert sum(state.late_records for state in watch.states()) > 0


def test_an_engine_restarted_on_the_same_host_is_another_engine() -> None:
    """GIVEN two lives of one engine, their ranks' records interleaved, THEN neither is compared with the other."""
    first, second = (Run(SimConfig.benign(seed, pp=3, requests=15)) for seed in (4, 5))
    watch = Watch()
    for run in (first, second):
        hello(run, watch)
    for rank in first.sim.ranks:
        for run in (second, first):
            take(run, watch, rank, 0, len(run.records[rank]))
    watch.finish()
    assert found(watch) == []
    assert [state.verdicts[CONSISTENT] for state in watch.states()] == [
        run.sim.request_steps for run in (first, second)
    ]


def test_live_and_in_one_piece_say_the_same() -> None:
    """The extremes of cutting: one iteration at a time, and each rank's whole stream at once."""
    run = Run(SimConfig.benign(6, pp=4, requests=15))
    live, whole = Watch(), Watch()
    feed_live(run, live)
    hello(run, whole)
    for rank, own in run.records.items():
        take(run, whole, rank, 0, len(own))
    for watch in (live, whole):
        watch.finish()
    assert verdicts(live) == verdicts(whole) == {CONSISTENT: run.sim.request_steps}
