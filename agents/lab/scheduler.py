"""The asynchronous scheduler: decides each iteration's batch before the outputs of the ones in flight are known.

It counts optimistically. Scheduling a row adds all its tokens to ``mirror``, drafts included, and leaves
``placeholders`` for the tokens it may yield; when the step's result returns, rejected drafts are taken
off again. A request decodes once in pp_size iterations, because earlier stages know its last token no sooner.
All per-row work is vectorised over handles; only arrivals, departures and preemptions loop in Python.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from stagewatch.agents.errors import StagewatchError
from stagewatch.agents.lab.fault import Fault
from stagewatch.agents.lab.messages import I32, I64, Bool, NewRequest, Output, SchedulerOutput, StepResult
from stagewatch.agents.lab.workload import FIRST_TOKEN, Request


class LabError(StagewatchError):
    """The lab was asked for something it cannot run, or one of its ranks died."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one pipeline's scheduler. Lengths and budgets are in tokens."""

    pp: int
    spec_tokens: int
    seats: int = 64
    """Most requests running at once."""
    token_budget: int = 512
    chunk_max: int = 64
    """Most prefill tokens of one request in one step."""
    max_model_len: int = 512
    block_size: int = 16
    blocks: int = 0
    """KV cache blocks; a small number forces preemption, 0 is more than enough."""
    preempt_probability: float = 0.0
    """Chance per iteration that the youngest running request is preempted, whatever the cache holds."""
    variable_spec: bool = False
    """Draw the number of drafts to propose anew every few iterations, from 0 to `spec_tokens`."""
    seed: int = 0


@dataclass(slots=True)
class _Waiting:
    """A request on the scheduler's books, waiting or running."""

    request: Request
    prompt: I32
    """Of the current turn: with streaming input, everything said before included."""
    outputs: list[int] = field(default_factory=list)
    """Of the current turn, as of the last time it left its seat."""
    turn: int = 0

    @property
    def cap(self) -> int:
        return len(self.prompt) + self.request.max_tokens


@dataclass(frozen=True, slots=True)
class _InFlight:
    handles: I32
    epochs: I64
    request_ids: tuple[str, ...] = ()
    """Only where a fault wants to know later whose rows they were."""


class Scheduler:
    """One pipeline's scheduler. ``schedule`` and ``update`` are called alternately, up to pp_size + 1 apart."""

    def __init__(
        self,
        config: SchedulerConfig,
        requests: Iterable[Request],
        fault: Fault | None = None,
        *,
        replica: int = 0,
    ) -> None:
        self.config = config
        self.tick = 0
        """Iterations scheduled so far."""
        self.rows_scheduled = 0
        self.preemptions = 0
        self._fault = fault or Fault()
        self._arrivals: Iterator[Request] = iter(requests)
        self._next_arrival = next(self._arrivals, None)
        self._waiting: deque[_Waiting] = deque()
        self._rng = np.random.default_rng([config.seed, replica, 0x5C4ED])
        self._blocks_free = config.blocks
        self._spec_now = config.spec_tokens
        self._released: list[int] = []
        self._in_flight: deque[_InFlight] = deque()
        self._aborts: list[tuple[int, int, int]] = []
        self._outputs: list[Output] = []
        seats = config.seats
        self._order: I32 = np.zeros(0, np.int32)
        """Running handles, oldest first."""
        self._free_handles = list(range(seats))[::-1]
        self._running: list[_Waiting | None] = [None] * seats
        self._epoch: I64 = np.zeros(seats, np.int64)
        self.mirror: I32 = np.zeros(seats, np.int32)
        self.placeholders: I32 = np.zeros(seats, np.int32)
        self._prefill_len: I32 = np.zeros(seats, np.int32)
        self._cap: I32 = np.zeros(seats, np.int32)
        self._next_eligible: I32 = np.zeros(seats, np.int32)
        self._proposed: I32 = np.zeros(seats, np.int32)
        self._blocks_held: I32 = np.zeros(seats, np.int32)
        self._out_len: I32 = np.zeros(seats, np.int32)
        self._out_max: I32 = np.zeros(seats, np.int32)
        self._columns: I64 = np.arange(config.spec_tokens + 1)
        self._out: I32 = np.zeros((seats, config.max_model_len + 1), np.int32)

    @property
    def idle(self) -> bool:
        """Whether nothing runs, waits, will arrive or is still to be released."""
        nothing = not self._waiting and not len(self._order) and self._next_arrival is None
        return nothing and not self._released

    def running(self) -> dict[int, str]:
        """Handle and id of every running request, oldest first."""
        return {int(h): one.request.request_id for h in self._order if (one := self._running[h]) is not None}

    def take_outputs(self) -> list[Output]:
        """Requests that ended since the last call."""
        taken, self._outputs = self._outputs, []
        return taken

    def progress(self) -> list[Output]:
        """All running requests' tokens so far."""
        return [
            Output(one.request.request_id, tuple(self._out[h, : self._out_len[h]].tolist()), False, "")
            for h in self._order
            if (one := self._running[h]) is not None
        ]

    # ---- scheduling

    def schedule(self) -> SchedulerOutput:
        """Decide the next iteration. Its result must come back through `update`, in order, rows or none."""
        tick = self.tick
        self.tick += 1
        self._take_arrivals(tick)
        self._take_aborts(tick)
        preempted = self._preempt_at_random()
        if self.config.variable_spec and tick % 7 == 0:
            self._spec_now = int(self._rng.integers(0, self.config.spec_tokens + 1))
        order, granted, short = self._grant(tick)
        new: tuple[NewRequest, ...] = ()
        if not short and not preempted and self._waiting:
            new, order, granted = self._admit(order, granted)
        released = np.array(self._released, np.int32)
        self._released = []
        picked = granted.nonzero()[0]
        return self._order_batch(tick, released, new, order[picked], granted[picked])

    def _order_batch(
        self, tick: int, released: I32, new: tuple[NewRequest, ...], handles: I32, scheduled: I32
    ) -> SchedulerOutput:
        before = self.mirror[handles]
        decoding = before >= self._prefill_len[handles]
        drafts = np.where(decoding, scheduled - 1, 0).astype(np.int32)
        after = before + scheduled
        samples = after >= self._prefill_len[handles]
        self.mirror[handles] = after
        self.placeholders[handles] += np.where(samples, 1 + drafts, 0).astype(np.int32)
        yielding = handles[samples]
        self._next_eligible[yielding] = tick + self._fault.spacing(tick, self.config.pp)
        self._proposed[yielding] = self._spec_now
        self._in_flight.append(_InFlight(handles, self._epoch[handles], self._fault.remember(self, handles)))
        self.rows_scheduled += len(handles)
        return SchedulerOutput(released, new, handles, scheduled, drafts, before, self._spec_now)

    def _grant(self, tick: int) -> tuple[I32, I32, bool]:
        """(running handles, tokens granted to each, whether the cache was too short for all)."""
        short = False
        while True:
            order = self._order
            granted = self._wanted(order, tick)
            if not self.config.blocks or not len(order):
                return order, granted, short
            needed = self._blocks_needed(order, granted)
            missing = int(needed.sum()) - self._blocks_free
            if missing <= 0:
                break
            short = True
            # The youngest give up what they hold and what they were to take, until it is enough for the others.
            relief = np.cumsum((needed + self._blocks_held[order])[::-1])
            for _ in range(int(np.searchsorted(relief, missing)) + 1):
                self._preempt_youngest()
        self._blocks_held[order] += needed
        self._blocks_free -= int(needed.sum())
        return order, granted, short

    def _wanted(self, order: I32, tick: int) -> I32:
        config = self.config
        mirror, prefill_len = self.mirror[order], self._prefill_len[order]
        left = prefill_len - mirror
        decoding = left <= 0
        room = config.max_model_len - mirror
        decode = np.minimum(1 + self._proposed[order], room)
        # Tokens in flight may already be its last: without this the request would run past its cap.
        placeholders = self.placeholders[order]
        done = (placeholders > 0) & (mirror + 2 - placeholders >= self._cap[order])
        ready = (self._next_eligible[order] <= tick) & ~done & (decode > 0)
        want = np.where(decoding, np.where(ready, decode, 0), np.minimum(left, config.chunk_max))
        room_left = config.token_budget - (np.cumsum(want) - want)
        granted = np.maximum(np.minimum(room_left, want), 0)
        # A decode step is granted whole or not at all; a prefill takes what is left.
        return np.where(decoding & (granted < want), 0, granted).astype(np.int32)

    def _blocks_needed(self, handles: I32, granted: I32) -> I32:
        size = self.config.block_size
        total = (self.mirror[handles] + granted + size - 1) // size
        needed: I32 = np.maximum(total - self._blocks_held[handles], 0)
        return needed

    def _admit(self, order: I32, granted: I32) -> tuple[tuple[NewRequest, ...], I32, I32]:
        new: list[NewRequest] = []
        grants: list[int] = []
        budget = self.config.token_budget - int(granted.sum())
        size = self.config.block_size
        while self._waiting and self._free_handles and budget > 0:
            waiting = self._waiting[0]
            fresh = not waiting.outputs and not waiting.turn
            remote = fresh and waiting.request.remote_prefill
            tokens = waiting.prompt
            if waiting.outputs:
                tokens = np.concatenate([tokens, np.array(waiting.outputs, np.int32)])
            start = len(tokens) if remote else waiting.request.cached if fresh else 0
            grant = 1 if remote else min(len(tokens) - start, self.config.chunk_max, budget)
            if self.config.blocks and -(-(start + grant) // size) > self._blocks_free:
                break
            self._waiting.popleft()
            new.append(self._seat(waiting, tokens, start, remote))
            if self.config.blocks:
                held = -(-(start + grant) // size)
                self._blocks_held[new[-1].handle] = held
                self._blocks_free -= held
            grants.append(grant)
            budget -= grant
        if not new:
            return (), order, granted
        handles = np.array([one.handle for one in new], np.int32)
        self._order = np.concatenate([self._order, handles])
        return tuple(new), self._order, np.concatenate([granted, np.array(grants, np.int32)])

    def _seat(self, waiting: _Waiting, tokens: I32, start: int, remote: bool) -> NewRequest:
        request, cap = waiting.request, waiting.cap
        if cap > self.config.max_model_len:
            raise LabError(
                f"request {request.request_id}: {cap} tokens exceed max_model_len "
                f"{self.config.max_model_len}: shorten it or raise the limit"
            )
        handle = self._free_handles.pop()
        anchor = -1
        if remote:
            # Any token will do, as long as the prompt alone determines it.
            anchor = FIRST_TOKEN + int(tokens.sum()) % 64
            waiting.outputs.append(anchor)
        self._running[handle] = waiting
        self.mirror[handle] = start
        self.placeholders[handle] = 0
        self._prefill_len[handle] = len(tokens)
        self._cap[handle] = cap
        self._next_eligible[handle] = 0
        self._proposed[handle] = 0
        self._out_len[handle] = len(waiting.outputs)
        self._out_max[handle] = request.max_tokens
        self._out[handle, : len(waiting.outputs)] = waiting.outputs
        if request.abort_after >= 0:
            self._aborts.append((self.tick + request.abort_after, handle, int(self._epoch[handle])))
        return NewRequest(handle, request.request_id, tokens, cap, start, anchor)

    # ---- departures

    def _take_arrivals(self, tick: int) -> None:
        while self._next_arrival is not None and self._next_arrival.arrives <= tick:
            self._waiting.append(_Waiting(self._next_arrival, self._next_arrival.prompt))
            self._next_arrival = next(self._arrivals, None)

    def _take_aborts(self, tick: int) -> None:
        if not self._aborts:
            return
        due = [one for one in self._aborts if one[0] <= tick]
        self._aborts = [one for one in self._aborts if one[0] > tick]
        for _, handle, epoch in due:
            if self._epoch[handle] == epoch:
                self._end(handle, "abort")

    def _preempt_at_random(self) -> bool:
        chance = self.config.preempt_probability
        if not chance or not len(self._order) or self._rng.random() >= chance:
            return False
        self._preempt_youngest()
        return True

    def _preempt_youngest(self) -> None:
        handle = int(self._order[-1])
        waiting = self._leave(handle)
        self.preemptions += 1
        waiting.outputs = self._out[handle, : self._out_len[handle]].tolist()
        self._waiting.appendleft(waiting)

    def _leave(self, handle: int) -> _Waiting:
        waiting = self._running[handle]
        if waiting is None:
            raise LabError(f"handle {handle} is not running: the lab's scheduler is at fault")
        self._running[handle] = None
        self._epoch[handle] += 1
        self._order = self._order[self._order != handle]
        self._blocks_free += int(self._blocks_held[handle])
        self._blocks_held[handle] = 0
        self._released.append(handle)
        self._free_handles.append(handle)
        return waiting

    def _end(self, handle: int, reason: str) -> None:
        outputs = self._out[handle, : self._out_len[handle]].tolist()
        waiting = self._leave(handle)
        request = waiting.request
        if reason != "abort" and waiting.turn < len(request.more_input):
            self._next_turn(waiting, outputs)
            return
        self._outputs.append(Output(request.request_id, tuple(outputs), True, reason))

    def _next_turn(self, waiting: _Waiting, outputs: list[int]) -> None:
        """Streaming input: what was said becomes prompt, more is appended, the request goes on."""
        more = waiting.request.more_input[waiting.turn]
        prompt = np.concatenate([waiting.prompt, np.array(outputs, np.int32), more])
        following = _Waiting(waiting.request, prompt, [], waiting.turn + 1)
        if following.cap > self.config.max_model_len:
            self._outputs.append(Output(waiting.request.request_id, tuple(outputs), True, "length"))
        else:
            self._waiting.append(following)

    # ---- results

    def update(self, result: StepResult | None) -> None:
        """Take the oldest outstanding iteration's result; None for an iteration without a batch."""
        flight = self._in_flight.popleft()
        if result is None or not len(flight.handles):
            return
        num_sampled, rejected, tokens = result.num_sampled, result.num_rejected, result.tokens
        alive = self._epoch[flight.handles] == flight.epochs
        if not alive.all():
            # Left, or preempted, while in flight: what returns belongs to nobody any more.
            handles = self._fault.redirect(self, flight.handles, alive, flight.request_ids)
            alive = handles >= 0
        else:
            handles = flight.handles
        keep = alive & (num_sampled > 0)
        if not keep.all():
            handles, num_sampled, rejected = handles[keep], num_sampled[keep], rejected[keep]
            tokens = tokens[keep]
        if len(handles):
            self._append(handles, tokens, num_sampled, rejected)

    def request_id_of(self, handle: int) -> str | None:
        """Id of the request that runs under ``handle``; None if none does."""
        waiting = self._running[handle]
        return None if waiting is None else waiting.request.request_id

    def _append(self, handles: I32, tokens: I32, num_sampled: I32, rejected: I32) -> None:
        self.mirror[handles] -= rejected
        self.placeholders[handles] -= num_sampled + rejected
        columns = self._columns[: tokens.shape[1]]
        had = self._out_len[handles]
        left = self._out_max[handles] - had
        take = np.minimum(num_sampled, left)
        # Stop tokens are those from 1 up to the first ordinary one; most steps have none.
        stops = (tokens - 1).view(np.uint32) < FIRST_TOKEN - 1
        stopped: Bool | None = None
        if stops.any():
            first = np.where(stops.any(axis=1), stops.argmax(axis=1), tokens.shape[1])
            stopped = first < take
            take = np.minimum(take, first + 1)
        chosen = columns < take[:, None]
        rows = np.arange(len(handles)).repeat(take)
        where = handles[rows] * np.int64(self._out.shape[1]) + had[rows]
        self._out.reshape(-1)[where + np.nonzero(chosen)[1]] = tokens[chosen]
        self._out_len[handles] = had + take
        full = take >= left
        ended = full if stopped is None else full | stopped
        for row in ended.nonzero()[0].tolist():
            is_stop = stopped is not None and bool(stopped[row])
            self._end(int(handles[row]), "stop" if is_stop else "length")
