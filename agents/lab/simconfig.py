"""What determines a run of the simulator, down to the last token."""

from dataclasses import dataclass, field

import msgspec

from stagewatch.agents.identity import Sizes
from stagewatch.agents.lab.fault import Plan
from stagewatch.agents.lab.scheduler import SchedulerConfig
from stagewatch.agents.lab.stage import StageConfig
from stagewatch.agents.lab.workload import Workload


@dataclass(frozen=True, slots=True)
class SimConfig:
    """Everything that determines a run."""

    seed: int = 0
    pp: int = 2
    tp: int = 1
    dp: int = 1
    spec_tokens: int = 7
    """K: draft tokens per row."""
    workload: Workload = field(default_factory=Workload)
    seats: int = 32
    """Most requests running at once, per replica."""
    token_budget: int = 512
    chunk_max: int = 64
    max_model_len: int = 320
    blocks: int = 0
    preempt_probability: float = 0.0
    variable_spec: bool = False
    variable_width: bool = False
    shuffle_slots: bool = False
    """Let every rank hand out slots in an order of its own."""
    early_results: float = 0.0
    """Chance per iteration that one more result returns before it must."""
    refined_mask: bool = True
    stops: bool = True
    """Let the model end requests before their length."""
    vocab_size: int = 1024
    layers: int = 0
    """Layers of the model, a multiple of pp; 0: one per stage. A reference with pp=1 names the pipeline's pp here."""
    fault: Plan | None = None

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
    def line(self) -> str:
        """One line that reproduces the run, given the same commit."""
        return f"python -m stagewatch.agents.lab simulate --config '{msgspec.json.encode(self).decode()}'"

    @property
    def sizes(self) -> Sizes:
        """Extents of the parallel dimensions."""
        return Sizes(self.dp, self.pp, self.tp)

    def stage_config(self) -> StageConfig:
        """The stages' part."""
        return StageConfig(
            sizes=self.sizes,
            spec_tokens=self.spec_tokens,
            slots=self.seats,
            handles=self.seats,
            length_max=self.max_model_len,
            variable_width=self.variable_width,
            refined_mask=self.refined_mask,
            shuffle_seed=self.seed if self.shuffle_slots else None,
        )

    def scheduler_config(self) -> SchedulerConfig:
        """The schedulers' part."""
        return SchedulerConfig(
            pp=self.pp,
            spec_tokens=self.spec_tokens,
            seats=self.seats,
            token_budget=self.token_budget,
            chunk_max=self.chunk_max,
            max_model_len=self.max_model_len,
            blocks=self.blocks,
            preempt_probability=self.preempt_probability,
            variable_spec=self.variable_spec,
            seed=self.seed,
        )
