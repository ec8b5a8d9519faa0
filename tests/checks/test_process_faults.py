"""Killed, stopped and slow processes: exactly what is true of them is told, and nobody is accused of it."""

import pytest
from processes import deliver, process_plan, wrong

from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.config import LabConfig
from stagewatch.agents.lab.fault import Plan
from stagewatch.agents.lab.faults_process import PROCESS_REGISTRY
from stagewatch.agents.lab.scheduler import LabError


@pytest.mark.parametrize("name", PROCESS_REGISTRY)
def test_what_comes_of_it_is_what_the_fault_says_and_nothing_else(name: str) -> None:
    assert wrong(deliver(process_plan(name))) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("name", PROCESS_REGISTRY)
def test_on_other_ranks_and_in_other_shapes_too(name: str, seed: int) -> None:
    shape = {"pp": 2 + seed % 3, "tp": 1 + seed % 2, "k": (1, 4, 7)[seed % 3]}
    rank = Rank(0, seed % shape["pp"], seed % shape["tp"])
    assert wrong(deliver(process_plan(name, seed, rank=rank, **shape))) == []


def test_the_lab_of_real_processes_says_that_it_does_not_play_them() -> None:
    with pytest.raises(LabError, match="rank-killed can only be put into the simulator"):
        LabConfig(seed=1, fault=Plan("rank-killed")).check()
