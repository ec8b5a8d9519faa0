"""The entry point: nothing where nothing is asked for, harmless where it is asked for twice."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from standins import Pipeline

from stagewatch.agents.engines import vllm, vllm_plugin
from stagewatch.agents.settings import RING_DIR

SEEN_IN_AN_UNWATCHED_PROCESS = """
import sys
from stagewatch.agents.engines.vllm_plugin import register
register()
heavy = [name for name in ("numpy", "torch", "vllm", "msgspec") if name in sys.modules]
print(*sorted(name for name in sys.modules if name.startswith("stagewatch")), heavy)
"""


class WorkerWrapperBase:
    """What vLLM starts in a worker process."""

    def init_device(self) -> str:
        return "ready"


@pytest.fixture
def worker_base(monkeypatch: pytest.MonkeyPatch) -> type[WorkerWrapperBase]:
    """VLLM's module of worker wrappers, with a fresh class."""
    module = ModuleType("vllm.v1.worker.worker_base")
    kind = type("WorkerWrapperBase", (WorkerWrapperBase,), dict(vars(WorkerWrapperBase)))
    module.WorkerWrapperBase = kind  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return kind


class TestEntryPoint:
    def test_imports_nothing_of_ours_where_the_variable_is_not_set(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != RING_DIR}
        command = [sys.executable, "-c", SEEN_IN_AN_UNWATCHED_PROCESS]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        packages = "stagewatch.agents stagewatch.agents.engines stagewatch.agents.engines.vllm_plugin"
        assert done.stdout.split() in (
            [*packages.split(), "[]"],
            ["stagewatch", *packages.split(), "[]"],
        )

    def test_wraps_nothing_where_the_variable_is_not_set(
        self, worker_base: type[WorkerWrapperBase], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(RING_DIR, raising=False)
        before = worker_base.init_device
        vllm_plugin.register()
        assert worker_base.init_device is before

    def test_repeats_the_name_of_the_variable(self) -> None:
        assert vllm_plugin.RING_DIR == RING_DIR

    def test_arming_twice_wraps_once(
        self, worker_base: type[WorkerWrapperBase], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv(RING_DIR, str(tmp_path))
        before = worker_base.init_device
        vllm_plugin.register()
        once = worker_base.init_device
        vllm_plugin.register()
        assert once is not before
        assert worker_base.init_device is once

    def test_a_vllm_without_workers_is_named_and_left_alone(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
        vllm.install()
        (message,) = [record.getMessage() for record in caplog.records]
        assert message.startswith("stagewatch: not armed: this vLLM has no worker to watch")


class Worker:
    """A worker whose model is loaded."""

    rank = 0

    def __init__(self, runner: Any, pp: int) -> None:
        self.model_runner = runner
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=pp))
        self.loaded = 0

    def load_model(self) -> str:
        self.loaded += 1
        return "loaded"


class TestNotArmed:
    """One line says what was found; the worker goes on."""

    @pytest.fixture(autouse=True)
    def _asked_for(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv(RING_DIR, str(tmp_path / "rings"))

    def start(self, worker: Worker, kind: type[WorkerWrapperBase]) -> None:
        """What vLLM does with a worker."""
        vllm.install()
        wrapper = kind()
        wrapper.worker = worker  # type: ignore[attr-defined]
        assert wrapper.init_device() == "ready"
        assert worker.load_model() == "loaded"
        assert worker.loaded == 1
        assert "load_model" not in vars(worker)

    def test_one_stage(self, worker_base: type[WorkerWrapperBase], caplog: pytest.LogCaptureFixture) -> None:
        self.start(Worker(object(), pp=1), worker_base)
        assert [r.getMessage() for r in caplog.records] == [
            "stagewatch: not armed: pipeline_parallel_size is 1, there are no stages to compare."
        ]

    def test_another_runner(
        self,
        worker_base: type[WorkerWrapperBase],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        engine = Pipeline("C").ranks[0].engine
        monkeypatch.setattr(vllm, "load_engine", lambda: engine)
        self.start(Worker(SimpleNamespace(), pp=2), worker_base)
        (message,) = [record.getMessage() for record in caplog.records]
        assert (
            "found the runner types.SimpleNamespace, not the V2 model runner; vLLM 0.23.0 to 0.33.0"
            in message
        )

    def test_an_error_of_ours(
        self,
        worker_base: type[WorkerWrapperBase],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def broken() -> None:
            raise KeyError("bug")

        monkeypatch.setattr(vllm, "load_engine", broken)
        self.start(Worker(SimpleNamespace(), pp=2), worker_base)
        (message,) = [record.getMessage() for record in caplog.records]
        assert message == "stagewatch: not armed: KeyError: 'bug'. The engine is not affected."

    def test_a_bad_setting(
        self,
        worker_base: type[WorkerWrapperBase],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setenv("STAGEWATCH_RING_BYTES", "many")
        self.start(Worker(SimpleNamespace(), pp=2), worker_base)
        (message,) = [record.getMessage() for record in caplog.records]
        assert "STAGEWATCH_RING_BYTES='many' is not a number" in message
