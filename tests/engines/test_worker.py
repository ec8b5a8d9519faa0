"""From the plugin's call to an armed worker, on a stand-in engine; and every way in which that can fail."""

import errno
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from standins import Pipeline, Request, expected_text
from test_identity import config, groups

from stagewatch.agents.engines import vllm, vllm_plugin
from stagewatch.agents.record import Kind
from stagewatch.agents.ring import RingReader
from stagewatch.agents.settings import RING_DIR


class Worker:
    """A worker process's worker: loads, warms up, shuts down."""

    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        self.rank = stage
        self.model_runner = pipeline.ranks[stage].runner
        self.vllm_config = config(pipeline_parallel_size=2)
        self.warm_up: Callable[[], None] = lambda: None
        self.ended = False

    def load_model(self) -> str:
        return "loaded"

    def determine_available_memory(self) -> int:
        self.warm_up()
        return 7

    def shutdown(self) -> None:
        self.ended = True


class Node:
    """Two workers of one engine. vLLM's modules are the process's, so that a stage is current while it starts."""

    def __init__(self, rings: Path, patch: pytest.MonkeyPatch, variant: str = "C") -> None:
        self.pipeline, self.rings, self._patch = Pipeline(variant), rings, patch
        self.workers = [Worker(self.pipeline, stage) for stage in (0, 1)]
        self._threads = set(threading.enumerate())
        wrapper_module = ModuleType("vllm.v1.worker.worker_base")
        self.wrapper = type("WorkerWrapperBase", (), {"init_device": lambda self: "ready"})
        wrapper_module.WorkerWrapperBase = self.wrapper  # type: ignore[attr-defined]
        for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.distributed"):
            patch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["vllm"].__version__ = "0.0"  # type: ignore[attr-defined]
        patch.setitem(sys.modules, wrapper_module.__name__, wrapper_module)
        patch.setenv(RING_DIR, str(rings))
        patch.setenv("STAGEWATCH_HEARTBEAT_S", "0.01")

    def start(self, stages: tuple[int, ...] = (0, 1)) -> None:
        """What vLLM does in each worker's process."""
        vllm_plugin.register()
        for stage in stages:
            rank, state = self.pipeline.ranks[stage], groups(stage, 0, 1)
            rank.pp_group.rank_in_group = stage
            state.get_pp_group = lambda group=rank.pp_group: group
            modules = {"torch.distributed": rank.distributed, "vllm.distributed.parallel_state": state}
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(vllm, "load_engine", lambda rank=rank: rank.engine)
                patch.setattr(vllm, "importlib", Importer(modules))
                wrapper = self.wrapper()
                wrapper.worker = self.workers[stage]
                assert wrapper.init_device() == "ready"
                assert self.workers[stage].load_model() == "loaded"

    def readers(self) -> list[RingReader]:
        """Readers of the rings, by stage."""
        return [RingReader(path) for path in sorted(self.rings.glob("*.ring"))]

    def end(self) -> None:
        """Shut the workers down, and wait for what was started in them."""
        for worker in self.workers:
            worker.shutdown()
        for thread in set(threading.enumerate()) - self._threads:
            thread.join(timeout=30)


class Importer:
    """`importlib` of a process with one rank: some modules are the rank's own."""

    def __init__(self, modules: dict[str, Any]) -> None:
        self._modules = modules

    def import_module(self, name: str) -> Any:
        """A module."""
        return self._modules.get(name) or importlib.import_module(name)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A node whose workers have not started."""
    made = Node(tmp_path / "rings", monkeypatch)
    yield made
    made.end()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines in the log, each of them one line."""
    lines = [record.getMessage() for record in caplog.records]
    assert not [line for line in lines if "\n" in line]
    return lines


REQUEST = Request("r", [1, 2], 20)


class TestArmed:
    def test_a_worker_arms_records_and_closes_its_ring(
        self, node: Node, caplog: pytest.LogCaptureFixture
    ) -> None:
        node.start()
        assert said(caplog) == [
            f"stagewatch: rank dp0.pp{stage}.tp0 armed, vLLM 0.0, variant C." for stage in (0, 1)
        ]
        assert node.pipeline.serve([REQUEST])["r"][:20] == expected_text(REQUEST)
        node.end()
        assert [worker.ended for worker in node.workers] == [True, True]
        for reader in node.readers():
            kinds = [record.kind for record in reader.read(1 << 20)]
            assert kinds.count(Kind.INPUTS) > 3
            assert reader.closed
        assert len(caplog.records) == 2  # leaving is no event

    def test_warm_up_is_not_recorded(self, node: Node) -> None:
        node.start()
        node.workers[0].warm_up = lambda: node.pipeline.serve([Request("warm-up", [1], 1)]) and None
        assert node.workers[0].determine_available_memory() == 7
        found = [record for record in node.readers()[0].read(1 << 20) if record.kind is Kind.INPUTS]
        assert found == []

    def test_a_ring_deleted_in_mid_run_changes_nothing_for_the_engine(
        self, node: Node, caplog: pytest.LogCaptureFixture
    ) -> None:
        node.start()
        readers = node.readers()

        def delete(step: int) -> None:
            if step == 3:
                for path in node.rings.glob("*.ring"):
                    path.unlink()
                node.rings.rmdir()

        node.pipeline.between = delete
        assert node.pipeline.serve([REQUEST])["r"][:20] == expected_text(REQUEST)
        # Whoever had it open goes on reading.
        assert all(record.kind for record in readers[0].read(1 << 20))
        assert len(said(caplog)) == 2

    def test_a_worker_that_loads_again_is_armed_once(
        self, node: Node, caplog: pytest.LogCaptureFixture
    ) -> None:
        node.start()
        assert node.workers[0].load_model() == "loaded"
        assert len(list(node.rings.glob("*.ring"))) == len(said(caplog)) == 2

    def test_a_load_that_somebody_else_kept_arms_no_second_time(
        self, node: Node, caplog: pytest.LogCaptureFixture
    ) -> None:
        """GIVEN a plugin that wraps our wrapper WHEN the worker loads its model again THEN it stays armed as it is."""
        worker = node.workers[0]
        kept: list[Callable[[], str]] = []
        load = Worker.load_model

        def keep(self: Worker) -> str:
            if self is worker and not kept:
                kept.append(self.load_model)
            return load(self)

        node._patch.setattr(Worker, "load_model", keep)
        node.start()
        assert kept[0]() == "loaded"
        assert len(list(node.rings.glob("*.ring"))) == len(said(caplog)) == 2


class TestNotArmed:
    def assert_serves_unwatched(self, node: Node) -> None:
        for rank in node.pipeline.ranks:
            assert not hasattr(rank.pp_utils.compute_need_sampled_mask, "__wrapped__")
            assert not [value for value in vars(rank.runner).values() if hasattr(value, "__wrapped__")]
        assert node.pipeline.serve([REQUEST])["r"][:20] == expected_text(REQUEST)

    def test_a_full_file_system(
        self, node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", full)
        node.start()
        lines = said(caplog)
        assert len(lines) == 2
        assert all(line.startswith("stagewatch: not armed: ring life.dp0.pp") for line in lines)
        assert all("No space left on device. The engine is not affected." in line for line in lines)
        assert list(node.rings.iterdir()) == []
        self.assert_serves_unwatched(node)

    def test_a_ring_directory_that_is_a_file(self, node: Node, caplog: pytest.LogCaptureFixture) -> None:
        node.rings.write_text("")
        node.start()
        assert all("is not a directory" in line for line in said(caplog))
        self.assert_serves_unwatched(node)

    def test_a_ring_directory_that_others_can_write(
        self, node: Node, caplog: pytest.LogCaptureFixture
    ) -> None:
        node.rings.mkdir()
        node.rings.chmod(0o777)
        node.start()
        assert all("can be written by others: chmod 700 it" in line for line in said(caplog))
        self.assert_serves_unwatched(node)

    def test_state_that_only_a_loaded_runner_shows_to_be_missing(
        self, node: Node, caplog: pytest.LogCaptureFixture
    ) -> None:
        for rank in node.pipeline.ranks:
            del rank.runner.pp_handler.broadcast_group
        node.start()
        assert all(
            "found its pipeline handler without broadcast_group; vLLM 0.23.0 to" in x for x in said(caplog)
        )
        assert not node.rings.exists()

    def test_a_hook_that_cannot_be_placed_leaves_none_behind(
        self, node: Node, caplog: pytest.LogCaptureFixture
    ) -> None:
        for rank in node.pipeline.ranks:
            del rank.pp_group.irecv_tensor_dict
        node.start()
        lines = said(caplog)
        assert (
            len(lines) == 4
        )  # each rank: disarmed, for who reads its ring; not armed, for who reads the log
        assert all("isend_tensor_dict" in line or "recv_tensor_dict" in line for line in lines)
        for rank in node.pipeline.ranks:
            rank.pp_group.irecv_tensor_dict = lambda: None
        self.assert_serves_unwatched(node)

    def test_a_failure_after_the_hooks_were_placed_takes_them_off(
        self, node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def failing(*_: object) -> None:
            raise TypeError("this worker cannot be shut down")

        monkeypatch.setattr(vllm, "_close_with", failing)
        node.start()
        assert len([line for line in said(caplog) if "cannot be shut down" in line]) == 4
        self.assert_serves_unwatched(node)

    def test_a_worker_that_somebody_else_wraps_while_it_loads(self, node: Node) -> None:
        """GIVEN a plugin that takes our wrapper's place during the load THEN its own stays."""
        worker, theirs = node.workers[0], lambda: "theirs"
        load = Worker.load_model

        def taken(self: Worker) -> str:
            if self is worker:
                self.load_model = theirs  # type: ignore[method-assign]
            return load(self)

        node._patch.setattr(Worker, "load_model", taken)
        node.start()
        assert worker.load_model is theirs

    def test_a_wrapper_without_a_worker(self, node: Node, caplog: pytest.LogCaptureFixture) -> None:
        vllm_plugin.register()
        assert node.wrapper().init_device() == "ready"
        (line,) = said(caplog)
        assert line.startswith("stagewatch: not armed: AttributeError: ")


class TestBrokenEnvironment:
    """The plugin is called outside of any guard of vLLM's: it must return."""

    @pytest.mark.parametrize(
        ("body", "said_of_it"),
        [
            ("import torch_that_is_missing", "ModuleNotFoundError: No module named 'torch_that_is_missing'"),
            ("def broken(:", "SyntaxError: invalid syntax"),
            ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
            ("class WorkerWrapperBase: pass", "AttributeError: type object 'WorkerWrapperBase' has no"),
        ],
    )
    def test_a_worker_module_that_cannot_be_imported(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
        body: str, said_of_it: str,
    ) -> None:  # fmt: skip
        package = tmp_path / "vllm" / "v1" / "worker"
        package.mkdir(parents=True)
        (package / "worker_base.py").write_text(body + "\n")
        monkeypatch.syspath_prepend(tmp_path)
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setenv(RING_DIR, str(tmp_path / "rings"))
        vllm_plugin.register()
        (line,) = said(caplog)
        assert line.startswith(f"stagewatch: not armed: this vLLM has no worker to watch ({said_of_it}")
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]

    def test_an_environment_that_lacks_what_we_need(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        import stagewatch.agents.engines as engines

        monkeypatch.setenv(RING_DIR, str(tmp_path))
        monkeypatch.setitem(sys.modules, "stagewatch.agents.engines.vllm", None)
        monkeypatch.delattr(engines, "vllm", raising=False)
        vllm_plugin.register()
        (line,) = said(caplog)
        assert line.startswith("stagewatch: not armed: ")
        assert line.endswith("The engine is not affected.")
