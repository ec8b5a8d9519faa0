"""What determines a run of the simulator, down to the last token."""

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from stagewatch.agents.identity import Sizes
from stagewatch.agents.lab.runconfig import RunConfig
from stagewatch.agents.lab.scheduler import LabError
from stagewatch.agents.lab.stage import StageConfig
from stagewatch.agents.lab.workload import Workload


@dataclass(frozen=True, slots=True)
class SimConfig(RunConfig):
    """Everything that determines a run."""

    dp: int = 1
    workload: Workload = field(default_factory=Workload)
    seats: int = 32
    token_budget: int = 512
    chunk_max: int = 64
    max_model_len: int = 320
    shuffle_slots: bool = False
    """Let every rank hand out slots in an order of its own."""
    early_results: float = 0.0
    """Chance per iteration that one more result returns before it must."""
    stops: bool = True
    """Let the model end requests before their length."""
    vocab_size: int = 1024
    layers: int = 0
    """Layers of the model, a multiple of pp; 0: one per stage. A reference with pp=1 names the pipeline's pp here."""

    @classmethod
    def benign(
        cls,
        seed: int,
        *,
        pp: int = 3,
        tp: int = 1,
        dp: int = 1,
        spec_tokens: int = 5,
        requests: int = 200,
        seats: int = 32,
    ) -> "SimConfig":
        """Every legitimate event at once: aborts, bursts, preemption, chunks, variable K, streaming input.

        Load, budgets and cache grow with ``seats``; 512 of them make a run several times as fast per row.
        """
        workload = Workload(
            requests=requests,
            arrivals_per_iteration=seats / 32,
            burst_every=40,
            abort_probability=0.15,
            cached_probability=0.15,
            remote_probability=0.1,
            streaming_probability=0.1,
        )
        return cls(
            seed=seed,
            pp=pp,
            tp=tp,
            dp=dp,
            spec_tokens=spec_tokens,
            workload=workload,
            seats=seats,
            chunk_max=32,
            token_budget=8 * seats,
            blocks=6 * seats + 8,
            preempt_probability=0.02,
            variable_spec=True,
            variable_width=True,
            shuffle_slots=True,
            early_results=0.1,
            max_model_len=512,
        )

    @property
    def text(self) -> str:
        """All in which the run differs from a benign one, as JSON: what `decode` makes the config of again."""
        rest = differing(msgspec.to_builtins(self), msgspec.to_builtins(SimConfig.benign(self.seed)))
        return msgspec.json.encode({"seed": self.seed, **rest}).decode()

    @property
    def line(self) -> str:
        """One line that reproduces the run, given the same commit."""
        return f"python -m stagewatch.agents.lab simulate --benign --config '{self.text}'"

    @classmethod
    def decode(cls, text: str, *, benign: bool) -> "SimConfig":
        """The config of a JSON object, which need only hold what is not as in a benign run, or in a plain one.

        Raises LabError for anything else.
        """
        try:
            given = msgspec.json.decode(text, type=dict[str, Any])
            base = cls.benign(0) if benign else cls()
            return msgspec.convert(merged(msgspec.to_builtins(base), given), cls)
        except msgspec.MsgspecError as error:
            raise LabError(f"--config is no simulator configuration: {error}") from None

    @property
    def sizes(self) -> Sizes:
        """Extents of the parallel dimensions."""
        return Sizes(self.dp, self.pp, self.tp)

    def stage_config(self) -> StageConfig:
        """The stages' part."""
        shuffle_seed = self.seed if self.shuffle_slots else None
        return replace(RunConfig.stage_config(self), shuffle_seed=shuffle_seed)


def differing(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What of ``one`` is not as in ``other``, at any depth."""
    return {
        name: differing(value, other[name])
        if isinstance(value, dict) and isinstance(other[name], dict)
        else value
        for name, value in one.items()
        if value != other[name]
    }


def merged(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """``base`` with what is ``given`` in its place, at any depth."""
    return base | {
        name: merged(base[name], value)
        if isinstance(value, dict) and isinstance(base.get(name), dict)
        else value
        for name, value in given.items()
    }
