"""Runs of the real engine: started as processes of their own, read from what they leave behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from stagewatch.agents.record import Kind, Record
from stagewatch.agents.ring import RingReader

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
RUN_LIMIT_S = 400

# A stage a core; the drafter numbers its layer after the last stage's, which an even split would collide with.
STAGES = {1: ("0", "4"), 2: ("0|1", "3,1"), 3: ("0|1|0", "2,1,1")}


@dataclass(frozen=True)
class Run:
    """One engine's life."""

    status: int
    log: str
    rings: Path

    @cached_property
    def outputs(self) -> dict[str, list[int]]:
        """Token ids served, by the driver's name of the request."""
        found = [line for line in self.log.splitlines() if line.startswith("OUTPUTS ")]
        assert found, f"the engine served nothing:\n{self.log[-4000:]}"
        return json.loads(found[-1].removeprefix("OUTPUTS "))

    @cached_property
    def records(self) -> dict[int, list[Record]]:
        """Every record, by stage."""
        found = {}
        for path in sorted(self.rings.glob("*.ring")):
            reader = RingReader(path)
            found[reader.identity.rank.pp] = list(everything(reader))
            assert reader.lost == 0
        return found

    @cached_property
    def replay(self) -> dict[str, Any]:
        """What `stagewatch replay --json` says of the rings."""
        command = [Path(sys.executable).with_name("stagewatch"), "replay", "--json", self.rings]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False)
        assert done.returncode in (0, 1) and done.stdout, done.stderr
        return json.loads(done.stdout)

    def incidents(self) -> set[tuple[str, str, str]]:
        """(check, severity, request's name) of each incident."""
        return {(i["check"], i["severity"], name_of(i["request"])) for i in self.replay["incidents"]}

    def notes(self, stage: int) -> list[str]:
        """What a stage noted for the operator."""
        return [record.body.text for record in self.records[stage] if record.kind is Kind.NOTE]


RunEngine = Callable[..., Run]


def find_python(version: str = "") -> Path:
    """The interpreter of an environment with vLLM; ``version`` names one other than the main one."""
    suffix = f"_{version.replace('.', '_')}" if version else ""
    variable = f"STAGEWATCH_VLLM_PYTHON{suffix}"
    directory = f".venv-vllm-{version}" if version else ".venv-vllm"
    found = Path(os.environ.get(variable) or REPOSITORY / directory / "bin" / "python")
    if not found.exists():
        pytest.skip(
            f"NO ENGINE TO TEST: {found} does not exist: run tests/vllm/setup_env.sh, or set {variable}"
        )
    return found


def name_of(request_id: str) -> str:
    """The driver's name of a request; the engine appends a suffix of its own."""
    return request_id.rpartition("-")[0]


def everything(reader: RingReader) -> Iterator[Record]:
    """All records of a ring."""
    while batch := list(reader.read()):
        yield from batch


def engine_environment(
    pp: int, *, rings: Path | None = None, fault: str = "", more: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Environment of an engine run: ours, without any setting of stagewatch that the caller did not ask for."""
    bind, partition = STAGES[pp]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STAGEWATCH_")}
    environment |= {
        "TRITON_INTERPRET": "1",
        "TRITON_DEFAULT_BACKEND": "cpu",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_CPU_OMP_THREADS_BIND": bind,
        "VLLM_PP_LAYER_PARTITION": partition,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # Workers of these releases wait for the signal that follows, with or without a probe; the default is 5.
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
    }
    if rings is not None:
        environment["STAGEWATCH_RING_DIR"] = str(rings)
    if fault:
        environment["STAGEWATCH_LAB_FAULT"] = fault
    return environment | dict(more or {})


def start(
    python: Path, scenario: str, models: Path, pp: int, drafts: int, environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    """Start the driver as the leader of a process group."""
    command = [str(python), str(HERE / "driver.py"), scenario, str(models), str(pp), str(drafts)]
    return subprocess.Popen(
        command,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a run and return its log; whatever is left of its process group is killed."""
    try:
        log, _ = process.communicate(timeout=RUN_LIMIT_S)
        return log
    finally:
        kill_group(process)


def kill_group(process: subprocess.Popen[str]) -> None:
    """SIGKILL every process of a run at once."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
