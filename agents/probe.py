"""The probe: what an engine adapter calls. Engine neutral; it copies and stores, and does nothing else.

Its contract is the engine's peace. Every public method returns None, whatever happens inside: an
exception disarms the probe, once, with one line and a note in the ring, and every later call returns
at once. It takes no lock that another thread holds for longer than a store, hashes nothing, waits for
nothing.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Concatenate, Final, ParamSpec, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from stagewatch.agents.identity import Identity
from stagewatch.agents.record import (
    U64,
    UNKNOWN,
    Bind,
    Body,
    Collective,
    Free,
    Heartbeat,
    Inputs,
    Kind,
    Mask,
    Note,
    Payload,
    request_key,
)
from stagewatch.agents.ring import RingWriter

log = logging.getLogger("stagewatch")

P = ParamSpec("P")

SLOTS_MAX: Final = 1 << 20
"""Largest slot number believed; a larger one is a fault of the adapter, not a request."""


class Health(msgspec.Struct, frozen=True):
    """What a rank's heartbeat says."""

    armed: bool
    """False once the probe took itself out; `reason` says why."""
    reason: str
    steps: int
    """Steps recorded so far."""
    drops: int
    """Records given up because they could not be stored in time or did not fit."""
    probe_ns: int
    """Nanoseconds spent in the probe and its hooks since the last heartbeat."""
    busy_steps: int
    """Steps recorded since the last heartbeat, the divisor of `probe_ns`."""
    probe_p99_ns: int
    """99th percentile over recent steps of the nanoseconds the probe took of one step."""


def guarded(
    method: Callable[Concatenate["Probe", P], None],
) -> Callable[Concatenate["Probe", P], None]:
    """Make a probe method unable to raise: a failure disarms the probe."""

    @functools.wraps(method)
    def call(self: "Probe", *args: P.args, **kwargs: P.kwargs) -> None:
        if not self.armed:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  # whatever it is, it must not reach the engine
            self.disarm(f"{method.__name__} failed: {type(error).__name__}: {error}")

    return cast("Callable[Concatenate[Probe, P], None]", call)


class Probe:
    """Records one rank's steps into its ring.

    ``heartbeat_s`` is the time between heartbeats; they are written by whichever recording call comes
    first after it. ``budget_share`` is the largest share of a step's time the probe may take at its
    99th percentile before it disarms itself; 0 turns that guard off.
    """

    def __init__(
        self, ring: RingWriter, identity: Identity, *, heartbeat_s: float = 1.0, budget_share: float = 0.0
    ) -> None:
        self.identity: Final = identity
        self.armed = True
        self.step = 0
        """Ordinal of the step being executed; 0 before the first."""
        self._ring = ring
        self._lock = threading.Lock()
        self._reason = ""
        self._drops = 0
        self._collectives = 0
        self._slot_keys: U64 = np.zeros(256, np.uint64)
        self._heartbeat_ns = int(heartbeat_s * 1e9)
        self._next_heartbeat_ns = 0
        self._budget = Budget(budget_share)

    @guarded
    def bind(self, request_id: str, slot: int, generation: int, prompt_len: int, cap: int = UNKNOWN) -> None:
        """A request took ``slot``; ``cap`` is prompt plus the most output tokens, in tokens."""
        key = request_key(request_id)
        if not 0 <= slot < SLOTS_MAX:
            raise ValueError(f"slot {slot} is outside 0 to {SLOTS_MAX}")
        if slot >= len(self._slot_keys):
            self._slot_keys = np.concatenate([self._slot_keys, np.zeros(slot + 1, np.uint64)])
        self._slot_keys[slot] = key
        self._store(Kind.BIND, Bind(slot, generation, prompt_len, cap, key, request_id))

    @guarded
    def free(self, slot: int, generation: int) -> None:
        """``slot`` was released; ``generation`` is the one that ended."""
        self._store(Kind.FREE, Free(slot, generation, int(self._slot_keys[slot])))

    def begin(self) -> int:
        """Raise the ordinal and return it, for an adapter whose copy of the inputs is ready only later."""
        self.step += 1
        return self.step

    @guarded
    def inputs(self, body: Inputs, step: int | None = None) -> None:
        """Record what the rank is about to feed. Starts the next step, unless ``step`` is one that `begin` gave."""
        self._store(Kind.INPUTS, body, self.begin() if step is None else step)

    @guarded
    def mask(self, engine: NDArray[np.bool_] | None, fixed: NDArray[np.bool_] | None, rows: int) -> None:
        """Record the engine's mask of the current step beside the fixed one; bool [rows] or None each."""
        nothing = np.zeros(rows, np.uint8)
        self._store(
            Kind.MASK,
            Mask(
                int(engine is None),
                int(fixed is None),
                nothing if engine is None else engine.view(np.uint8),
                nothing if fixed is None else fixed.view(np.uint8),
            ),
        )

    @guarded
    def payload(self, kind: Kind, step: int, body: Payload) -> None:
        """Record a payload under ``step``, the ordinal of the step that sent it."""
        self._store(kind, body, step)

    @guarded
    def collective(
        self, group: str, op: str, dtype: str, numel: int, group_size: int = UNKNOWN, step: int | None = None
    ) -> None:
        """Record that this rank is about to enter a collective or point-to-point call.

        ``step`` names the step it belongs to where that is not the current one: a stage receives its
        hidden states before it prepares its inputs.
        """
        self._collectives += 1
        body = Collective(self._collectives, numel, group_size, f"{group} {op} {dtype}")
        self._store(Kind.COLLECTIVE, body, step)

    @guarded
    def note(self, text: str) -> None:
        """Leave a sentence for the operator."""
        self._store(Kind.NOTE, Note(text))

    @guarded
    def heartbeat(self) -> None:
        """Write a heartbeat now, whatever the time."""
        self._beat(time.time_ns())

    def keys_of(self, slots: NDArray[np.integer]) -> U64:
        """Request keys of the requests that hold ``slots``; shape as given. 0 for a slot never bound."""
        keys: U64 = self._slot_keys[slots]
        return keys

    def spent(self, ns: int) -> None:
        """Account ``ns`` nanoseconds of hook time to the current step."""
        self._budget.add(self.step, ns)

    def dropped(self, count: int = 1) -> None:
        """Count records that an adapter had to give up."""
        self._drops += count

    def disarm(self, reason: str) -> None:
        """Stop recording for good. Never raises."""
        if not self.armed:
            return
        self.armed = False
        self._reason = reason
        log.warning(
            "stagewatch: rank %s disarmed: %s. The engine is not affected.", self.identity.rank, reason
        )
        try:
            with self._lock:
                now = time.time_ns()
                self._ring.append(Kind.NOTE, self.step, now, Note(f"disarmed: {reason}"))
                self._beat_locked(now)
        except Exception:  # noqa: BLE001  # the ring itself may be what failed
            log.warning("stagewatch: rank %s could not note it in its ring", self.identity.rank)

    def close(self) -> None:
        """The engine is leaving of its own accord: say so in the ring."""
        self.heartbeat()
        self.armed = False
        self._ring.close()

    def _store(self, kind: Kind, body: Body, step: int | None = None) -> None:
        now = time.time_ns()
        with self._lock:
            self._ring.append(kind, self.step if step is None else step, now, body)
        if now >= self._next_heartbeat_ns:
            self._beat(now)
        if self._budget.exceeded is not None:
            self.disarm(self._budget.exceeded)

    def _beat(self, now_ns: int) -> None:
        with self._lock:
            self._beat_locked(now_ns)

    def _beat_locked(self, now_ns: int) -> None:
        self._next_heartbeat_ns = now_ns + self._heartbeat_ns
        ns, steps, p99 = self._budget.since_last()
        health = Health(self.armed, self._reason, self.step, self._drops, ns, steps, p99)
        self._ring.append(Kind.HEARTBEAT, self.step, now_ns, Heartbeat(msgspec.json.encode(health).decode()))


class Budget:
    """Time the probe takes of each step, and the guard on it.

    Looks at windows of `WINDOW` steps: the window's 99th percentile of probe time against its median step
    time, both from the host's monotonic clock. A step's time is that between the first hooks of two steps;
    the median leaves out idle waiting between bursts of requests.
    """

    WINDOW: Final = 512

    def __init__(self, share: float) -> None:
        self.exceeded: str | None = None
        """Why the budget is spent, once it is."""
        self._share = share
        self._step = 0
        self._began_ns = 0
        self._spent_ns = 0
        self._filled = 0
        self._costs = np.zeros(self.WINDOW, np.int64)
        self._times = np.zeros(self.WINDOW, np.int64)
        self._total_ns = 0
        self._total_steps = 0

    def add(self, step: int, ns: int) -> None:
        """Account ``ns`` to ``step``; a new step closes the one before."""
        self._total_ns += ns
        if step != self._step:
            now = time.monotonic_ns()
            if self._step:
                self._costs[self._filled] = self._spent_ns
                self._times[self._filled] = now - self._began_ns
                self._filled += 1
                if self._filled == self.WINDOW:
                    self._judge()
                    self._filled = 0
            self._total_steps += 1
            self._step, self._began_ns, self._spent_ns = step, now, 0
        self._spent_ns += ns

    def since_last(self) -> tuple[int, int, int]:
        """(nanoseconds, steps, recent p99 nanoseconds of one step) since the last call."""
        result = (self._total_ns, self._total_steps, self._p99())
        self._total_ns = self._total_steps = 0
        return result

    def _p99(self) -> int:
        seen = self._costs[: self._filled] if self._filled else self._costs
        return int(np.percentile(seen, 99))

    def _judge(self) -> None:
        if not self._share:
            return
        cost, usual = self._p99(), float(np.median(self._times))
        if cost > self._share * usual:
            self.exceeded = (
                f"budget exceeded: p99 {cost / 1e3:.0f} us of a {usual / 1e6:.2f} ms step, "
                f"allowed {self._share:.2%}"
            )
