"""The whole chain on the real engine: ring, sidecar, collector, incident, while the engine serves."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import runs
from runs import RunEngine, find_python

BIN = Path(sys.executable).parent
WAIT_S = 60.0
T = TypeVar("T")


def wait_for(condition: Callable[[], T], what: str) -> T:
    """The first true value of a condition; fails after `WAIT_S`."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if value := condition():
                return value
        time.sleep(0.05)
    raise AssertionError(f"never came true: {what}")


@contextlib.contextmanager
def command(arguments: list[object], log: Path, **environment: str) -> Iterator[None]:
    """One of our commands in a process group of its own."""
    cleared = {name: value for name, value in os.environ.items() if not name.startswith("STAGEWATCH_")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(argument) for argument in arguments],
            env=cleared | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[httpx.Client]:
    """A collector, and a sidecar that ships the rings of ``tmp_path/rings`` to it."""
    rings, data, log = tmp_path / "rings", tmp_path / "data", tmp_path / "collector.log"
    rings.mkdir(mode=0o700)
    with command([BIN / "stagewatch", "collect", "--port", 0, "--data-dir", data], log):

        def url_in_log() -> str:
            lines = log.read_text().splitlines()
            return next((line.split()[-1] for line in lines if "listening on" in line), "")

        url = wait_for(url_in_log, "the collector listens")
        token = (data / "token").read_text().strip()
        client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"})
        wait_for(lambda: client.get("/readyz").status_code == 200, "the collector is ready")
        address = url.replace("http", "ws", 1)
        ship = [BIN / "stagewatch-agent", "ship", "--ring-dir", rings, "--collector", address]
        with command(ship, tmp_path / "sidecar.log", STAGEWATCH_TOKEN=token):
            yield client


def serve(models: Path, rings: Path, fault: str = "") -> None:
    """One life of an engine."""
    environment = runs.engine_environment(2, rings=rings, fault=fault)
    process = runs.start(find_python(), "basic", models, 2, 7, environment)
    log = runs.finish(process)
    assert process.returncode == 0, log[-4000:]


def leave_behind(run: runs.Run, rings: Path) -> None:
    """Put the rings of a run that has ended where the sidecar looks, as an engine leaves them."""
    for path in run.rings.glob("*.ring"):
        shutil.copy2(path, rings / f".{path.name}")
        (rings / f".{path.name}").rename(rings / path.name)


def compared(collector: httpx.Client, life: int) -> dict[str, Any] | None:
    """The state of the ``life``-th engine once every step that its ranks recorded was compared."""
    engines = collector.get("/v1/engines").json()["engines"]
    if len(engines) <= life:
        return None
    last_steps = [rank["last_step"] for rank in engines[life]["ranks"]]
    done = len(last_steps) == 2 and 0 < min(last_steps) == max(last_steps) == engines[life]["compared_to"]
    return engines[life] if done else None


def test_a_healthy_engine_is_silent_and_the_next_life_is_caught(
    collector: httpx.Client, models: Path, run_engine: RunEngine, tmp_path: Path
) -> None:
    """Two lives of an engine on one node.

    GIVEN a collector and a sidecar WHEN they find the rings of a released engine that has ended, and then one with
    the old mask serves THEN the first is consistent throughout, and of the second exactly what a replay finds is
    reported.
    """
    rings = tmp_path / "rings"
    leave_behind(run_engine("basic", 2, 7), rings)
    healthy = wait_for(lambda: compared(collector, 0), "the healthy engine was compared")
    assert {verdict for verdict, rows in healthy["verdicts"].items() if rows} == {"CONSISTENT"}
    assert collector.get("/v1/incidents").json()["incidents"] == []

    serve(models, rings, fault="old-mask")
    faulty = wait_for(lambda: compared(collector, 1), "the faulty engine was compared")
    assert faulty["instance"] != healthy["instance"]
    live = {
        (i["check"], i["severity"], i["request"], i["first_bad_step"])
        for i in collector.get("/v1/incidents").json()["incidents"]
    }
    replayed = {
        (i["check"], i["severity"], i["request"], i["first_bad_step"])
        for i in runs.Run(0, "", rings).replay["incidents"]
    }
    assert live == replayed
    assert ("excluded-row", "critical") in {(check, severity) for check, severity, *_ in live}


def test_a_rank_over_its_budget_is_reported_with_its_reason(
    collector: httpx.Client, models: Path, tmp_path: Path
) -> None:
    """GIVEN a first stage that may take nothing of a step THEN that it disarmed is all that is reported."""
    serve(models, tmp_path / "rings", fault="budget-of-nothing")

    def disarmed() -> dict[str, Any] | None:
        incidents = collector.get("/v1/incidents").json()["incidents"]
        return next((i for i in incidents if i["check"] == "rank-unarmed"), None)

    incident = wait_for(disarmed, "the rank that disarmed is reported")
    assert incident["severity"] == "warning"
    shown = collector.get(f"/v1/incidents/{incident['id']}").json()
    assert "rank 0 disarmed: budget exceeded: p99" in shown["chain"][0]["text"]
    assert len(collector.get("/v1/incidents").json()["incidents"]) == 1
    (engine,) = collector.get("/v1/engines").json()["engines"]
    assert engine["ranks"][0]["armed"] is False
    assert engine["verdicts"]["DIVERGED"] == 0
