"""The lab as processes: real collectives, real rings, real deaths."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from lab_records import disagreements

from stagewatch.agents.errors import StagewatchError
from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.engine import LabConfig, LabError, run_lab, start_lab
from stagewatch.agents.lab.fault import Plan
from stagewatch.agents.lab.messages import Output
from stagewatch.agents.lab.workload import Workload
from stagewatch.agents.record import Collective, Inputs, Kind, Record
from stagewatch.agents.ring import RingReader
from stagewatch.agents.settings import ProbeSettings

pytest.importorskip("torch", reason="the lab needs torch: pip install 'stagewatch[lab]'")

WORKLOAD = Workload(requests=8, prompt_len=(10, 10), max_tokens=(8, 40))
LAB = LabConfig(seed=1, workload=WORKLOAD)


def probe_settings(directory: Path) -> ProbeSettings:
    return ProbeSettings(directory, "test", 1 << 22, 1.0, 0.0, 2, False)


def read_rings(directory: Path) -> dict[Rank, list[Record]]:
    found = {}
    for path in directory.glob("*.ring"):
        reader = RingReader(path)
        assert reader.closed
        found[reader.identity.rank] = list(reader.read(1 << 20))
        assert reader.lost == 0
        reader.close()
    return found


def test_a_sound_pipeline_agrees_and_answers_like_one_process(tmp_path: Path) -> None:
    """GIVEN 3 stages of 2 tensor-parallel ranks THEN no rank differs at any step and answers are those of one rank."""
    alone = run_lab(replace(LAB, pp=1, spec_tokens=0))
    result = run_lab(
        replace(LAB, pp=3, tp=2, spec_tokens=4, instance="sound", probe=probe_settings(tmp_path))
    )
    records = read_rings(tmp_path)
    assert (alone.error, result.error) == ("", "")
    assert result.outputs == alone.outputs
    assert len(result.outputs) == 8
    assert sorted(records) == [Rank(0, pp, tp) for pp in range(3) for tp in range(2)]
    assert disagreements(records) == []
    assert set(result.exit_codes.values()) == {0}
    steps = {max(r.step for r in own if isinstance(r.body, Inputs)) for own in records.values()}
    assert steps == {result.steps}
    groups = {r.body.what.split()[0] for r in records[Rank(0, 1, 0)] if isinstance(r.body, Collective)}
    assert groups == {"pp", "tp", "pp_broadcast"}


def test_the_old_mask_repeats_words_and_the_first_stage_differs(tmp_path: Path) -> None:
    """GIVEN the founding fault THEN some answers are wrong, each of them excluded first and then fed differently."""
    sound = run_lab(LAB)
    struck = run_lab(replace(LAB, fault=Plan("old-mask"), instance="struck", probe=probe_settings(tmp_path)))
    records = read_rings(tmp_path)
    wrong = {name for name, output in sound.outputs.items() if struck.outputs[name] != output}
    names = {r.body.request: r.body.request_id for r in records[Rank(0, 0, 0)] if r.kind is Kind.BIND}
    differing = set()
    first, last = ([r.body for r in records[Rank(0, pp, 0)] if isinstance(r.body, Inputs)] for pp in (0, 1))
    for own, authority in zip(first, last, strict=True):
        rows = (own.computed != authority.computed) | (own.last_sampled != authority.last_sampled)
        differing |= {names[int(key)] for key in own.request[rows]}
    assert wrong
    assert wrong <= differing
    assert differing <= {injection.request_id for injection in struck.injections}
    assert {field for _, rank, field in disagreements(records) if rank == Rank(0, 0, 0)} >= {
        "computed",
        "positions",
    }


def test_outputs_stream_as_they_come() -> None:
    seen: list[tuple[int, Output]] = []
    with start_lab(replace(LAB, stream_every=4), lambda tick, output: seen.append((tick, output))) as lab:
        result = lab.wait(60)
        polled = lab.poll()
    assert [output for _, output in seen] == polled
    assert {output.request_id: output for output in polled if output.finished} == result.outputs
    growing = [output for _, output in seen if not output.finished]
    assert growing
    for output in growing:
        final = result.outputs[output.request_id].tokens
        assert final[: len(output.tokens)] == output.tokens


def test_a_killed_rank_ends_the_run_with_its_name() -> None:
    """GIVEN SIGKILL of a stage in mid-run THEN the run ends, says whose death it was, and no process stays."""
    first_output = threading.Event()
    config = replace(LAB, step_sleep_ms=20, stream_every=1)
    with start_lab(config, lambda tick, output: first_output.set()) as lab:
        pids = lab.pids()
        assert first_output.wait(60)
        os.kill(pids[Rank(0, 1, 0)], signal.SIGKILL)
        result = lab.wait(60)
    assert result.error == "rank dp0.pp1.tp0 was ended by signal SIGKILL: the run is over"
    assert result.exit_codes["dp0.pp1.tp0"] == -signal.SIGKILL
    assert not any(process_exists(pid) for pid in pids.values())


def test_stop_leaves_no_process() -> None:
    lab = start_lab(replace(LAB, step_sleep_ms=50))
    pids = lab.pids()
    lab.stop()
    lab.stop()
    assert not lab.running
    assert not any(process_exists(pid) for pid in pids.values())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(LAB, fault=Plan("size-mismatch"), tp=2), "can only be put into the simulator"),
        (replace(LAB, layers=7), "7 layers do not divide into 2 stages"),
        (replace(LAB, fault=Plan("nonsense")), "unknown"),
        (replace(LAB, tp=3), "1 or 2 ranks"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(config: LabConfig, message: str) -> None:
    with pytest.raises(StagewatchError, match=message):
        start_lab(config)


def test_a_run_that_takes_too_long_is_ended() -> None:
    with pytest.raises(LabError, match="still running after"):
        run_lab(replace(LAB, step_sleep_ms=1000), timeout_s=0.1)


def test_the_command_line_runs_a_pipeline_into_rings(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "stagewatch.agents.lab",
        "--requests",
        "2",
        "--ring-dir",
        str(tmp_path),
        "--json",
    ]
    run = subprocess.run([*command, "--k", "3"], capture_output=True, text=True, timeout=60, check=True)
    outputs = [json.loads(line) for line in run.stdout.splitlines()]
    assert {output["request_id"] for output in outputs} == {"r0", "r1"}
    assert sorted(read_rings(tmp_path)) == [Rank(0, 0, 0), Rank(0, 1, 0)]


def test_the_command_line_repeats_a_simulated_run_from_its_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stagewatch.agents.lab", "simulate"]
    options = ["--benign", "--pp", "3", "--requests", "20", "--fault", "payload-altered", "--fault-step", "9"]
    first = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60, check=True)
    python, *again = shlex.split(first.stderr, comments=True)
    assert (python, again[:3]) == ("python", command[1:])
    trace = ["--trace", str(tmp_path / "run")]
    second = subprocess.run(
        [sys.executable, *again, *trace], capture_output=True, text=True, timeout=60, check=True
    )
    figures = [json.loads(run.stdout) for run in (first, second)]
    for figure in figures:
        del figure["request_steps_per_s"]
    assert figures[0] == figures[1]
    assert figures[0]["injections"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"run.rank{n}.jsonl" for n in range(3)]


def test_the_command_line_plays_a_process_fault(tmp_path: Path) -> None:
    """One that it can play by itself; those of sidecars need to know where to ship."""
    command = [sys.executable, "-m", "stagewatch.agents.lab", "--requests", "2", "--fault-step", "3"]
    killed = subprocess.run([*command, "--fault", "sidecar-dead"], capture_output=True, text=True, timeout=60)
    assert killed.returncode == 2
    assert "sidecar-dead strikes the sidecar, which this lab does not run" in killed.stderr
    slow = subprocess.run([*command, "--fault", "rank-slow"], capture_output=True, text=True, timeout=60)
    assert (slow.returncode, len(slow.stdout.splitlines())) == (0, 2)
    bare = subprocess.run([*command, "--collector", "ws://x"], capture_output=True, text=True, timeout=60)
    assert (bare.returncode, bare.stdout) == (2, "")
    assert "--collector needs --ring-dir and --token-file" in bare.stderr


def process_exists(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_lab_whose_reader_left_ends_without_a_word(tmp_path: Path) -> None:
    """GIVEN a driver WHEN whoever reads its events ends THEN it and its ranks end, and nothing is printed."""
    with (tmp_path / "stderr").open("wb") as stderr:
        driver = subprocess.Popen(
            [sys.executable, "-m", "stagewatch.agents.lab.driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        assert driver.stdin is not None
        assert driver.stdout is not None
        driver.stdout.close()
        driver.stdin.write(LAB.encode())
        driver.stdin.close()
        assert driver.wait(60) == 1
        with pytest.raises(ProcessLookupError):
            os.killpg(driver.pid, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
    assert (tmp_path / "stderr").read_text() == ""
