"""The simulator: the lab's engine in one process, deterministic, fast enough for millions of request-steps.

All ranks of a pipeline are one block, so that a step of any number of ranks costs the same few numpy calls. Data-
parallel replicas are independent pipelines that meet in one collective per iteration. A request-step is one row of one
step's batch, however many ranks compute it. `SimConfig.line` reproduces a run.
"""

import gc
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Final

import msgspec
import numpy as np

from stagewatch.agents.engines.lab import LabRecorder, ProbeLike
from stagewatch.agents.identity import Fingerprint, Identity, Rank, Sizes
from stagewatch.agents.lab.collectives import entered, step_calls
from stagewatch.agents.lab.fault import Call, Injection, Plan
from stagewatch.agents.lab.faults import make_fault
from stagewatch.agents.lab.integer_model import IntegerModel, Vocabulary
from stagewatch.agents.lab.messages import Output, StepResult
from stagewatch.agents.lab.recording import MemoryProbe
from stagewatch.agents.lab.scheduler import Scheduler, SchedulerConfig
from stagewatch.agents.lab.stage import Block, StageConfig
from stagewatch.agents.lab.workload import Workload
from stagewatch.agents.record import Record


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


@dataclass(slots=True)
class _Replica:
    scheduler: Scheduler
    block: Block
    model: IntegerModel
    probes: list[ProbeLike]
    rng: np.random.Generator
    results: deque[StepResult | None] = field(default_factory=deque)
    drained: int = 0


class Simulator:
    """Runs a `SimConfig`.

    ``probes`` may map each rank to a probe of the caller's, real ones with rings included;
    without it records are kept in memory and handed out by `iterate` and `run`. ``record=False`` records nothing.
    """

    def __init__(
        self, config: SimConfig, *, probes: dict[Rank, ProbeLike] | None = None, record: bool = True
    ) -> None:
        self.config: Final = config
        self.sizes: Final = Sizes(config.dp, config.pp, config.tp)
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

    def _make_replica(self, dp: int, probes: dict[Rank, ProbeLike] | None, record: bool) -> _Replica:
        config = self.config
        ranks = tuple(Rank(dp, pp, tp) for pp in range(config.pp) for tp in range(config.tp))
        own: list[ProbeLike] = []
        if probes is not None:
            own = [probes[rank] for rank in ranks]
        elif record:
            for rank in ranks:
                self._own[rank] = MemoryProbe(config.seats, self._keys)
                own.append(self._own[rank])
        stage_config = StageConfig(
            sizes=self.sizes,
            spec_tokens=config.spec_tokens,
            slots=config.seats,
            handles=config.seats,
            length_max=config.max_model_len,
            variable_width=config.variable_width,
            refined_mask=config.refined_mask,
            shuffle_seed=config.seed if config.shuffle_slots else None,
        )
        recorder = LabRecorder(own, ranks, config.pp) if own else None
        block = Block(stage_config, ranks, self.fault, recorder)
        scheduler_config = SchedulerConfig(
            pp=config.pp,
            spec_tokens=config.spec_tokens,
            seats=config.seats,
            token_budget=config.token_budget,
            chunk_max=config.chunk_max,
            max_model_len=config.max_model_len,
            blocks=config.blocks,
            preempt_probability=config.preempt_probability,
            variable_spec=config.variable_spec,
            seed=config.seed,
        )
        prefix = f"dp{dp}-" if config.dp > 1 else ""
        requests = config.workload.draw(config.seed + 7919 * dp, config.vocab_size, prefix)
        scheduler = Scheduler(scheduler_config, requests, self.fault, replica=dp)
        model = IntegerModel(block, self._vocabulary, config.layers or config.pp)
        return _Replica(scheduler, block, model, own, np.random.default_rng([config.seed, dp, 0xEA]))

    def _finished(self) -> bool:
        # Ranks go on for pp_size iterations after the last request, and consume what they still hold.
        return bool(self.wedged) or all(replica.drained > self.config.pp for replica in self._replicas)

    def _iterate(self) -> None:
        batches = [self._begin(replica) for replica in self._replicas]
        busy = any(batches)
        for replica, has_batch in zip(self._replicas, batches, strict=True):
            if has_batch:
                self._execute(replica)
            else:
                replica.results.append(None)
        if self.config.dp > 1 and busy and not self.wedged:
            self._meet(batches)
        for replica in self._replicas:
            self._return_results(replica)

    def _begin(self, replica: _Replica) -> bool:
        scheduler = replica.scheduler
        replica.drained = replica.drained + 1 if scheduler.idle else 0
        order = scheduler.schedule()
        batch = replica.block.begin(order)
        for request in order.new:
            replica.model.load_prefix(request)
        return batch is not None

    def _execute(self, replica: _Replica) -> None:
        block = replica.block
        batch = block.batch
        if batch is None:
            return
        if not self._enter(replica):
            return
        sampled = block.verify(batch, replica.model.forward(batch), self._vocabulary.chain)
        broadcasts = len(block.earlier) and bool(block.broadcasts.any())
        received = block.send(batch, sampled).take(self._senders(block)) if broadcasts else None
        block.receive(batch, received)
        replica.results.append(block.result(sampled))

    def _senders(self, block: Block) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """Position among the last stage's ranks of each earlier rank's sender: the one of its own tp."""
        return np.array([block.ranks[i].tp for i in block.earlier], np.int64)

    def _enter(self, replica: _Replica) -> bool:
        """Record the step's calls; False if the ranks stay in them for ever."""
        block, batch = replica.block, replica.block.batch
        if batch is None or block.recorder is None:
            return True
        width, drafts = block.width_sent(batch), block.drafts_sent(batch)
        broadcasts = block.broadcasts.tolist()
        suspect = len(set(broadcasts)) > 1
        plain: dict[tuple[int, bool], list[Call]] = {}
        calls: list[list[Call]] = []
        for i, rank in enumerate(block.ranks):
            key = rank.pp, broadcasts[i]
            if key not in plain:
                plain[key] = step_calls(
                    rank, self.sizes, batch, width, drafts, self.config.vocab_size, broadcasts=broadcasts[i]
                )
            calls.append(self.fault.calls(block, i, plain[key]))
            suspect = suspect or calls[i] is not plain[key]
        complete = True
        if suspect:
            calls, complete = entered(block.ranks, calls)
        for i, own in enumerate(calls):
            for call in own:
                replica.probes[i].collective(call.group, call.op, call.dtype, call.numel, call.group_size)
        if not complete:
            self.wedged = f"step {block.step}: " + "; ".join(
                f"{rank} in {own[-1].group} {own[-1].op} of {own[-1].numel}" if own else f"{rank} in none"
                for rank, own in zip(block.ranks, calls, strict=True)
            )
        return complete

    def _meet(self, batches: list[bool]) -> None:
        """The collective in which replicas tell whether they have work; idle ones run a dummy batch for it."""
        for replica, has_batch in zip(self._replicas, batches, strict=True):
            if not has_batch and self.fault.skips_dummy(replica.block):
                self.wedged = f"replica {replica.block.ranks[0].dp} left out its dummy batch"
                continue
            for probe in replica.probes:
                probe.collective("dp", "all_reduce", "int32", self.config.dp, self.config.dp)

    def _return_results(self, replica: _Replica) -> None:
        scheduler = replica.scheduler
        keep = self.config.pp
        if self.config.early_results and replica.rng.random() < self.config.early_results:
            keep = max(keep - 1, 0)
        if scheduler.idle:
            keep = 0
        while len(replica.results) > keep:
            scheduler.update(replica.results.popleft())
        for output in scheduler.take_outputs():
            self.outputs[output.request_id] = output


BASE_FINGERPRINTS: Final = (Fingerprint("model", "lab"), Fingerprint("drafter_layout", "embedding tied"))


def lab_identity(
    rank: Rank,
    sizes: Sizes,
    *,
    deployment: str,
    instance: str,
    spec_tokens: int,
    vocab_size: int,
    max_model_len: int,
    config: tuple[Fingerprint, ...] = BASE_FINGERPRINTS,
    host: str = "lab",
    pid: int = 0,
    started_ns: int = 0,
) -> Identity:
    """Identity of a lab rank."""
    return Identity(
        deployment,
        instance,
        rank,
        sizes,
        host,
        pid,
        "lab",
        version("stagewatch"),
        "lab",
        spec_tokens,
        vocab_size,
        max_model_len,
        started_ns,
        config,
    )
