"""A rank of a stand-in engine, armed as a worker would be."""

from pathlib import Path

from standins import Pipeline, Rank

from stagewatch.agents.engines.staging import HostStaging
from stagewatch.agents.engines.vllm_hooks import RankHooks
from stagewatch.agents.engines.vllm_variants import inspect_engine
from stagewatch.agents.identity import Identity, Sizes
from stagewatch.agents.identity import Rank as Coordinates
from stagewatch.agents.probe import Probe
from stagewatch.agents.record import Record
from stagewatch.agents.ring import RingReader, RingWriter

CAPACITY = 1 << 22


class Watched:
    """A stand-in pipeline with a probe on each stage."""

    def __init__(self, variant: str, directory: Path, drafts: int, budget_share: float = 0.0) -> None:
        self.pipeline = Pipeline(variant, drafts)
        self.probes: list[Probe] = []
        self.hooks: list[RankHooks] = []
        self._paths: list[Path] = []
        for stage, rank in enumerate(self.pipeline.ranks):
            probe, path = make_probe(directory, variant, stage, drafts, budget_share)
            hooks = hooks_of(rank, probe)
            hooks.install()
            self.probes.append(probe)
            self.hooks.append(hooks)
            self._paths.append(path)

    def records(self, stage: int) -> list[Record]:
        """All that a stage recorded."""
        return list(RingReader(self._paths[stage]).read(1 << 20))


def make_probe(
    directory: Path, variant: str, stage: int, drafts: int, budget_share: float = 0.0
) -> tuple[Probe, Path]:
    """A probe with a ring of its own."""
    identity = Identity(
        "test",
        "life",
        Coordinates(0, stage, 0),
        Sizes(1, 2, 1),
        "host",
        1,
        "vllm",
        "0",
        variant,
        drafts,
        211,
        64,
        1,
    )
    ring = RingWriter(directory, identity, CAPACITY)
    return Probe(ring, identity, heartbeat_s=3600, budget_share=budget_share), ring.path


def hooks_of(rank: Rank, probe: Probe) -> RankHooks:
    """Hooks for a stand-in rank."""
    return RankHooks(
        probe,
        inspect_engine(rank.engine),
        HostStaging(),
        runner=rank.runner,
        pp_utils=rank.pp_utils,
        distributed=rank.distributed,
        pp_group=rank.pp_group,
    )
