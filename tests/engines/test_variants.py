"""Each variant is told by its shape, and nothing that differs from a known shape is taken for one."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from standins import VARIANTS, make_engine, make_pp_utils

from stagewatch.agents.engines.vllm_variants import Engine, UnknownShapeError, inspect_engine, load_engine

RELAY = {
    "A1": None,
    "A2": None,
    "A+relay": "broadcast_draft",
    "B": "broadcast_drafts",
    "C": "broadcast_drafts",
}


class TestSupportedShapes:
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_is_recognised(self, variant: str) -> None:
        found = inspect_engine(make_engine(variant))
        assert (found.variant, found.supported) == (variant, True)
        assert found.relay == RELAY.get(variant, "broadcast_drafts")
        assert found.refined == (variant in ("C", "D"))

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_every_hook_it_announces_exists(self, variant: str) -> None:
        engine = make_engine(variant)
        parts = {
            "GPUModelRunner": engine.runner,
            "RequestState": engine.states,
            "PPHandler": engine.pp_utils.PPHandler,
            "pp_utils": engine.pp_utils,
        }
        for hook in inspect_engine(engine).hooks:
            owner, _, name = hook.partition(".")
            assert owner not in parts or hasattr(parts[owner], name), hook

    def test_a_parameter_with_a_default_does_not_change_the_shape(self) -> None:
        """GIVEN a fork whose receive takes one more optional argument THEN it is still variant B."""
        engine = make_engine("B")
        receive = lambda self, input_batch, restore_model_state=None: None  # noqa: E731
        engine.pp_utils.PPHandler = type("PPHandler", (engine.pp_utils.PPHandler,), {"receive": receive})
        assert inspect_engine(engine).variant == "B"


def f0() -> Engine:
    """Functions, no handler: 0.17 to 0.22."""
    module = ModuleType("pp_utils")
    module.pp_broadcast = lambda sampled_token_ids, num_sampled, num_rejected: None  # type: ignore[attr-defined]
    module.pp_receive = lambda num_reqs, max_sample_len=1: None  # type: ignore[attr-defined]
    return dataclasses.replace(make_engine("A1"), pp_utils=module)


def h0() -> Engine:
    """A handler module of its own: never released."""
    return dataclasses.replace(
        make_engine("A1"), pp_utils=None, pp_handler=SimpleNamespace(get_pp_handler=None)
    )


def without(name: str) -> Engine:
    """Variant C without one attribute of its module."""
    engine = make_engine("C")
    delattr(engine.pp_utils, name)
    return engine


def with_method(name: str, method: Any) -> Engine:
    """Variant C with a method of another signature."""
    engine = make_engine("C")
    engine.pp_utils.PPHandler = type("PPHandler", (engine.pp_utils.PPHandler,), {name: method})
    return engine


def with_runner(name: str, method: Any) -> Engine:
    """Variant C whose runner has another method."""
    engine = make_engine("C")
    return dataclasses.replace(engine, runner=type("GPUModelRunner", (engine.runner,), {name: method}))


class TestBrokenInstallation:
    """What is there but cannot be imported is not taken for absent."""

    @pytest.fixture
    def vllm(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        """An importable vllm with an empty V2 runner package."""
        package = tmp_path / "vllm" / "v1" / "worker" / "gpu"
        package.mkdir(parents=True)
        (tmp_path / "vllm" / "__init__.py").write_text("")
        monkeypatch.syspath_prepend(tmp_path)
        forget()
        yield package
        forget()

    def test_a_missing_module_is_an_older_engine(self, vllm: Path) -> None:
        assert load_engine() == Engine(None, None, None, None, None)
        assert inspect_engine(load_engine()).variant == "none"

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            ("import a_torch_that_is_missing", "No module named 'a_torch_that_is_missing'"),
            ("from os import no_such_name", "ImportError: cannot import name 'no_such_name'"),
            ("def broken(:", "SyntaxError"),
            ("raise RuntimeError('CUDA is not there')", "RuntimeError: CUDA is not there"),
        ],
    )
    def test_a_broken_module_is_named_with_its_error(self, vllm: Path, body: str, said: str) -> None:
        (vllm / "pp_utils.py").write_text(body + "\n")
        with pytest.raises(UnknownShapeError) as raised:
            load_engine()
        assert "vllm.v1.worker.gpu.pp_utils cannot be imported" in str(raised.value)
        assert said in str(raised.value)

    def test_a_vllm_that_cannot_be_imported(self, vllm: Path) -> None:
        (vllm.parents[2] / "__init__.py").write_text("raise RuntimeError('no device')\n")
        with pytest.raises(UnknownShapeError, match=r"vLLM cannot be imported \(RuntimeError: no device\)"):
            load_engine()


def forget() -> None:
    """Forget every module of vLLM."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


class TestOtherShapes:
    @pytest.mark.parametrize(
        ("engine", "variant", "said"),
        [
            (f0(), "F0", "found functions pp_broadcast and pp_receive"),
            (h0(), "H0", "get_pp_handler"),
            (
                dataclasses.replace(make_engine("A1"), pp_utils=None),
                "none",
                "found no vllm.v1.worker.gpu.pp_utils",
            ),
            (dataclasses.replace(make_engine("C"), runner=None), "unknown", "found no GPUModelRunner"),
            (
                dataclasses.replace(make_engine("C"), batch=object),
                "unknown",
                "InputBatch has no field req_ids",
            ),
            (without("compute_need_sampled_mask"), "unknown", "no compute_need_sampled_mask"),
            (
                with_method("receive", lambda self, num_reqs: None),
                "unknown",
                "PPHandler.receive takes (num_reqs), expected (input_batch)",
            ),
            (
                with_method("receive", lambda self, input_batch, more: None),
                "unknown",
                "PPHandler.receive also requires more",
            ),
            (
                with_method("receive", property(lambda self: None)),
                "unknown",
                "PPHandler.receive is a property, not a method",
            ),
            (
                with_method("get_prev_sampled_outputs", property(lambda self: None)),
                "unknown",
                "PPHandler.get_prev_sampled_outputs is a property",
            ),
            (
                with_method("broadcast", lambda self, tokens, num_sampled, num_rejected, input_batch: None),
                "unknown",
                "PPHandler.broadcast takes (tokens, num_sampled, num_rejected, input_batch), expected "
                "(sampled_token_ids, num_sampled, num_rejected, input_batch)",
            ),
            (
                with_method("broadcast_drafts", lambda self, draft_tokens: None),
                "unknown",
                "PPHandler.broadcast_drafts takes (draft_tokens), expected (draft_tokens, input_batch)",
            ),
            (
                with_method("broadcast_drafts", property(lambda self: None)),
                "unknown",
                "PPHandler.broadcast_drafts takes (), expected (draft_tokens, input_batch)",
            ),
            (
                with_runner("prepare_inputs", lambda self, scheduler_output: None),
                "unknown",
                "GPUModelRunner.prepare_inputs takes no batch_desc",
            ),
            (
                with_runner("sample_tokens", property(lambda self: None)),
                "unknown",
                "GPUModelRunner.sample_tokens is a property, not a method",
            ),
        ],
    )
    def test_is_refused_with_what_was_found_and_what_works(
        self, engine: Engine, variant: str, said: str
    ) -> None:
        found = inspect_engine(engine)
        assert (found.variant, found.supported, found.hooks) == (variant, False, ())
        assert said in found.why
        assert "vLLM 0.23.0 to 0.33.0 with the V2 model runner" in found.why

    def test_a_pending_entry_without_its_generation_is_refused(self) -> None:
        module = make_pp_utils("C")
        module.PendingRecv = dataclasses.make_dataclass("PendingRecv", ["event", "sampled_tokens"])  # type: ignore[attr-defined]
        found = inspect_engine(make_engine("C", module))
        assert not found.supported
        assert "gen_at_receive_np" in found.why
