"""Where the engine's environments are, and one run of the engine for all tests that look at it."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import runs

RunEngine = Callable[..., runs.Run]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs the real engine, and minutes."""
    for item in items:
        if Path(item.fspath).parent == runs.HERE:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(600))


def find_python(version: str = "") -> Path:
    """The interpreter of an environment with vLLM; ``version`` names one other than the main one."""
    suffix = f"_{version.replace('.', '_')}" if version else ""
    variable = f"STAGEWATCH_VLLM_PYTHON{suffix}"
    directory = f".venv-vllm-{version}" if version else ".venv-vllm"
    found = Path(os.environ.get(variable) or runs.REPOSITORY / directory / "bin" / "python")
    if not found.exists():
        pytest.skip(
            f"NO ENGINE TO TEST: {found} does not exist: run tests/vllm/setup_env.sh, or set {variable}"
        )
    return found


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
