"""What a rank does in one iteration, for one or several ranks of a pipeline at once.

    begin:   consume the update received pp_size iterations ago, release and add requests, prepare inputs
    (the driver runs the model over the prepared inputs)
    verify:  last stage: sample, check drafts, propose the next block, keep them in its own states
    receive: earlier stages: put what the last stage broadcast in line, advance as if every draft were accepted

A receive is consumed late because the real engine's broadcast is asynchronous: the FIFO is seeded with
pp_size Nones, so that iteration T consumes what T - pp_size received. Meanwhile the slot may
have passed to another request; the generation noted at receive tells.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from stagewatch.agents import mask as masks
from stagewatch.agents.identity import Rank, Sizes
from stagewatch.agents.lab.batch import InputBatch, dummy_order, prepare_inputs
from stagewatch.agents.lab.fault import Fault
from stagewatch.agents.lab.messages import I32, I64, Bool, NewRequest, SchedulerOutput, StepResult
from stagewatch.agents.lab.states import RequestStates


@dataclass(slots=True)
class Sampled:
    """What a last stage broadcasts of one step. Leading axis: sending (or receiving) ranks."""

    tokens: I32
    """Shape [ranks, rows, width]; only ``[..., :num_sampled]`` is defined."""
    num_sampled: I32
    num_rejected: I32
    drafts: I32
    """Shape [ranks, rows, K], or [ranks, rows, 0] where this step relays none."""

    def take(self, ranks: I64) -> "Sampled":
        """A copy for receivers: entry i comes from sender ``ranks[i]``."""
        return Sampled(
            self.tokens[ranks], self.num_sampled[ranks], self.num_rejected[ranks], self.drafts[ranks]
        )

    def copy(self) -> "Sampled":
        """A copy that can be changed without changing what was recorded of this one."""
        columns = (self.tokens, self.num_sampled, self.num_rejected, self.drafts)
        return Sampled(*(column.copy() for column in columns))


@dataclass(slots=True)
class Pending:
    """A broadcast as received, waiting to be consumed. Leading axis: the block's earlier-stage ranks."""

    step: int
    handles: I32
    slots: I32
    flat: I64
    generation: I32
    mask: Bool
    sampled: Sampled | None
    """None while the broadcast is still under way."""
    wait: Callable[[], Sampled] | None = None
    """Waits for a broadcast under way; asked once, before it is consumed."""

    @property
    def payload(self) -> Sampled:
        """What was received; ValueError while the broadcast is under way."""
        if self.sampled is None:
            raise ValueError(f"the broadcast of step {self.step} has not arrived")
        return self.sampled


class Recorder(Protocol):
    """What a stage reports as it goes; `stagewatch.agents.engines.lab` makes records of it."""

    def bound(self, request: NewRequest, slots: I32, generation: I32) -> None:
        """``request`` took ``slots`` [ranks]."""

    def freed(self, slots: I32, generation: I32) -> None:
        """``slots`` [ranks, n] were released; ``generation`` is the one that ended."""

    def inputs(self, batch: InputBatch, cap: I32, tick: int, spec_tokens: I32) -> None:
        """The ranks are about to feed ``batch``; ``spec_tokens`` [ranks] is what each plans to propose."""

    def mask(self, engine: Bool, fixed: Bool) -> None:
        """Masks [ranks, rows]; a rank whose mask has no row set broadcasts nothing."""

    def sent(self, batch: InputBatch, mask: Bool, sampled: Sampled) -> None:
        """The last stage's ranks are about to broadcast ``sampled``; ``mask`` has all ranks of the block."""

    def received(self, pending: Pending) -> None:
        """Earlier stages hold ``pending``."""

    def skipped(self, batch: InputBatch) -> None:
        """The step broadcasts nothing, because no rank's mask has a row set."""

    def consumed(self, pending: Pending, at: int, generation_now: I32, applied: Bool) -> None:
        """Earlier stages wrote the rows ``applied`` of ``pending`` before step ``at``."""

    def collective(self, rank: int, group: str, op: str, dtype: str, numel: int, group_size: int) -> None:
        """The block's rank number ``rank`` is about to enter a call."""


@dataclass(frozen=True, slots=True)
class StageConfig:
    """Sizes of the tables and variants of the protocol."""

    sizes: Sizes
    spec_tokens: int
    slots: int
    handles: int
    length_max: int
    """Longest request in tokens, prompt included."""
    variable_width: bool = False
    """Broadcast one token column where the step verified no drafts, as vLLM 0.33 does, instead of always K + 1."""
    refined_mask: bool = True
    """Leave final prefill chunks that reach the cap out of the mask, as vLLM 0.31 and later do."""
    shuffle_seed: int | None = None


class Block:
    """The ranks of one pipeline that run in this process. ``ranks`` is in any order; all share dp."""

    def __init__(
        self,
        config: StageConfig,
        ranks: tuple[Rank, ...],
        fault: Fault | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.config: Final = config
        self.ranks: Final = ranks
        self.fault = fault or Fault()
        self.recorder = recorder
        self.step = 0
        """Ordinal of the last batch begun."""
        self.tick = 0
        """Iterations begun, empty ones included."""
        self.wedged = ""
        """Why the ranks will never leave the collective they are in; empty while they run."""
        last = config.sizes.pp - 1
        self.earlier: I64 = np.array([i for i, rank in enumerate(ranks) if rank.pp < last], np.int64)
        self.last: I64 = np.array([i for i, rank in enumerate(ranks) if rank.pp == last], np.int64)
        self.states = RequestStates(
            len(ranks),
            config.slots,
            config.handles,
            config.length_max,
            config.spec_tokens,
            config.shuffle_seed,
        )
        self.request_ids: list[str] = [""] * config.handles
        self.order: SchedulerOutput = dummy_order(config.spec_tokens)
        """The current iteration's orders."""
        self.batch: InputBatch | None = None
        """The current iteration's batch."""
        self._pending: deque[Pending | None] = deque([None] * config.sizes.pp)
        self._mask: Bool = np.zeros((len(ranks), 0), np.bool_)
        self._columns: I64 = np.arange(config.spec_tokens + 1)

    # ---- before the model

    def begin(self, order: SchedulerOutput) -> InputBatch | None:
        """Start an iteration; None if it has no batch."""
        self.tick += 1
        self.order, self.batch = order, None
        pending = self._pending.popleft()
        if pending is not None:
            self._consume(pending)
        if len(order.finished):
            slots, ended = self.states.release(order.finished)
            if self.recorder:
                self.recorder.freed(slots, ended)
        if order.new:
            self._add(order.new)
        if not len(order.handles):
            self._pending.append(None)
            return None
        self.step += 1
        mirror = order.mirror[None].repeat(len(self.ranks), axis=0)
        slots = self.fault.rows(self, self.states.slot_of[:, order.handles])
        batch = prepare_inputs(self.states, order, slots, self.fault.mirror(self, order.handles, mirror))
        self.batch = batch
        self._choose_rows(batch)
        return batch

    def _add(self, requests: tuple[NewRequest, ...]) -> None:
        self.fault.adding(self)
        slots = self.states.add(requests)
        generation = self.states.generation.reshape(-1)[self.states.flat(slots)]
        for number, request in enumerate(requests):
            self.request_ids[request.handle] = request.request_id
            self.fault.added(self, request, slots[:, number])
            if self.recorder:
                self.recorder.bound(request, slots[:, number], generation[:, number])

    def _arrive(self, pending: Pending) -> None:
        if pending.wait is not None:
            pending.sampled = pending.wait()
        self.fault.received(self, pending)
        if self.recorder:
            self.recorder.received(pending)

    def _consume(self, pending: Pending) -> None:
        states = self.states
        if pending.sampled is None:
            self._arrive(pending)
        generation_now = states.generation.reshape(-1)[pending.flat]
        # A slot that was released since belongs to another request, which must not get this update.
        applied: Bool = pending.mask & (generation_now == pending.generation)
        applied = self.fault.consuming(self, pending, applied)
        if self.recorder:
            self.recorder.consumed(pending, self.step + 1, generation_now, applied)
        sampled = pending.payload
        width = sampled.tokens.shape[2]
        flat = pending.flat[applied]
        num_sampled = sampled.num_sampled[applied]
        states.computed.reshape(-1)[flat] -= self.fault.rejections(self, applied, sampled.num_rejected)[
            applied
        ]
        column = np.minimum(np.maximum(num_sampled, 1), width) - 1
        last = sampled.tokens[applied][np.arange(len(flat)), column]
        states.last_sampled.reshape(-1)[flat] = self.fault.last_tokens(self, applied, sampled, last)
        drafts = sampled.drafts.shape[2]
        if drafts:
            states.draft_tokens.reshape(-1, drafts)[flat] = sampled.drafts[applied]

    def _choose_rows(self, batch: InputBatch) -> None:
        """Compute the broadcast mask from host state alone, so that every rank comes to the same one."""
        cap = self.states.cap.reshape(-1)[batch.flat]
        fixed = masks.fixed_rows(batch.mirror, batch.scheduled, batch.prefill_len)
        if self.config.refined_mask and batch.prefilling.any():
            fixed = fixed & ~masks.finished_prefill_rows(batch.prefilling, batch.prefill_len, cap)
        self._mask = self.fault.mask(self, batch, cap, fixed)
        if self.recorder:
            spec_tokens = np.full(len(self.ranks), batch.spec_tokens, np.int32)
            self.recorder.inputs(batch, cap, self.tick, self.fault.path(self, spec_tokens))
            self.recorder.mask(self._mask, fixed)

    @property
    def mask(self) -> Bool:
        """The engine's mask of the current step, shape [ranks, rows]."""
        return self._mask

    @property
    def broadcasts(self) -> Bool:
        """Which ranks take part in the current step's broadcast, shape [ranks]."""
        taking_part: Bool = np.any(self._mask, axis=1)
        return taking_part

    # ---- after the model

    def verify(self, batch: InputBatch, targets: I32, chain: I32) -> Sampled:
        """Last stage: check drafts against ``targets`` and propose the next block.

        ``targets`` [last ranks, tokens] is the token that follows each fed token; ``chain`` [vocab, K] is the drafter's
        table: the K tokens it expects to follow a token. The states of the last stage are brought up to date.
        """
        last = self.last
        targets = self.fault.targets(self, batch, targets)
        drafts = self.config.spec_tokens
        columns = self._columns
        first = batch.row_end - batch.draft_count - 1
        index = np.minimum(first[:, None] + columns, batch.row_end[:, None] - 1)
        tokens = targets.take(index, axis=1)
        fed = batch.input_ids[last].take(index, axis=1)
        asked = columns[1:] <= batch.draft_count[:, None]
        accepted = np.logical_and.accumulate((fed[:, :, 1:] == tokens[:, :, :-1]) & asked, axis=2)
        num_accepted = accepted.sum(axis=2, dtype=np.int32)
        # A prefill chunk that is not the last has no next token, whatever the model computed for it.
        yields = batch.mirror[last] + batch.scheduled >= batch.prefill_len[last]
        num_sampled = np.where(yields, num_accepted + 1, 0).astype(np.int32)
        num_rejected = np.where(yields, batch.draft_count - num_accepted, 0).astype(np.int32)
        following = np.take_along_axis(tokens, num_accepted[:, :, None], axis=2)[:, :, 0]
        block = chain.take(following, axis=0)
        if batch.spec_tokens < drafts:
            block[:, :, batch.spec_tokens :] = -1
        relayed = block if batch.spec_tokens else block[:, :, :0]
        sampled = Sampled(tokens, num_sampled, num_rejected, relayed)
        self.fault.proposed(self, batch, sampled)
        self._keep(batch, sampled, following, yields)
        return sampled

    def _keep(self, batch: InputBatch, sampled: Sampled, following: I32, yields: Bool) -> None:
        states = self.states
        flat = batch.flat[self.last]
        rejected = self.fault.rejections_kept(self, sampled.num_rejected)
        states.computed.reshape(-1)[flat] += batch.scheduled - rejected
        states.last_sampled.reshape(-1)[flat[yields]] = following[yields]
        drafts = sampled.drafts.shape[2]
        if drafts:
            states.draft_tokens.reshape(-1, drafts)[flat[yields]] = sampled.drafts[yields]

    def drafts_sent(self, batch: InputBatch) -> int:
        """Width of the draft block that the current step broadcasts; 0: none."""
        return self.config.spec_tokens if batch.spec_tokens and self.fault.relays(self) else 0

    def width_sent(self, batch: InputBatch) -> int:
        """Token columns that the current step broadcasts."""
        return self.config.spec_tokens + 1 if not self.config.variable_width or batch.draft_count.any() else 1

    def send(self, batch: InputBatch, sampled: Sampled) -> Sampled:
        """Last stage: what leaves for the earlier stages; recorded before it does."""
        width, drafts = self.width_sent(batch), self.drafts_sent(batch)
        tokens = sampled.tokens[:, :, :width]
        sending = Sampled(tokens, sampled.num_sampled, sampled.num_rejected, sampled.drafts[:, :, :drafts])
        if self.recorder:
            self.recorder.sent(batch, self._mask, sending)
        return sending

    def receive(self, batch: InputBatch, sampled: Sampled | Callable[[], Sampled] | None) -> None:
        """Earlier stages: queue what was broadcast and advance optimistically.

        ``sampled`` is what was received, or a function that waits for it, or None where nothing is broadcast. The
        last stage calls it with None, to keep its FIFO in step.
        """
        if self.recorder and not self._mask.any():
            self.recorder.skipped(batch)
        earlier = self.earlier
        flat = batch.flat[earlier]
        self.states.computed.reshape(-1)[flat] += batch.scheduled
        if not len(earlier) or sampled is None:
            self._pending.append(None)
            return
        columns = (
            self.step,
            batch.handles,
            batch.slots[earlier],
            flat,
            batch.generation[earlier],
            self._mask[earlier],
        )
        if callable(sampled):
            self._pending.append(Pending(*columns, None, sampled))
        else:
            arrived = Pending(*columns, sampled)
            self._pending.append(arrived)
            self._arrive(arrived)

    def finish(self) -> None:
        """Wait for broadcasts under way, so that nobody is left sending."""
        for pending in self._pending:
            if pending is not None and pending.sampled is None:
                self._arrive(pending)

    def result(self, sampled: Sampled) -> StepResult:
        """What the scheduler learns: the first of the last stage's ranks speaks for all."""
        return StepResult(sampled.tokens[0], sampled.num_sampled[0], sampled.num_rejected[0])
