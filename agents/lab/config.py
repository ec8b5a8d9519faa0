"""What determines a run of the multi-process lab."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from typing import Self

import msgspec

from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.fault import Fault
from stagewatch.agents.lab.faults import make_fault
from stagewatch.agents.lab.runconfig import RunConfig
from stagewatch.agents.lab.scheduler import LabError
from stagewatch.agents.lab.workload import Workload
from stagewatch.agents.settings import ProbeSettings

_REQUESTS = Workload(requests=6, prompt_len=(8, 40), max_tokens=(16, 48), arrivals_per_iteration=0.5)


@dataclass(frozen=True, slots=True)
class LabConfig(RunConfig):
    """Everything about a run. The same config gives the same outputs, step by step."""

    workload: Workload = _REQUESTS
    probe: ProbeSettings | None = None
    """Where and how to record; None arms no probe."""
    vocab_size: int = 256
    layers: int = 12
    """A multiple of pp; 12 suits 1, 2, 3 and 4 stages."""
    context: float = 0.42
    step_sleep_ms: float = 0.0
    """Pause after each iteration: the demo's pace."""
    stream_every: int = 0
    """Iterations between reports of running requests' tokens; 0: only finished requests are reported."""
    collective_timeout_s: float = 120.0
    nodes: bool = False
    """Whether each stage is a node of its own: its rings lie in a directory of its own below the probe's."""
    instance: str = field(default_factory=lambda: f"lab-{token_hex(8)}")

    def check(self) -> Fault:
        """The fault to run with. Raises LabError or FaultError for a configuration that cannot run."""
        fault = make_fault(self.fault, self.sizes, self.spec_tokens)
        if fault.SIMULATOR_ONLY:
            raise LabError(f"fault {fault.NAME} can only be put into the simulator")
        if self.layers % self.pp:
            raise LabError(f"{self.layers} layers do not divide into {self.pp} stages: choose a multiple")
        if self.tp not in (1, 2):
            raise LabError(f"tp {self.tp}: the lab's model has two heads, so 1 or 2 ranks share a stage")
        return fault

    def probe_of(self, rank: Rank) -> ProbeSettings | None:
        """Where and how ``rank`` records."""
        if self.probe is None or not self.nodes:
            return self.probe
        return replace(self.probe, ring_dir=node_dir(self.probe.ring_dir, rank.pp))

    def encode(self) -> bytes:
        """As JSON, for the driver's stdin."""
        return msgspec.json.encode(self, enc_hook=str)

    @classmethod
    def decode(cls, encoded: bytes) -> Self:
        """The config of `encode`. Raises msgspec.DecodeError for anything else."""
        return msgspec.json.decode(encoded, type=cls, dec_hook=lambda kind, value: kind(value))


def node_dir(ring_dir: Path, stage: int) -> Path:
    """Directory of the rings of a stage that is a node of its own."""
    return ring_dir / f"stage{stage}"
