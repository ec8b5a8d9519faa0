"""What a run of the lab and one of the simulator have in common."""

from dataclasses import dataclass

from stagewatch.agents.identity import Sizes
from stagewatch.agents.lab.fault import Plan
from stagewatch.agents.lab.scheduler import SchedulerConfig
from stagewatch.agents.lab.stage import StageConfig


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The engine's shape and its schedulers' limits. Lengths and budgets in tokens."""

    seed: int = 0
    pp: int = 2
    tp: int = 1
    spec_tokens: int = 7
    """K: draft tokens per row; 0 runs without speculation."""
    fault: Plan | None = None
    seats: int = 16
    """Most requests running at once, per replica."""
    token_budget: int = 128
    chunk_max: int = 32
    max_model_len: int = 192
    blocks: int = 0
    preempt_probability: float = 0.0
    variable_spec: bool = False
    variable_width: bool = False
    refined_mask: bool = True

    @property
    def sizes(self) -> Sizes:
        """Extents of the parallel dimensions."""
        return Sizes(1, self.pp, self.tp)

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
