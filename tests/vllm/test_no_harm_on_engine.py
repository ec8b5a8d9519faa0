"""The real engine with a probe that fails, or costs too much: it serves the same, and the operator is told."""

import pytest
from runs import RunEngine

STAGES = (0, 1)


@pytest.mark.parametrize(
    ("fault", "stage", "reason"),
    [
        ("budget-of-nothing", 0, "budget exceeded: p99"),
        ("hook-raises", 1, "fails failed: MemoryError"),
    ],
)
class TestADisarmedRank:
    def test_changes_nothing_the_engine_serves(
        self, run_engine: RunEngine, fault: str, stage: int, reason: str
    ) -> None:
        run = run_engine("basic", 2, 7, fault=fault)
        assert run.status == 0
        assert run.outputs == run_engine("basic", 1, 7).outputs

    def test_says_why_and_the_other_goes_on(
        self, run_engine: RunEngine, fault: str, stage: int, reason: str
    ) -> None:
        run = run_engine("basic", 2, 7, fault=fault)
        disarmed = {each: [n for n in run.notes(each) if n.startswith("disarmed: ")] for each in STAGES}
        assert [len(disarmed[each]) for each in STAGES] == [int(each == stage) for each in STAGES]
        assert disarmed[stage][0].startswith(f"disarmed: {reason}")
        assert run.log.count("The engine is not affected.") == 1
        steps = {each: max(record.step for record in run.records[each]) for each in STAGES}
        assert 0 < steps[stage] < steps[1 - stage]

    def test_raises_no_alarm_besides(
        self, run_engine: RunEngine, fault: str, stage: int, reason: str
    ) -> None:
        run = run_engine("basic", 2, 7, fault=fault)
        assert run.incidents() <= {("rank-unarmed", "warning", "")}
        verdicts = run.replay["verdicts"]
        assert (verdicts["DIVERGED"], verdicts["CONSISTENT"] > 0) == (0, True)
