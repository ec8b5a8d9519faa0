"""An engine killed in the middle leaves a flight recorder behind."""

import json
from pathlib import Path

import runs
from runs import find_python

from stagewatch.agents.record import Kind


def test_rings_replay_to_the_last_published_step(models: Path, tmp_path: Path) -> None:
    """GIVEN an engine in mid-run WHEN every process of it is killed THEN all that was published can be replayed."""
    rings = tmp_path / "rings"
    environment = runs.engine_environment(2, rings=rings)
    process = runs.start(find_python(), "endless", models, 2, 7, environment)
    log: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            log.append(line)
            if line.startswith("SERVED") and int(line.split()[2]) >= 20:
                break
    finally:
        runs.kill_group(process)
    run = runs.Run(process.returncode, "".join(log), rings)
    assert sorted(run.records) == [0, 1], run.log[-4000:]
    last = {
        stage: max(r.step for r in records if r.kind is Kind.INPUTS) for stage, records in run.records.items()
    }
    assert min(last.values()) > 5
    assert run.replay["steps"] == max(last.values())
    assert run.replay["verdicts"]["DIVERGED"] == 0
    assert run.replay["verdicts"]["CONSISTENT"] > 0
    for path in rings.glob("*.ring"):
        assert not runs.RingReader(path).closed
    beats = [r for r in run.records[0] if r.kind is Kind.HEARTBEAT]
    assert json.loads(beats[-1].body.health)["armed"]
