"""One data-parallel replica of the simulator: a scheduler, the block of all its ranks, and the model between them."""

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from stagewatch.agents.engines.lab import LabRecorder, ProbeLike
from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.collectives import entered, step_calls
from stagewatch.agents.lab.fault import Call, Fault
from stagewatch.agents.lab.integer_model import IntegerModel, Vocabulary
from stagewatch.agents.lab.messages import I64, Output, StepResult
from stagewatch.agents.lab.recording import MemoryProbe, record_calls
from stagewatch.agents.lab.scheduler import Scheduler
from stagewatch.agents.lab.simconfig import SimConfig
from stagewatch.agents.lab.stage import Block


class Replica:
    """Runs one iteration at a time: `begin`, then `execute` where there is a batch, then `return_results`.

    ``probes`` follow ``ranks``, which are ordered by pp and tp; without them nothing is recorded.
    """

    def __init__(
        self,
        config: SimConfig,
        ranks: tuple[Rank, ...],
        probes: Sequence[ProbeLike],
        fault: Fault,
        vocabulary: Vocabulary,
    ) -> None:
        dp = ranks[0].dp
        self.config: Final = config
        self.probes: Final = probes
        self.fault: Final = fault
        self.wedged = ""
        """What the ranks wait for, for ever; empty while they go on."""
        self.drained = 0
        """Iterations since the last request left."""
        recorder = LabRecorder(probes, ranks, config.pp) if probes else None
        self.block: Final = Block(config.stage_config(), ranks, fault, recorder)
        prefix = f"dp{dp}-" if config.dp > 1 else ""
        requests = config.workload.draw(config.seed + 7919 * dp, config.vocab_size, prefix)
        self.scheduler: Final = Scheduler(config.scheduler_config(), requests, fault, replica=dp)
        self._vocabulary = vocabulary
        self._model = IntegerModel(self.block, vocabulary, config.layers or config.pp)
        self._rng = np.random.default_rng([config.seed, dp, 0xEA])
        self._results: deque[StepResult | None] = deque()
        self._senders: I64 = np.array([ranks[i].tp for i in self.block.earlier], np.int64)
        """Position among the last stage's ranks of each earlier rank's sender: the one of its own tp."""
        self._memory = [probe for probe in probes if isinstance(probe, MemoryProbe)]

    def begin(self) -> bool:
        """Schedule and prepare an iteration; False if it has no batch."""
        self.drained = self.drained + 1 if self.scheduler.idle else 0
        order = self.scheduler.schedule()
        batch = self.block.begin(order)
        self._model.load_prefixes(order.new)
        return batch is not None

    def execute(self) -> None:
        """Run the prepared batch through all stages and pass on what was sampled, unless the ranks get stuck."""
        block = self.block
        batch = block.batch
        if batch is None:
            self._results.append(None)
            return
        if not self._enter():
            return
        sampled = block.verify(batch, self._model.forward(batch), self._vocabulary.chain)
        broadcasts = len(block.earlier) and bool(block.broadcasts.any())
        block.receive(batch, block.send(batch, sampled).take(self._senders) if broadcasts else None)
        self._results.append(block.result(sampled))

    def meet(self) -> None:
        """Enter the collective in which replicas tell whether they have work."""
        dp = self.config.dp
        calls = [Call("dp", "all_reduce", "int32", dp, dp)]
        self._record([calls] * len(self.probes))

    def return_results(self) -> list[Output]:
        """Hand results back to the scheduler, as late as may be; what it finished by that."""
        scheduler, config = self.scheduler, self.config
        keep = config.pp
        if config.early_results and self._rng.random() < config.early_results:
            keep = max(keep - 1, 0)
        if scheduler.idle:
            keep = 0
        while len(self._results) > keep:
            scheduler.update(self._results.popleft())
        return scheduler.take_outputs()

    def _enter(self) -> bool:
        """Record the step's calls; False if the ranks stay in them for ever."""
        block, batch = self.block, self.block.batch
        if batch is None or block.recorder is None:
            return True
        width, drafts = block.width_sent(batch), block.drafts_sent(batch)
        broadcasts = block.broadcasts.tolist()
        suspect = len(set(broadcasts)) > 1
        plain: dict[tuple[int, bool], list[Call]] = {}
        calls: list[list[Call]] = []
        sizes, last = block.config.sizes, block.config.sizes.pp - 1
        for i, rank in enumerate(block.ranks):
            # Stages between the first and the last make the same calls.
            key = min(rank.pp, 1) + (rank.pp == last), broadcasts[i]
            usual = plain.get(key)
            if usual is None:
                usual = plain[key] = step_calls(
                    rank, sizes, batch, width, drafts, self.config.vocab_size, broadcasts=broadcasts[i]
                )
            made = self.fault.calls(block, i, usual)
            calls.append(made)
            suspect = suspect or made is not usual
        complete = True
        if suspect:
            calls, complete = entered(block.ranks, calls)
        self._record(calls)
        if not complete:
            self.wedged = f"step {block.step}: " + "; ".join(
                f"{rank} in {own[-1].group} {own[-1].op} of {own[-1].numel}" if own else f"{rank} in none"
                for rank, own in zip(block.ranks, calls, strict=True)
            )
        return complete

    def _record(self, calls: Sequence[Sequence[Call]]) -> None:
        if self._memory:
            record_calls(self._memory, calls)
            return
        for probe, own in zip(self.probes, calls, strict=True):
            for call in own:
                probe.collective(call.group, call.op, call.dtype, call.numel, call.group_size)
