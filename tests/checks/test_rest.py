"""An engine that ended lets go of its evidence, and one that comes back is not accused for it."""

import weakref

import numpy as np
import pytest
from simulated import DIGESTER, Run

from stagewatch.agents.evidence import Evidence, digest_records
from stagewatch.agents.lab.simulator import SimConfig
from stagewatch.monitor import engine as engine_module
from stagewatch.monitor.watch import REST_AFTER_NS, Watch

SECOND = 10**9


def fed(run: Run, watch: Watch, first: float, end: float, now_ns: int) -> list["weakref.ref[np.ndarray]"]:  # type: ignore[type-arg]  # any array
    """Feed each rank a share of its records at ``now_ns``; return references to the arrays fed."""
    arrays: list[weakref.ref[np.ndarray]] = []  # type: ignore[type-arg]  # any array
    for rank, records in run.records.items():
        identity = run.identities[rank]
        watch.hello(identity, now_ns)
        part = records[int(len(records) * first) : int(len(records) * end)]
        evidence: Evidence = digest_records(part, identity, DIGESTER)
        assert evidence.inputs is not None
        arrays.append(weakref.ref(evidence.inputs.request))
        watch.take(identity.instance, rank, evidence, -1.0, now_ns)
    return arrays


def test_the_evidence_of_an_engine_that_ended_is_let_go() -> None:
    # GIVEN an engine whose evidence is held
    watch, run = Watch(), Run(SimConfig.benign(3, pp=2, requests=20))
    arrays = fed(run, watch, 0.0, 1.0, SECOND)
    assert any(array() is not None for array in arrays)
    before = watch.states()[0]
    # WHEN nobody is heard of for long
    watch.tick(SECOND + REST_AFTER_NS)
    assert any(array() is not None for array in arrays)
    watch.tick(2 * SECOND + REST_AFTER_NS)
    # THEN nothing of it is left but what was found
    assert all(array() is None for array in arrays)
    (state,) = watch.states()
    assert state.compared_to >= before.compared_to
    assert sum(state.verdicts.values()) >= sum(before.verdicts.values())


def test_an_engine_that_comes_back_is_compared_with_what_comes_then() -> None:
    watch, run = Watch(), Run(SimConfig.benign(4, pp=2, requests=40))
    fed(run, watch, 0.0, 0.5, SECOND)
    watch.tick(2 * SECOND + REST_AFTER_NS)
    consistent = watch.states()[0].verdicts["CONSISTENT"]
    fed(run, watch, 0.5, 1.0, 4 * SECOND + REST_AFTER_NS)
    watch.tick(5 * SECOND + 2 * REST_AFTER_NS)
    assert watch.incidents() == []
    assert watch.states()[0].verdicts["CONSISTENT"] > consistent


def test_ids_of_requests_that_ended_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a run in which far more requests end than run at once
    monkeypatch.setattr(engine_module, "ENDED_IDS_MAX", 10)
    watch, run = Watch(), Run(SimConfig.benign(5, pp=2, requests=200))
    fed(run, watch, 0.0, 1.0, SECOND)
    # THEN only the ids of the newest are remembered
    (state,) = watch.states()
    engine = watch.engine((state.instance, state.dp))
    assert engine is not None
    ended = [key for key, name in run.names.items() if engine.name_of(key) == name]
    assert 0 < len(ended) <= 10 + run.config.seats
