"""The doctor: what an installed vLLM would do, found without starting it.

Everything is found by looking at callables, or by running the small pure ones; nothing by version.
"""

import dis
import importlib
import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from stagewatch.agents.engines.vllm_mask import CASES, MaskVerdict, judge_mask
from stagewatch.agents.engines.vllm_variants import (
    Engine,
    Finding,
    UnknownShapeError,
    inspect_engine,
    load_engine,
)
from stagewatch.agents.errors import RingError, SettingsError, one_line
from stagewatch.agents.ringfile import HEADER_SIZE, check_room
from stagewatch.agents.settings import RING_DIR, ProbeSettings

__all__ = ["Examination", "UnknownShapeError", "arming", "cadence_of", "diagnose", "examine"]

Answer = Literal["yes", "no", "unknown"]
Verdict = Literal["sound", "exposed", "unknown"]

ENTRY_POINT_GROUP: Final = "vllm.general_plugins"
_ELIGIBLE: Final = "next_decode_eligible_step"


class CaseAnswer(msgspec.Struct, frozen=True):
    """One published mask case and what the engine's mask answered."""

    case: int
    since: str
    expected: tuple[bool, ...] | None
    found: tuple[bool, ...] | None
    passed: bool
    error: str


class Exposure(msgspec.Struct, frozen=True):
    """One way in which the engine can serve wrong text."""

    name: str
    answer: Answer
    """Whether the engine is open to it."""
    why: str


class Examination(msgspec.Struct, frozen=True):
    """What the doctor found."""

    verdict: Verdict
    why: str
    engine_version: str
    variant: str
    shape: str
    """How the variant was told, in words."""
    mask: str
    """``sound``, ``faulty`` or ``unknown``."""
    mask_why: str
    cases: tuple[CaseAnswer, ...]
    exposures: tuple[Exposure, ...]
    hooked: tuple[str, ...]
    not_hooked: tuple[str, ...]
    """What will not be watched, each with its reason."""
    arming: str
    """Whether a worker started in this environment would arm."""

    @property
    def status(self) -> int:
        """Exit status: 0 sound, 1 exposed, 2 unknown."""
        return {"sound": 0, "exposed": 1, "unknown": 2}[self.verdict]


def examine(*, plugins: bool = True, environment: Mapping[str, str] = os.environ) -> Examination:
    """Examine the vLLM of this environment, with its plugins applied as a worker would. Raises UnknownShapeError."""
    engine = load_engine()
    if plugins:
        try:
            importlib.import_module("vllm.plugins").load_general_plugins()
        except Exception as error:  # noqa: BLE001  # a stranger's plugin, which would end the engine, too
            raise UnknownShapeError(
                f"a plugin of the engine failed ({one_line(error)}): mend it, or look without plugins by --no-plugins"
            ) from None
    version = str(importlib.import_module("vllm").__version__)
    exposures = (_speculation(), _cadence())
    return diagnose(engine, version, exposures, arming(environment))


def diagnose(engine: Engine, version: str, exposures: tuple[Exposure, ...], arming: str) -> Examination:
    """Put together what is known about ``engine``."""
    finding = inspect_engine(engine)
    if finding.supported:
        mask = judge_mask(engine.pp_utils.compute_need_sampled_mask, refined=finding.refined)
        exposures = (_mask_exposure(mask), _relay_exposure(finding), *exposures)
    else:
        mask = MaskVerdict("unknown", "not run: the pipeline's shape is not known", ())
    verdict, why = _verdict(finding, mask, exposures)
    return Examination(
        verdict,
        why,
        version,
        finding.variant,
        finding.why,
        mask.verdict,
        mask.why,
        tuple(
            CaseAnswer(r.number, CASES[r.number - 1].since, r.expected, r.found, r.passed, r.error)
            for r in mask.results
        ),
        exposures,
        finding.hooks,
        _not_hooked(finding),
        arming,
    )


def _verdict(finding: Finding, mask: MaskVerdict, exposures: tuple[Exposure, ...]) -> tuple[Verdict, str]:
    if not finding.supported:
        return "unknown", finding.why
    if mask.verdict == "faulty":
        return "exposed", f"the broadcast mask {mask.why}"
    if mask.verdict == "unknown":
        return "unknown", f"the broadcast mask {mask.why}"
    relay = next(exposure for exposure in exposures if exposure.name == "drafts-not-relayed")
    if relay.answer == "yes":
        return "exposed", relay.why
    return "sound", "the broadcast mask is sound and drafts are relayed"


def _mask_exposure(mask: MaskVerdict) -> Exposure:
    answer: dict[str, Answer] = {"sound": "no", "faulty": "yes", "unknown": "unknown"}
    return Exposure("faulty-mask", answer[mask.verdict], mask.why)


def _relay_exposure(finding: Finding) -> Exposure:
    if finding.relay or finding.variant == "A+relay":
        return Exposure("drafts-not-relayed", "no", "the last stage relays its drafts to the others")
    why = "the handler has no way to relay drafts: earlier stages feed the drafts they do not have"
    return Exposure("drafts-not-relayed", "yes", why)


def _speculation() -> Exposure:
    """Whether a drafter can be booted beside pipeline stages at all."""
    name = "pipeline-with-speculation-reachable"
    try:
        parallel = importlib.import_module("vllm.config.parallel").ParallelConfig
        create = importlib.import_module(
            "vllm.config.speculative"
        ).SpeculativeConfig.create_draft_parallel_config
        draft = create(parallel(pipeline_parallel_size=2, distributed_executor_backend="mp"), 1)
        size = int(draft.pipeline_parallel_size)
    except Exception as error:  # noqa: BLE001  # a stranger's code: what it raises is the finding
        return Exposure(name, "unknown", f"the drafter's configuration cannot be made: {one_line(error)}")
    if size == 1:
        return Exposure(name, "yes", "drafters run on the last stage alone and boot beside pipeline stages")
    why = "drafters are asked to be pipelined themselves: refused at boot unless theirs can be or a fork lifts that"
    return Exposure(name, "no", why)


def _cadence() -> Exposure:
    """Whether ``--no-async-scheduling`` leaves a request's decodes without their spacing (vLLM issue 52071)."""
    name = "no-async-scheduling-cadence"
    try:
        package = "vllm.v1.core.sched"
        plain = importlib.import_module(f"{package}.scheduler").Scheduler
        asynchronous = importlib.import_module(f"{package}.async_scheduler").AsyncScheduler
    except Exception as error:  # noqa: BLE001  # a broken installation can raise anything
        return Exposure(name, "unknown", f"the schedulers cannot be inspected: {one_line(error)}")
    return cadence_of(plain, asynchronous)


def cadence_of(plain: type, asynchronous: type) -> Exposure:
    """The cadence exposure of two scheduler classes, told by which of them sets a request's next eligible step."""
    name = "no-async-scheduling-cadence"
    if _stores(plain, _ELIGIBLE):
        return Exposure(name, "no", "both schedulers space a request's decodes")
    if _stores(asynchronous, _ELIGIBLE):
        why = (
            "only the asynchronous scheduler spaces a request's decodes: never use --no-async-scheduling here"
        )
        return Exposure(name, "yes", why)
    return Exposure(name, "unknown", f"no scheduler sets {_ELIGIBLE}: how decodes are spaced is not known")


def _stores(kind: type, attribute: str) -> bool:
    functions = [value for value in vars(kind).values() if hasattr(value, "__code__")]
    return any(
        instruction.opname == "STORE_ATTR" and instruction.argval == attribute
        for function in functions
        for instruction in dis.get_instructions(function)
    )


def _not_hooked(finding: Finding) -> tuple[str, ...]:
    if not finding.supported:
        return (f"anything: {finding.why}",)
    found = [
        "sizes of hidden states at their receiver: only the sender knows them before the call",
        "collectives inside the model (tensor parallel): they are the engine's communicators' business",
    ]
    if finding.relay is None:
        found.append("a relay of drafts: this variant has none")
    return tuple(found)


def arming(environment: Mapping[str, str]) -> str:
    """Whether a worker started in ``environment`` would arm, and if not why."""
    declared = [point.name for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)]
    if "stagewatch" not in declared:
        return "no: the entry point is not installed here: pip install stagewatch in the engine's environment"
    allowed: Any = environment.get("VLLM_PLUGINS")
    if allowed is not None and "stagewatch" not in allowed.split(","):
        return f"no: VLLM_PLUGINS={allowed} leaves stagewatch out: add it"
    try:
        settings = ProbeSettings.from_environment(environment)
        if settings is None:
            return f"no: {RING_DIR} is not set"
        check_room(settings.ring_dir, HEADER_SIZE + settings.ring_bytes)
    except (SettingsError, RingError) as error:
        return f"no: {error}"
    if environment.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        return "no: VLLM_USE_V2_MODEL_RUNNER=0 asks for the V1 runner, which has no such broadcast"
    return "yes, where pipeline_parallel_size is above 1 and the V2 model runner is used"
