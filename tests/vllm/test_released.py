"""The released engine: served right, watched whole, and silent."""

import json

import numpy as np
import pytest
import runs
from runs import RunEngine

from stagewatch.agents.record import Kind

# vLLM forks its workers unless told to spawn them; both must arm.
PIPELINES = [(2, 7, {}), (3, 4, {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "STAGEWATCH_FIXED_MASK": "1"})]


@pytest.fixture(scope="module", params=PIPELINES, ids=["PP=2 K=7 forked", "PP=3 K=4 spawned"])
def watched(request: pytest.FixtureRequest, run_engine: RunEngine) -> tuple[runs.Run, int]:
    """A watched pipeline of three greedy requests, and its number of stages."""
    pp, drafts, more = request.param
    return run_engine("basic", pp, drafts, **more), pp


class TestReleasedEngine:
    def test_outputs_equal_those_of_one_stage(
        self, watched: tuple[runs.Run, int], run_engine: RunEngine
    ) -> None:
        run, _ = watched
        assert run.outputs == run_engine("basic", 1, 7).outputs

    def test_every_row_is_consistent_and_there_is_no_incident(self, watched: tuple[runs.Run, int]) -> None:
        run, _ = watched
        found = run.replay
        assert found["incidents"] == []
        assert found["verdicts"] == {"CONSISTENT": found["rows"], "DIVERGED": 0, "INDETERMINATE": 0}
        assert found["rows"] > found["steps"] > 0

    def test_every_rank_armed_and_closed_its_ring(self, watched: tuple[runs.Run, int]) -> None:
        run, pp = watched
        assert sorted(run.records) == list(range(pp))
        for stage, records in run.records.items():
            assert run.notes(stage)[0].startswith("armed: vllm 0.32.0, variant C")
            health = json.loads([r for r in records if r.kind is Kind.HEARTBEAT][-1].body.health)
            assert (health["armed"], health["drops"]) == (True, 0)
            assert health["steps"] == run.replay["steps"]
        assert all(runs.RingReader(path).closed for path in run.rings.glob("*.ring"))

    def test_the_hotfix_is_refused_where_it_is_asked_for(self, watched: tuple[runs.Run, int]) -> None:
        run, pp = watched
        refused = [
            any("fixed mask refused: the engine's own mask is sound" in note for note in run.notes(stage))
            for stage in range(pp)
        ]
        assert refused == [pp == 3] * pp

    def test_profiling_and_warm_up_leave_no_record(self, watched: tuple[runs.Run, int]) -> None:
        run, _ = watched
        for records in run.records.values():
            bound = {record.body.request for record in records if record.kind is Kind.BIND}
            fed = [record for record in records if record.kind is Kind.INPUTS]
            assert [record.step for record in fed] == list(range(1, len(fed) + 1))
            assert {int(key) for record in fed for key in record.body.request} == bound
            assert len(bound) == 3

    def test_a_payload_is_consumed_pp_size_steps_later_or_not_at_all(
        self, watched: tuple[runs.Run, int]
    ) -> None:
        run, pp = watched
        for stage in range(pp - 1):
            consumed = [record for record in run.records[stage] if record.kind is Kind.CONSUMED]
            assert consumed
            # An idle engine executes nothing, so a step counts fewer ordinals than iterations.
            assert all(0 < record.body.at - record.step <= pp for record in consumed)

    def test_every_broadcast_is_recorded_on_every_stage(self, watched: tuple[runs.Run, int]) -> None:
        run, _ = watched
        lists = [
            [
                (record.step, record.body.what, record.body.numel)
                for record in records
                if record.kind is Kind.COLLECTIVE and record.body.what.startswith("pp_broadcast")
            ]
            for records in run.records.values()
        ]
        assert all(each == lists[0] for each in lists)
        assert len(lists[0]) == 3 * run.replay["steps"]  # tokens, counts, drafts


class TestUnwatchedEngine:
    def test_outputs_do_not_depend_on_the_probe(self, run_engine: RunEngine) -> None:
        without = run_engine("basic", 2, 7, probe=False)
        assert "stagewatch" not in without.log
        assert without.outputs == run_engine("basic", 2, 7).outputs

    def test_one_stage_arms_nothing_and_says_so_once(self, run_engine: RunEngine) -> None:
        run = run_engine("basic", 1, 7)
        assert list(run.rings.glob("*.ring")) == []
        assert run.log.count("stagewatch: not armed: pipeline_parallel_size is 1") == 1


@pytest.fixture(scope="module")
def mixed(run_engine: RunEngine) -> runs.Run:
    """Everything that happens to requests on a good day, on three stages."""
    return run_engine("mixed", 3, 4)


class TestEverydayEvents:
    """An abort, a preemption, chunked prefill, mixed batches and a request of one token."""

    def test_they_happened(self, mixed: runs.Run) -> None:
        records = mixed.records[0]
        bound = [runs.name_of(r.body.request_id) for r in records if r.kind is Kind.BIND]
        assert any(bound.count(name) > 1 for name in bound), "no request was preempted and resumed"
        assert len(mixed.outputs["aborted"]) < 60
        fed = [record.body for record in records if record.kind is Kind.INPUTS]
        chunks = [b.prefilling.astype(bool) & (b.mirror + b.scheduled < b.prefill_len) for b in fed]
        assert any(chunk.any() for chunk in chunks), "no prefill was chunked"
        assert any(b.prefilling.any() and not b.prefilling.all() for b in fed), "no batch was mixed"
        stale = [
            r.body
            for r in records
            if r.kind is Kind.CONSUMED and not np.array_equal(r.body.generation, r.body.generation_now)
        ]
        assert stale, "no slot changed hands while a payload was in flight"
        assert all(not b.applied[b.generation != b.generation_now].any() for b in stale)

    def test_they_are_silent(self, mixed: runs.Run) -> None:
        assert mixed.replay["incidents"] == []
        assert mixed.replay["verdicts"]["DIVERGED"] == 0

    def test_outputs_are_right(self, mixed: runs.Run, run_engine: RunEngine) -> None:
        alone = run_engine("basic", 1, 7).outputs
        assert mixed.outputs["short"] == alone["r0"][:30]
        assert mixed.outputs["later"] == alone["r2"][:20]
        assert [len(mixed.outputs[name]) for name in ("long", "latest", "one")] == [24, 16, 1]
