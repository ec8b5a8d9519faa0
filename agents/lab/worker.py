"""One rank of the lab as a process: takes orders from the driver's pipe, runs its stage, records."""

import os
import socket
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from stagewatch.agents.arming import arm
from stagewatch.agents.engines.lab import LabRecorder
from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.batch import dummy_batch
from stagewatch.agents.lab.config import LabConfig
from stagewatch.agents.lab.fault import Fault, Injection
from stagewatch.agents.lab.identities import BASE_FINGERPRINTS, lab_identity
from stagewatch.agents.lab.integer_model import Vocabulary
from stagewatch.agents.lab.messages import SchedulerOutput
from stagewatch.agents.lab.model import ModelConfig, StageModel
from stagewatch.agents.lab.stage import Block
from stagewatch.agents.lab.transport import Transport
from stagewatch.agents.probe import Probe


@dataclass(frozen=True, slots=True)
class Farewell:
    """A rank's last word to the driver."""

    rank: Rank
    steps: int
    injections: tuple[Injection, ...]
    probe_armed: bool


def run_rank(
    config: LabConfig, rank: Rank, store: Path, pipe: Connection, started_ns: int, fault: Fault
) -> None:
    """The whole life of a rank's process. Raises whatever ends it before its time."""
    torch.set_num_threads(1)
    sizes = config.sizes
    probe: Probe | None = None
    settings = config.probe_of(rank)
    if settings is not None:
        identity = lab_identity(
            rank,
            sizes,
            deployment=settings.deployment,
            instance=config.instance,
            spec_tokens=config.spec_tokens,
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
            config=fault.fingerprints(rank, BASE_FINGERPRINTS, sizes),
            host=socket.gethostname(),
            pid=os.getpid(),
            started_ns=started_ns,
        )
        probe = arm(identity, settings)
        # A rank that waits in a call says so as the engine's does: from another thread.
        threading.Thread(target=_beat, args=(probe, settings.heartbeat_s), daemon=True).start()
    recorder = LabRecorder([probe], (rank,), config.pp) if probe is not None else None
    block = Block(config.stage_config(), (rank,), fault, recorder)
    vocabulary = Vocabulary(config.vocab_size, config.spec_tokens, config.seed, stops=False)
    transport = Transport(store, rank, sizes, recorder, config.collective_timeout_s)
    model_config = ModelConfig(
        config.vocab_size, config.layers, config.seed, config.seats, config.max_model_len, config.context
    )
    model = StageModel(model_config, vocabulary, rank, sizes, transport.reduce, transport.gather)
    worker = _Worker(
        block, model, transport, vocabulary, pipe if rank.pp == config.pp - 1 and rank.tp == 0 else None
    )
    with torch.inference_mode():
        worker.warm_up(config.chunk_max)
        while not (order := pipe.recv()).stop:
            worker.iterate(order)
        block.finish()
    pipe.send(Farewell(rank, block.step, tuple(fault.injections), probe is not None and probe.armed))
    if probe is not None:
        probe.close()
    transport.close()


def _beat(probe: Probe, every_s: float) -> None:
    while probe.armed:
        time.sleep(every_s)
        probe.heartbeat()


class _Worker:
    def __init__(
        self,
        block: Block,
        model: StageModel,
        transport: Transport,
        vocabulary: Vocabulary,
        results: Connection | None,
    ) -> None:
        self._block, self._model, self._transport = block, model, transport
        self._vocabulary, self._results = vocabulary, results

    def warm_up(self, tokens: int) -> None:
        """Run a batch without a request through all stages, unrecorded, so that the first real one is not slow."""
        batch = dummy_batch(tokens, self._block.config.spec_tokens)
        self._transport.recorder, recorder = None, self._transport.recorder
        hidden = self._model.embed(batch) if self._model.first else self._transport.receive_hidden(batch)
        hidden = self._model.forward(batch, hidden)
        if self._model.last:
            self._model.sample(hidden)
        else:
            self._transport.send_hidden(hidden)
        self._transport.recorder = recorder

    def iterate(self, order: SchedulerOutput) -> None:
        """One iteration of this rank's engine loop."""
        block, transport = self._block, self._transport
        batch = block.begin(order)
        if batch is None:
            return
        hidden = self._model.embed(batch) if self._model.first else transport.receive_hidden(batch)
        hidden = self._model.forward(batch, hidden)
        broadcasts = block.config.sizes.pp > 1 and bool(block.broadcasts[0])
        if not self._model.last:
            transport.send_hidden(hidden)
            shape = batch.rows, block.width_sent(batch), block.drafts_sent(batch)
            block.receive(batch, transport.receive_broadcast(*shape) if broadcasts else None)
            return
        sampled = block.verify(batch, self._model.sample(hidden), self._vocabulary.chain)
        if broadcasts:
            transport.broadcast(block.send(batch, sampled))
        block.receive(batch, None)
        if self._results is not None:
            self._results.send(block.result(sampled))
