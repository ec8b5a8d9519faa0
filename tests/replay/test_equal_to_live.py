"""What replay says is what was said live, byte for byte, whatever the evidence was kept in."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from recorded import Recorded, record
from simulated import REGISTRY, Run, plan

from stagewatch.agents.cli import main as agent
from stagewatch.monitor.cli import main
from stagewatch.monitor.story.verdicts import Summary

Replay = Callable[..., str]

SIMULATED = [name for name, fault in REGISTRY.items() if not fault.__module__.endswith("faults_process")]
"""Faults that one process can stage; those of processes need processes."""
QUICK = ("old-mask", "stale-slot-write", "op-dropped", "dummy-skipped")
"""An exclusion, a write judged only at the end, and two engines that stand still: one of each kind of difficulty."""
RARE = ("hit-tokens-disagree", "stale-output-after-preemption")
"""Faults that need more requests to find their opportunity."""


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Replay:
    """Standard output of `stagewatch replay --json`."""

    def run(*paths: Path) -> str:
        main(["replay", *map(str, paths), "--json"])
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return run


def incidents(out: str) -> bytes:
    return msgspec.json.encode(msgspec.json.decode(out, type=Summary).incidents)


def recorded(name: str, directory: Path) -> Recorded:
    run = Run(plan(name, from_step=3, requests=60 if name in RARE else 14))
    assert run.injections, "the fault found no opportunity"
    return record(run, directory)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SIMULATED]
)
def test_every_fault_of_the_lab(
    name: str, replay: Replay, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GIVEN a run with a fault WHEN its journal, rings and dump are replayed THEN all say what was said live."""
    kept = recorded(name, tmp_path)
    live = msgspec.json.encode(kept.live)
    replayed = replay(kept.journal)
    assert incidents(replayed) == live
    assert replay(kept.rings) == replayed
    agent(["dump", str(kept.rings), "-o", str(tmp_path / "a.swdump"), "--json"])
    capsys.readouterr()
    assert replay(tmp_path / "a.swdump") == replayed
