"""What shape an installed vLLM's pipeline broadcast path has, found by inspecting its callables.

Facts read from releases 0.17 to 0.33 and from public forks. A version string is never consulted: forks
carry any. The letters name the shapes.

- ``F0`` (0.17 to 0.22): two functions, blocking; sender and receiver may disagree about the width.
- ``H0`` (development snapshots): a handler of another interface, never released.
- ``A1`` (0.23, 0.24), ``A2`` (0.25 to 0.29): `PPHandler`, deferred consumption, drafts not relayed.
- ``A+relay``: forks of A that relay drafts.
- ``B`` (0.30): relays the draft table and scatters it itself; fixed mask.
- ``C`` (0.31, 0.32): as B, the mask leaves out final prefill chunks whose one token ends the request.
- ``D`` (0.33): as C, the width varies by step and the caller scatters the drafts.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from stagewatch.agents.errors import StagewatchError, one_line

SUPPORTED: Final = ("A1", "A2", "A+relay", "B", "C", "D")
_TABLE_RELAYS: Final = ("B", "C")
REFINED: Final = ("C", "D")
"""Variants whose sound mask leaves out final prefill chunks at the cap."""
WORKS_WITH: Final = "vLLM 0.23.0 to 0.33.0 with the V2 model runner (VLLM_USE_V2_MODEL_RUNNER=1) work"

_PACKAGE: Final = "vllm.v1.worker.gpu"
_PENDING: Final = (
    "event",
    "sampled_tokens",
    "num_sampled",
    "num_rejected",
    "idx_mapping_np",
    "need_sampled_mask",
    "gen_at_receive_np",
)
_BATCH: Final = (
    "req_ids",
    "num_reqs",
    "idx_mapping",
    "idx_mapping_np",
    "num_scheduled_tokens",
    "num_tokens",
    "num_tokens_after_padding",
    "num_draft_tokens_per_req",
    "query_start_loc",
    "query_start_loc_np",
    "num_computed_tokens_np",
    "prefill_len_np",
    "is_prefilling_np",
    "input_ids",
    "positions",
)
_RUNNER: Final = {
    "execute_model": ("scheduler_output", "dummy_run"),
    "prepare_inputs": ("scheduler_output", "batch_desc"),
    "sample_tokens": (),
    "update_pp_decode_requests": (),
}
_RELAY_NAMES: Final = ("broadcast_drafts", "broadcast_draft")
_DRAFTS_NAMES: Final = ("draft_tokens", "draft_table")
"""Names of the first argument of a relay."""
_HANDLER_STATE: Final = ("is_last_rank", "queue", "req_idx_gen_np", "broadcast_group")
_RUNNER_STATE: Final = ("req_states", "pp_handler", "max_num_reqs", "max_num_tokens", "device")
_STATES_STATE: Final = (
    "req_id_to_index",
    "num_computed_tokens",
    "last_sampled_tokens",
    "draft_tokens",
    "prompt_len",
    "max_seq_len",
)


class UnknownShapeError(StagewatchError):
    """The installed engine is not of a shape the adapter can watch. The message says what was found."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The parts of an installed vLLM that matter here; None for one that does not exist.

    Stand-ins take their place in tests.
    """

    pp_utils: Any
    """Module ``vllm.v1.worker.gpu.pp_utils``."""
    pp_handler: Any
    """Module ``vllm.v1.worker.gpu.pp_handler``, found in development snapshots only."""
    runner: Any
    """Class ``vllm.v1.worker.gpu.model_runner.GPUModelRunner``."""
    batch: Any
    """Dataclass ``vllm.v1.worker.gpu.input_batch.InputBatch``."""
    states: Any
    """Class ``vllm.v1.worker.gpu.states.RequestState``."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What inspection found."""

    variant: str
    """A letter of this module, or ``none`` (no pipeline module) or ``unknown``."""
    supported: bool
    why: str
    """What was found, in one sentence; where unsupported, also which versions work."""
    hooks: tuple[str, ...] = ()
    """Callables that arming will wrap, as a reader of the engine's code would name them."""
    relay: str | None = None
    """Name of the method that relays drafts, if any."""
    relays_table: bool = False
    """Whether that method takes the whole draft table and picks the batch's rows itself."""

    @property
    def refined(self) -> bool:
        """Whether this variant's sound mask leaves out final prefill chunks at the cap."""
        return self.variant in REFINED


def load_engine() -> Engine:
    """The installed vLLM's parts. Raises UnknownShapeError where vLLM or a part that exists cannot be imported."""
    try:
        importlib.import_module("vllm")
    except Exception as error:  # noqa: BLE001  # a broken installation can raise anything
        raise UnknownShapeError(
            f"vLLM cannot be imported ({one_line(error)}): install stagewatch in the engine's environment"
        ) from None
    runner = _module("model_runner")
    batch = _module("input_batch")
    states = _module("states")
    return Engine(
        _module("pp_utils"),
        _module("pp_handler"),
        getattr(runner, "GPUModelRunner", None),
        getattr(batch, "InputBatch", None),
        getattr(states, "RequestState", None),
    )


def inspect_engine(engine: Engine) -> Finding:
    """Choose the variant by capability. Never raises for an engine of whatever shape."""
    if engine.pp_handler is not None and hasattr(engine.pp_handler, "get_pp_handler"):
        return _refuse("H0", "found pp_handler.get_pp_handler, the interface of an unreleased snapshot")
    pp = engine.pp_utils
    if pp is None:
        return _refuse(
            "none", "found no vllm.v1.worker.gpu.pp_utils: vLLM 0.16 or earlier, or no V2 model runner"
        )
    if hasattr(pp, "pp_broadcast") and hasattr(pp, "pp_receive"):
        return _refuse("F0", "found functions pp_broadcast and pp_receive (vLLM 0.17.0 to 0.22.1)")
    problem = _handler_problem(pp) or _parts_problem(engine)
    if problem:
        return _refuse("unknown", problem)
    variant, why, relay = _classify(pp, engine)
    if relay:
        problem = _relay_problem(getattr(pp.PPHandler, relay), relay, variant)
        if problem:
            return _refuse("unknown", problem)
    hooks = (
        "GPUModelRunner.execute_model",
        "GPUModelRunner.prepare_inputs",
        "GPUModelRunner.sample_tokens",
        "RequestState.add_request",
        "PPHandler.on_req_idx_freed",
        "PPHandler.broadcast",
        *((f"PPHandler.{relay}",) if relay else ()),
        "PPHandler.receive",
        "PPHandler.get_prev_sampled_outputs",
        "pp_utils.compute_need_sampled_mask",
        "torch.distributed.broadcast (group pp_broadcast)",
        "GroupCoordinator.isend_tensor_dict, irecv_tensor_dict (group pp)",
    )
    return Finding(variant, True, why, hooks, relay, variant in _TABLE_RELAYS)


def missing_parts(runner: Any) -> str | None:
    """What a loaded ``runner`` lacks of the state that hooks read, or None: classes do not tell."""
    for what, part, names in (
        ("the runner", runner, _RUNNER_STATE),
        ("its request states", getattr(runner, "req_states", None), _STATES_STATE),
        ("its pipeline handler", getattr(runner, "pp_handler", None), _HANDLER_STATE),
    ):
        lacking = [name for name in names if not hasattr(part, name)]
        if lacking:
            return f"found {what} without {', '.join(lacking)}; {WORKS_WITH}"
    return None


def _classify(pp: Any, engine: Engine) -> tuple[str, str, str | None]:
    handler = pp.PPHandler
    relay = next((name for name in _RELAY_NAMES if hasattr(handler, name)), None)
    pending_drafts = "draft_tokens" in _field_names(pp.PendingRecv)
    if "recv_drafts" in _parameters(handler.receive):
        return "D", "receive takes recv_drafts: the width varies by step", relay
    if relay and "draft_tokens_to_update" in _parameters(handler.get_prev_sampled_outputs):
        if "max_seq_len_np" in _field_names(engine.batch):
            return "C", "drafts relayed and scattered by the handler, length cap in the batch", relay
        return "B", "drafts relayed and scattered by the handler, no length cap in the batch", relay
    if relay or pending_drafts:
        return "A+relay", "A's handler with drafts relayed: a fork", relay
    if hasattr(pp, "current_platform"):
        return "A2", "handler relays no drafts", None
    return "A1", "handler relays no drafts, no platform special case", None


def _handler_problem(pp: Any) -> str | None:
    """Why this is no handler of a known shape, or None."""
    handler, pending = getattr(pp, "PPHandler", None), getattr(pp, "PendingRecv", None)
    mask = getattr(pp, "compute_need_sampled_mask", None)
    if handler is None or pending is None or mask is None:
        missing = [n for n in ("PPHandler", "PendingRecv", "compute_need_sampled_mask") if not hasattr(pp, n)]
        return f"pp_utils has no {' and no '.join(missing)}"
    lacking = [name for name in _PENDING if name not in _field_names(pending)]
    if lacking:
        return f"PendingRecv has no field {', '.join(lacking)}"
    expected = {
        "broadcast": ("sampled_token_ids", "num_sampled", "num_rejected", "input_batch"),
        "receive": ("input_batch",),
        "get_prev_sampled_outputs": (),
        "on_req_idx_freed": ("req_idx",),
    }
    for name, names in expected.items():
        problem = _signature_problem(f"PPHandler.{name}", inspect.getattr_static(handler, name, None), names)
        if problem:
            return problem
    return _signature_problem("compute_need_sampled_mask", mask, ("input_batch",), method=False)


def _relay_problem(relay: Any, name: str, variant: str) -> str | None:
    """Why the relay of drafts is of no known shape, or None."""
    parameters = _parameters(relay)[1:]
    expected = ("input_batch",) if variant in (*_TABLE_RELAYS, "A+relay") else ()
    if not parameters or parameters[0] not in _DRAFTS_NAMES or parameters[1 : 1 + len(expected)] != expected:
        wanted = ", ".join(("draft_tokens", *expected))
        return f"PPHandler.{name} takes ({', '.join(parameters)}), expected ({wanted})"
    return None


def _parts_problem(engine: Engine) -> str | None:
    for what, part in (
        ("GPUModelRunner", engine.runner),
        ("InputBatch", engine.batch),
        ("RequestState", engine.states),
    ):
        if part is None:
            return f"found no {what}"
    lacking = [name for name in _BATCH if name not in _field_names(engine.batch)]
    if lacking:
        return f"InputBatch has no field {', '.join(lacking)}"
    for name, wanted in _RUNNER.items():
        method = getattr(engine.runner, name, None)
        if method is None:
            return f"GPUModelRunner has no {name}"
        if not inspect.isroutine(method):
            return f"GPUModelRunner.{name} is a {type(method).__name__}, not a method"
        absent = [parameter for parameter in wanted if parameter not in _parameters(method)]
        if absent:
            return f"GPUModelRunner.{name} takes no {', '.join(absent)}"
    if "req_id" not in _parameters(getattr(engine.states, "add_request", lambda: None)):
        return "RequestState.add_request takes no req_id"
    return None


def _signature_problem(what: str, function: Any, names: Sequence[str], *, method: bool = True) -> str | None:
    """Why ``function`` cannot be called with ``names`` in this order, or None. Extra ones need a default."""
    if function is None:
        return f"found no {what}"
    if not callable(function):
        return f"{what} is a {type(function).__name__}, not a method"
    parameters = list(inspect.signature(function).parameters.values())[1 if method else 0 :]
    found = [parameter.name for parameter in parameters]
    if found[: len(names)] != list(names):
        return f"{what} takes ({', '.join(found)}), expected ({', '.join(names)})"
    known = ("recv_drafts",)
    extra = [p.name for p in parameters[len(names) :] if p.default is p.empty and p.name not in known]
    if extra:
        return f"{what} also requires {', '.join(extra)}"
    return None


def _refuse(variant: str, why: str) -> Finding:
    return Finding(variant, False, f"{why}; {WORKS_WITH}")


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # no function, or one that does not tell
        return ()


def _field_names(kind: Any) -> frozenset[str]:
    return (
        frozenset(field.name for field in dataclasses.fields(kind))
        if dataclasses.is_dataclass(kind)
        else frozenset()
    )


def _module(name: str) -> ModuleType | None:
    """A module of the V2 runner, None if there is none; one that is there but broken is not taken for absent."""
    full = f"{_PACKAGE}.{name}"
    try:
        return importlib.import_module(full)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{full}.".startswith(f"{error.name}."):
            return None
        raise UnknownShapeError(f"{full} cannot be imported ({one_line(error)})") from None
    except Exception as error:  # noqa: BLE001  # a broken installation can raise anything
        raise UnknownShapeError(f"{full} cannot be imported ({one_line(error)})") from None
