"""Killed, stopped and slow processes: exactly what is true of them is told, and nobody is accused of it."""

import pytest
from processes import deliver, process_plan, unexplained, wrong

from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.faults_process import PROCESS_REGISTRY


@pytest.mark.parametrize("name", PROCESS_REGISTRY)
def test_what_comes_of_it_is_what_the_fault_says_and_nothing_else(name: str) -> None:
    run = deliver(process_plan(name))
    assert wrong(run) + unexplained(run) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("name", PROCESS_REGISTRY)
def test_on_other_ranks_and_in_other_shapes_too(name: str, seed: int) -> None:
    shape = {"pp": 2 + seed % 3, "tp": 1 + seed % 2, "k": (1, 4, 7)[seed % 3]}
    rank = Rank(0, seed % shape["pp"], seed % shape["tp"])
    run = deliver(process_plan(name, seed, rank=rank, **shape))
    assert wrong(run) + unexplained(run) == []
