"""Tensor parallel stages: four workers, each with a ring of its own, which all agree."""

import runs
from runs import RunEngine

FOUR_WORKERS = {"STAGEWATCH_LAB_TP": "2", "VLLM_CPU_OMP_THREADS_BIND": "0|1|0|1"}


class TestTensorAndPipelineParallel:
    def test_every_rank_arms_under_its_coordinates(self, run_engine: RunEngine) -> None:
        run = run_engine("few", 2, 7, **FOUR_WORKERS)
        found = [runs.RingReader(path).identity for path in run.rings.glob("*.ring")]
        assert sorted(str(identity.rank) for identity in found) == [
            f"dp0.pp{pp}.tp{tp}" for pp in (0, 1) for tp in (0, 1)
        ]
        assert {(i.sizes.dp, i.sizes.pp, i.sizes.tp) for i in found} == {(1, 2, 2)}

    def test_all_four_agree_in_every_row(self, run_engine: RunEngine) -> None:
        found = run_engine("few", 2, 7, **FOUR_WORKERS).replay
        assert found["incidents"] == []
        assert found["verdicts"] == {"CONSISTENT": found["rows"], "DIVERGED": 0, "INDETERMINATE": 0}
        assert found["rows"] > found["steps"] > 0

    def test_outputs_equal_those_of_one_worker(self, run_engine: RunEngine) -> None:
        alone = run_engine("basic", 1, 7).outputs
        assert run_engine("few", 2, 7, **FOUR_WORKERS).outputs == {
            name: tokens[:12] for name, tokens in alone.items()
        }
