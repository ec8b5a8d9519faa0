"""The simulator: the lab's engine in one process, deterministic, fast enough for millions of request-steps.

All ranks of a pipeline are one block, so that a step of any number of ranks costs the same few numpy calls. Data-
parallel replicas are independent pipelines that meet in one collective per iteration. A request-step is one row of one
step's batch, however many ranks compute it. `SimConfig.line` reproduces a run.
"""

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from stagewatch.agents.engines.lab import ProbeLike
from stagewatch.agents.identity import Identity, Rank, Sizes
from stagewatch.agents.lab.fault import Injection
from stagewatch.agents.lab.faults import make_fault
from stagewatch.agents.lab.identities import BASE_FINGERPRINTS, lab_identity
from stagewatch.agents.lab.integer_model import Vocabulary
from stagewatch.agents.lab.messages import Output
from stagewatch.agents.lab.recording import MemoryProbe
from stagewatch.agents.lab.replica import Replica
from stagewatch.agents.lab.simconfig import SimConfig
from stagewatch.agents.record import Record

__all__ = ["SimConfig", "SimResult", "Simulator"]


@dataclass(slots=True)
class SimResult:
    """A whole run."""

    records: dict[Rank, list[Record]]
    outputs: dict[str, Output]
    """Finished requests, by id; ids of replica n begin with ``dpn-`` where dp > 1."""
    injections: list[Injection]
    wedged: str
    """What the ranks wait for, for ever; empty if the run came to its end."""
    request_steps: int
    steps: int
    """Batches executed, all replicas together."""
    preemptions: int
    seconds: float


class Simulator:
    """Runs a `SimConfig`.

    ``probes`` may map each rank to a probe of the caller's, real ones with rings included;
    without it records are kept in memory and handed out by `iterate` and `run`. ``record=False`` records nothing.
    """

    def __init__(
        self, config: SimConfig, *, probes: dict[Rank, ProbeLike] | None = None, record: bool = True
    ) -> None:
        self.config: Final = config
        self.sizes: Final[Sizes] = config.sizes
        self.fault = make_fault(config.fault, self.sizes, config.spec_tokens)
        self.outputs: dict[str, Output] = {}
        self.wedged = ""
        self._keys: dict[str, int] = {}
        self._own: dict[Rank, MemoryProbe] = {}
        self._vocabulary = Vocabulary(config.vocab_size, config.spec_tokens, config.seed, stops=config.stops)
        self._replicas = [self._make_replica(dp, probes, record) for dp in range(config.dp)]

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """All ranks, by dp, pp, tp."""
        return tuple(rank for replica in self._replicas for rank in replica.block.ranks)

    @property
    def request_steps(self) -> int:
        """Batch rows executed so far."""
        return sum(replica.scheduler.rows_scheduled for replica in self._replicas)

    def identities(self, deployment: str = "simulated") -> dict[Rank, Identity]:
        """What each rank would say of itself in its ring's header."""
        config = self.config
        return {
            rank: lab_identity(
                rank,
                self.sizes,
                deployment=deployment,
                instance=f"sim-{config.seed}",
                spec_tokens=config.spec_tokens,
                vocab_size=config.vocab_size,
                max_model_len=config.max_model_len,
                config=self.fault.fingerprints(rank, BASE_FINGERPRINTS, self.sizes),
            )
            for rank in self.ranks
        }

    def iterate(self) -> Iterator[dict[Rank, list[Record]]]:
        """Run, one iteration of every replica at a time; yield the records made, per rank (none with own probes)."""
        while not self._finished():
            self._iterate()
            yield {rank: probe.take() for rank, probe in self._own.items()}

    def run(self, request_steps_max: int | None = None) -> SimResult:
        """Run to the end, or until ``request_steps_max`` rows were executed, and return everything."""
        records: dict[Rank, list[Record]] = {rank: [] for rank in self._own}
        began = time.perf_counter()
        # Records form no cycles, and a collector that walks all of them again and again takes most of the time.
        collecting = gc.isenabled()
        gc.disable()
        try:
            while not self._finished():
                self._iterate()
                if request_steps_max is not None and self.request_steps >= request_steps_max:
                    break
        finally:
            if collecting:
                gc.enable()
        seconds = time.perf_counter() - began
        for rank, probe in self._own.items():
            records[rank] = probe.take()
        return SimResult(
            records,
            self.outputs,
            self.fault.injections,
            self.wedged,
            self.request_steps,
            sum(replica.block.step for replica in self._replicas),
            sum(replica.scheduler.preemptions for replica in self._replicas),
            seconds,
        )

    # ---- inside

    def _make_replica(self, dp: int, probes: dict[Rank, ProbeLike] | None, record: bool) -> Replica:
        config = self.config
        ranks = tuple(Rank(dp, pp, tp) for pp in range(config.pp) for tp in range(config.tp))
        own: list[ProbeLike] = []
        if probes is not None:
            own = [probes[rank] for rank in ranks]
        elif record:
            for rank in ranks:
                self._own[rank] = MemoryProbe(config.seats, self._keys)
                own.append(self._own[rank])
        return Replica(config, ranks, own, self.fault, self._vocabulary)

    def _finished(self) -> bool:
        # Ranks go on for pp_size iterations after the last request, and consume what they still hold.
        return bool(self.wedged) or all(replica.drained > self.config.pp for replica in self._replicas)

    def _iterate(self) -> None:
        batches = [replica.begin() for replica in self._replicas]
        for replica in self._replicas:
            replica.execute()
            self.wedged = replica.wedged or self.wedged
        if self.config.dp > 1 and any(batches) and not self.wedged:
            self._meet(batches)
        for replica in self._replicas:
            for output in replica.return_results():
                self.outputs[output.request_id] = output

    def _meet(self, batches: list[bool]) -> None:
        """The collective in which replicas tell whether they have work; idle ones run a dummy batch for it."""
        for replica, has_batch in zip(self._replicas, batches, strict=True):
            if not has_batch and self.fault.skips_dummy(replica.block):
                self.wedged = f"replica {replica.block.ranks[0].dp} left out its dummy batch"
            else:
                replica.meet()
