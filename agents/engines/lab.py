"""The lab's adapter: what its stages report becomes calls of a probe, one probe per rank of the block.

The same code serves the lab's processes, with one real `stagewatch.agents.probe.Probe` each, and the simulator, with
one `stagewatch.agents.lab.recording.MemoryProbe` per rank of a pipeline.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.batch import InputBatch
from stagewatch.agents.lab.messages import I32, Bool, NewRequest
from stagewatch.agents.lab.stage import Pending, Sampled
from stagewatch.agents.record import U8, U64, UNKNOWN, Inputs, Kind, Payload


class ProbeLike(Protocol):
    """What the adapter needs of a probe; see `stagewatch.agents.probe.Probe`."""

    def bind(self, request_id: str, slot: int, generation: int, prompt_len: int, cap: int = ...) -> None: ...
    def free(self, slot: int, generation: int) -> None: ...
    def inputs(self, body: Inputs) -> None: ...
    def mask(self, engine: NDArray[np.bool_] | None, fixed: NDArray[np.bool_] | None, rows: int) -> None: ...
    def payload(self, kind: Kind, step: int, body: Payload) -> None: ...
    def collective(self, group: str, op: str, dtype: str, numel: int, group_size: int = ...) -> None: ...
    def keys_of(self, slots: NDArray[np.integer]) -> U64: ...
    def spent(self, ns: int) -> None: ...


HELD_MAX: Final = 64
"""Steps that wait for broadcasts which a fault may have kept from ever arriving."""


class LabRecorder:
    """Turns a block's reports into records; see `stagewatch.agents.lab.stage.Recorder` for the methods.

    ``probes`` follow the block's ``ranks``, of ``stages`` stages each.
    """

    def __init__(self, probes: Sequence[ProbeLike], ranks: Sequence[Rank], stages: int) -> None:
        self.probes = probes
        self._earlier = [i for i, rank in enumerate(ranks) if rank.pp < stages - 1]
        self._last = [i for i, rank in enumerate(ranks) if rank.pp == stages - 1]
        self._step = 0
        self._keys: list[U64] = []
        """Request of each row of the current batch, per rank."""
        self._keys_sent: dict[int, list[U64]] = {}
        """The same of steps not yet consumed, by ordinal: their slots may change hands meanwhile."""
        self._awaited: dict[int, None] = {}
        """Steps whose broadcast is still under way, oldest first."""
        self._held: deque[tuple[int, list[tuple[ProbeLike, Payload]]]] = deque()
        """Steps that broadcast nothing, to be recorded after those under way: payloads are in the order of steps."""

    def bound(self, request: NewRequest, slots: I32, generation: I32) -> None:
        length = len(request.tokens)
        pairs = zip(self.probes, slots.tolist(), generation.tolist(), strict=True)
        for probe, slot, current in pairs:
            probe.bind(request.request_id, slot, current, length, request.cap)

    def freed(self, slots: I32, generation: I32) -> None:
        for probe, own, ended in zip(self.probes, slots.tolist(), generation.tolist(), strict=True):
            for slot, number in zip(own, ended, strict=True):
                probe.free(slot, number)

    def inputs(self, batch: InputBatch, cap: I32, tick: int, spec_tokens: I32) -> None:
        began = time.perf_counter_ns()
        self._step += 1
        self._keys = [probe.keys_of(batch.slots[i]) for i, probe in enumerate(self.probes)]
        if self._earlier:
            self._keys_sent[self._step] = self._keys
            self._awaited[self._step] = None
        prefilling = batch.prefilling.view(np.uint8)
        planned = spec_tokens.tolist()
        for i, probe in enumerate(self.probes):
            probe.inputs(
                Inputs(
                    tick,
                    0,
                    planned[i],
                    batch.tokens,
                    self._keys[i],
                    batch.slots[i],
                    batch.generation[i],
                    batch.mirror[i],
                    batch.computed[i],
                    batch.prefill_len[i],
                    batch.scheduled,
                    batch.draft_count,
                    cap[i],
                    batch.last_sampled[i],
                    batch.draft_tokens[i],
                    batch.input_ids[i],
                    batch.positions[i],
                    prefilling[i],
                )
            )
        self._account(began)

    def mask(self, engine: Bool, fixed: Bool) -> None:
        began = time.perf_counter_ns()
        rows = engine.shape[1]
        some, some_fixed = np.any(engine, axis=1).tolist(), np.any(fixed, axis=1).tolist()
        for i, probe in enumerate(self.probes):
            probe.mask(engine[i] if some[i] else None, fixed[i] if some_fixed[i] else None, rows)
        self._account(began)

    def sent(self, batch: InputBatch, mask: Bool, sampled: Sampled) -> None:
        began = time.perf_counter_ns()
        applied = mask.view(np.uint8)
        for position, i in enumerate(self._last):
            body = self._payload(
                sampled,
                position,
                self._keys[i],
                batch.slots[i],
                batch.generation[i],
                batch.generation[i],
                applied[i],
            )
            self.probes[i].payload(Kind.SENT, self._step, body)
        self._account(began)

    def received(self, pending: Pending) -> None:
        began = time.perf_counter_ns()
        keys = self._keys_sent[pending.step]
        applied = pending.mask.view(np.uint8)
        for position, i in enumerate(self._earlier):
            generation = pending.generation[position]
            body = self._payload(
                pending.payload,
                position,
                keys[i],
                pending.slots[position],
                generation,
                generation,
                applied[position],
            )
            self.probes[i].payload(Kind.RECEIVED, pending.step, body)
        self._no_longer_awaited(pending.step)
        self._account(began)

    def consumed(self, pending: Pending, at: int, generation_now: I32, applied: Bool) -> None:
        began = time.perf_counter_ns()
        keys = self._keys_sent.pop(pending.step)
        self._no_longer_awaited(pending.step)
        written = applied.view(np.uint8)
        for position, i in enumerate(self._earlier):
            body = self._payload(
                pending.payload,
                position,
                keys[i],
                pending.slots[position],
                pending.generation[position],
                generation_now[position],
                written[position],
                at,
            )
            self.probes[i].payload(Kind.CONSUMED, pending.step, body)
        self._account(began)

    def skipped(self, batch: InputBatch) -> None:
        """The step broadcasts nothing, because no rank's mask has a row set."""
        self._keys_sent.pop(self._step, None)
        nothing = np.zeros((batch.rows, 0), np.int32)
        zeros = np.zeros(batch.rows, np.int32)
        received: list[tuple[ProbeLike, Payload]] = []
        for i, probe in enumerate(self.probes):
            slots, generation = batch.slots[i], batch.generation[i]
            body = Payload(
                UNKNOWN,
                1,
                self._keys[i],
                slots,
                generation,
                generation,
                zeros,
                zeros,
                nothing,
                nothing,
                zeros.astype(np.uint8),
            )
            if i in self._last:
                probe.payload(Kind.SENT, self._step, body)
            else:
                received.append((probe, body))
        self._held.append((self._step, received))
        self._no_longer_awaited(self._step)

    def _no_longer_awaited(self, step: int) -> None:
        self._awaited.pop(step, None)
        while self._held and (
            len(self._held) > HELD_MAX or self._held[0][0] < next(iter(self._awaited), self._step + 1)
        ):
            held, received = self._held.popleft()
            for probe, body in received:
                probe.payload(Kind.RECEIVED, held, body)

    def collective(self, rank: int, group: str, op: str, dtype: str, numel: int, group_size: int) -> None:
        self.probes[rank].collective(group, op, dtype, numel, group_size)

    @staticmethod
    def _payload(
        sampled: Sampled,
        position: int,
        keys: U64,
        slots: I32,
        generation: I32,
        generation_now: I32,
        applied: U8,
        at: int = UNKNOWN,
    ) -> Payload:
        return Payload(
            at,
            0,
            keys,
            slots,
            generation,
            generation_now,
            sampled.num_sampled[position],
            sampled.num_rejected[position],
            sampled.tokens[position],
            sampled.drafts[position],
            applied,
        )

    def _account(self, began_ns: int) -> None:
        spent = time.perf_counter_ns() - began_ns
        for probe in self.probes:
            probe.spent(spent)
