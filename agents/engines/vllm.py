"""vLLM's adapter: from the plugin call to an armed worker.

vLLM calls its plugins in every process it starts, long before a worker knows its rank. So `install` only
wraps one method of the worker's wrapper, and everything else happens in the worker itself, after its model
is loaded: the rank is known, every other plugin has done its patching, and no request has been served. A
ring is never made before that, so it is never inherited through a fork.
"""

import functools
import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from stagewatch.agents.arming import arm
from stagewatch.agents.engines.staging import staging_for
from stagewatch.agents.engines.vllm_hooks import RankHooks
from stagewatch.agents.engines.vllm_hotfix import Hotfix, ballot_of
from stagewatch.agents.engines.vllm_identity import identity_of, instance_of
from stagewatch.agents.engines.vllm_variants import WORKS_WITH, inspect_engine, load_engine, missing_parts
from stagewatch.agents.errors import StagewatchError, one_line
from stagewatch.agents.probe import Probe
from stagewatch.agents.settings import ProbeSettings

log = logging.getLogger("stagewatch")

_MARK: Final = "_stagewatch_installed"
_QUIET_METHODS: Final = ("determine_available_memory", "compile_or_warm_up_model")
"""Worker methods that run batches of no request."""


def install() -> None:
    """Arrange that this process's worker, if it starts one, arms itself. Harmless when called again."""
    try:
        wrapper = importlib.import_module("vllm.v1.worker.worker_base").WorkerWrapperBase
        original = wrapper.init_device
    except Exception as error:  # noqa: BLE001  # a broken engine fails by itself, and says so better
        log.warning(
            "stagewatch: not armed: this vLLM has no worker to watch (%s); %s.", one_line(error), WORKS_WITH
        )
        return
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def init_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        _guarded(_watch_loading, self)
        return result

    setattr(init_device, _MARK, True)
    wrapper.init_device = init_device


def _watch_loading(wrapper: Any) -> None:
    """Arm the worker in ``wrapper`` once its model is loaded."""
    worker = wrapper.worker
    original = worker.load_model

    @functools.wraps(original)
    def load_model(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if getattr(worker, "__dict__", {}).get("load_model") is load_model:  # else somebody wrapped it since
            del worker.load_model
        if not loaded:
            loaded.append(True)
            _guarded(arm_worker, worker)
        return result

    loaded: list[bool] = []
    worker.load_model = load_model


def _guarded(action: Callable[[Any], object], worker: Any) -> None:
    try:
        action(worker)
    except StagewatchError as error:
        log.warning("stagewatch: not armed: %s. The engine is not affected.", error)
    except Exception as error:  # noqa: BLE001  # whatever it is, it must not reach the engine
        log.warning("stagewatch: not armed: %s. The engine is not affected.", one_line(error))


def arm_worker(worker: Any) -> RankHooks | None:
    """Arm a worker whose model is loaded; None, with one line in the log, where there is nothing to watch.

    Raises StagewatchError for a bad setting or a ring that cannot be made.
    """
    settings = ProbeSettings.from_environment()
    if settings is None:
        return None
    config = worker.vllm_config
    if config.parallel_config.pipeline_parallel_size == 1:
        if worker.rank == 0:
            log.warning("stagewatch: not armed: pipeline_parallel_size is 1, there are no stages to compare.")
        return None
    runner = worker.model_runner
    engine = load_engine()
    finding = inspect_engine(engine)
    if finding.supported and (engine.runner is None or not isinstance(runner, engine.runner)):
        log.warning(
            "stagewatch: not armed: found the runner %s.%s, not the V2 model runner; %s.",
            type(runner).__module__,
            type(runner).__qualname__,
            WORKS_WITH,
        )
        return None
    if not finding.supported:
        log.warning("stagewatch: not armed: %s.", finding.why)
        return None
    lacking = missing_parts(runner)
    if lacking:
        log.warning("stagewatch: not armed: %s.", lacking)
        return None
    return _arm(worker, runner, engine.pp_utils, finding, settings)


def _arm(worker: Any, runner: Any, pp_utils: Any, finding: Any, settings: ProbeSettings) -> RankHooks:
    parallel_state = importlib.import_module("vllm.distributed.parallel_state")
    distributed = importlib.import_module("torch.distributed")
    config = worker.vllm_config
    instance = instance_of(config, lambda: ballot_of(distributed).store)
    identity = identity_of(
        config, runner, finding, parallel_state, deployment=settings.deployment, instance=instance
    )
    probe = arm(identity, settings)
    hooks: RankHooks | None = None
    try:
        states = runner.req_states
        values_max = runner.max_num_reqs * (2 * states.draft_tokens.shape[1] + 8) + 2 * runner.max_num_tokens
        staging = staging_for(runner.device, values_max, probe.dropped)
        hooks = RankHooks(
            probe,
            finding,
            staging,
            runner=runner,
            pp_utils=pp_utils,
            distributed=distributed,
            pp_group=parallel_state.get_pp_group(),
        )
        if settings.fixed_mask:
            Hotfix(runner, pp_utils, finding, probe.note).prepare(lambda: ballot_of(distributed))
        hooks.install()
        _quieten(worker, hooks)
        _close_with(worker, probe)
    except Exception as error:
        probe.disarm(f"arming failed: {one_line(error)}")
        if hooks is not None:
            hooks.remove()
        raise
    _Timer(probe, staging.poll, hooks.remove, settings.heartbeat_s).start()
    probe.heartbeat()
    log.warning(
        "stagewatch: rank %s armed, vLLM %s, variant %s.",
        identity.rank,
        identity.engine_version,
        finding.variant,
    )
    return hooks


def _quieten(worker: Any, hooks: RankHooks) -> None:
    """Record nothing while ``worker`` profiles or warms up."""
    for name in _QUIET_METHODS:
        original = getattr(worker, name, None)
        if original is None:
            continue

        def quiet(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            hooks.suspended = True
            try:
                return _original(*args, **kwargs)
            finally:
                hooks.suspended = False

        setattr(worker, name, functools.wraps(original)(quiet))


def _close_with(worker: Any, probe: Probe) -> None:
    """Mark the ring as complete where the engine shuts ``worker`` down in good order."""
    shutdown = getattr(worker, "shutdown", None)
    if shutdown is None:
        return

    @functools.wraps(shutdown)
    def closing(*args: Any, **kwargs: Any) -> Any:
        if probe.armed:
            probe.close()
        return shutdown(*args, **kwargs)

    worker.shutdown = closing


class _Timer(threading.Thread):
    """Writes heartbeats while the engine is idle, and publishes the last copies of a burst.

    Calls ``disarmed`` when the probe has taken itself out, so that a disarmed rank carries no wrapper.
    """

    def __init__(
        self, probe: Probe, poll: Callable[[], None], disarmed: Callable[[], None], every_s: float
    ) -> None:
        super().__init__(name="stagewatch-heartbeat", daemon=True)
        self._probe, self._poll, self._disarmed, self._every_s = probe, poll, disarmed, every_s
        self._never = threading.Event()

    def run(self) -> None:
        """Beat until the probe is disarmed or the process ends."""
        while self._probe.armed:
            self._never.wait(self._every_s)
            try:
                self._poll()
            except Exception as error:  # noqa: BLE001  # a daemon must not die with a traceback in the engine's log
                self._probe.disarm(f"publishing failed: {one_line(error)}")
            self._probe.heartbeat()
        self._probe.report()
        self._disarmed()
