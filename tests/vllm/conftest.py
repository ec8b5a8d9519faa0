"""The models, and one run of the engine for all tests that look at it."""

import subprocess
from pathlib import Path

import pytest
import runs
from runs import RunEngine, find_python


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs the real engine, and minutes."""
    for item in items:
        if Path(item.fspath).parent == runs.HERE:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny target and its drafter."""
    directory = tmp_path_factory.mktemp("models")
    command = [find_python(), runs.HERE / "make_models.py", directory]
    subprocess.run(command, check=True, capture_output=True, timeout=runs.RUN_LIMIT_S)
    return directory


@pytest.fixture(scope="session")
def run_engine(models: Path, tmp_path_factory: pytest.TempPathFactory) -> RunEngine:
    """Run the engine through a scenario; the same arguments give the same run, so that tests share it."""
    finished: dict[object, runs.Run] = {}

    def run(
        scenario: str,
        pp: int,
        drafts: int,
        *,
        fault: str = "",
        probe: bool = True,
        version: str = "",
        **more: str,
    ) -> runs.Run:
        key = (scenario, pp, drafts, fault, probe, version, tuple(more.items()))
        if key not in finished:
            python = find_python(version)
            rings = tmp_path_factory.mktemp("rings") / "rings"
            environment = runs.engine_environment(pp, rings=rings if probe else None, fault=fault, more=more)
            process = runs.start(python, scenario, models, pp, drafts, environment)
            log = runs.finish(process)
            finished[key] = runs.Run(process.returncode, log, rings)
        return finished[key]

    return run
