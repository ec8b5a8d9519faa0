"""The probe: what an engine adapter calls. Engine neutral; it copies and stores, and does nothing else.

Its contract is the engine's peace. No public method raises, whatever happens inside: an exception disarms
the probe, once, with one line and a note in the ring, and every later call returns at once. It takes no lock
that another thread holds for longer than a store, hashes nothing, waits for nothing. In a fork of the
engine's process it is disarmed from the start: the ring belongs to the parent.
"""

import contextlib
import functools
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Concatenate, Final, ParamSpec, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.budget import Budget
from stagewatch.agents.errors import one_line
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
    RecordTooLongError,
    request_key,
)
from stagewatch.agents.ringwriter import RingWriter

log = logging.getLogger("stagewatch")

P = ParamSpec("P")

SLOTS_MAX: Final = 1 << 20
"""Slots are numbered below this; a larger one is a fault of the adapter, not a request."""

REQUEST_ID_MAX: Final = 4096
"""Characters of a request id that are recorded. The key stands for all of it."""

REASON_MAX: Final = 1024
"""Characters of the reason for disarming that are kept."""


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
    ended: bool = False
    """True in the last heartbeat of an engine that leaves of its own accord."""


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
        except (KeyboardInterrupt, SystemExit):
            raise  # a signal's: it ends the engine, and came while this ran
        except BaseException as error:  # noqa: BLE001  # whatever it is, it must not reach the engine
            try:
                self.disarm(f"{method.__name__} failed: {one_line(error)}")
            except Exception:  # noqa: BLE001  # see `fell`
                self.fell, self.armed = (method.__name__, error.with_traceback(None)), False

    return cast("Callable[Concatenate[Probe, P], None]", call)


_probes: Final["weakref.WeakSet[Probe]"] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for probe in list(_probes):
        probe._forked()


os.register_at_fork(after_in_child=_leave_to_parent)


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
        self.fell: tuple[str, BaseException] | None = None
        """What failed, and how, where the stack had no room left to say so: `report` does, from another thread."""
        self.step = 0
        """Ordinal of the step being executed; 0 before the first."""
        self._ring: Final = ring
        self._lock = threading.Lock()
        self._reason = ""
        self._noted = self._logged = False
        self._drops = 0
        self._collectives = itertools.count(1)
        # Entry slot + 1, between two that stay 0: what `keys_of` clips to is no request.
        self._slot_keys: U64 = np.zeros(256, np.uint64)
        self._heartbeat_ns: Final = int(heartbeat_s * 1e9)
        self._next_heartbeat_ns = 0
        self._budget: Final = Budget(budget_share)
        _probes.add(self)

    @guarded
    def bind(self, request_id: str, slot: int, generation: int, prompt_len: int, cap: int = UNKNOWN) -> None:
        """A request took ``slot``; ``cap`` is prompt plus the most output tokens, in tokens."""
        key = request_key(request_id)
        if not 0 <= slot < SLOTS_MAX:
            raise ValueError(f"slot {slot} is outside 0 to {SLOTS_MAX - 1}")
        if slot + 2 >= len(self._slot_keys):
            self._slot_keys = np.concatenate([self._slot_keys, np.zeros(slot + 3, np.uint64)])
        self._slot_keys[slot + 1] = key
        self._store(Kind.BIND, Bind(slot, generation, prompt_len, cap, key, request_id[:REQUEST_ID_MAX]))

    @guarded
    def free(self, slot: int, generation: int) -> None:
        """``slot`` was released; ``generation`` is the one that ended."""
        self._store(Kind.FREE, Free(slot, generation, int(self.keys_of(np.asarray(slot)))))

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
        engine_rows = np.zeros(rows, np.bool_) if engine is None else np.asarray(engine, np.bool_)
        fixed_rows = np.zeros(rows, np.bool_) if fixed is None else np.asarray(fixed, np.bool_)
        if not engine_rows.shape == fixed_rows.shape == (rows,):
            raise ValueError(f"masks of shapes {engine_rows.shape} and {fixed_rows.shape} for {rows} rows")
        body = Mask(
            int(engine is None), int(fixed is None), engine_rows.view(np.uint8), fixed_rows.view(np.uint8)
        )
        self._store(Kind.MASK, body)

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
        body = Collective(next(self._collectives), numel, group_size, f"{group} {op} {dtype}")
        self._store(Kind.COLLECTIVE, body, step)

    @guarded
    def note(self, text: str) -> None:
        """Leave a sentence for the operator."""
        self._store(Kind.NOTE, Note(text))

    @guarded
    def heartbeat(self) -> None:
        """Write a heartbeat now, whatever the time."""
        with self._lock:
            if self.armed:
                self._beat()

    def keys_of(self, slots: NDArray[np.integer]) -> U64:
        """Request keys of the requests that hold ``slots``; shape as given. 0 for a slot never bound."""
        keys: U64 = self._slot_keys.take(slots + 1, mode="clip")
        return keys

    @guarded
    def spent(self, ns: int) -> None:
        """Account ``ns`` nanoseconds of hook time to the current step."""
        self._budget.add(self.step, ns)
        if self._budget.exceeded is not None:
            self.disarm(self._budget.exceeded)

    def dropped(self, count: int = 1) -> None:
        """Count records that an adapter had to give up."""
        with self._lock:
            self._drops += count

    def disarm(self, reason: str) -> None:
        """Stop recording for good. Raises nothing but RecursionError, where the stack has no room for the call."""
        with self._lock:
            if not self.armed:
                return
            self.armed = False
            self._reason = " ".join(reason.split())[:REASON_MAX]
        self.report()

    def report(self) -> None:
        """Say in the ring and in the log why the probe disarmed, where that has not been said yet."""
        with self._lock:
            if self.fell is not None and not self._reason:
                what, error = self.fell
                self._reason = f"{what} failed: {one_line(error)}"[:REASON_MAX]
            if self.armed or not self._reason:
                return
            self._noted = self._noted or self._note_disarmed()
            if self._logged:
                return
            self._logged = True
        try:
            log.warning(
                "stagewatch: rank %s disarmed: %s%s. The engine is not affected.",
                self.identity.rank,
                self._reason,
                "" if self._noted else " (which its ring could not take)",
            )
        except Exception:  # noqa: BLE001  # the engine's own log handlers, or no room on the stack
            self._logged = False

    def close(self) -> None:
        """The engine is leaving of its own accord: say so in the ring. Never raises."""
        with self._lock:
            if self.armed:
                with contextlib.suppress(Exception):
                    self._beat(ended=True)
            self.armed = False
            with contextlib.suppress(Exception):
                self._ring.close()

    def _store(self, kind: Kind, body: Body, step: int | None = None) -> None:
        with self._lock:
            if not self.armed:
                return  # another thread closed or disarmed it while this one came here
            try:
                self._ring.append(kind, self.step if step is None else step, time.time_ns(), body)
            except RecordTooLongError:
                self._drops += 1
            if time.monotonic_ns() >= self._next_heartbeat_ns:
                self._beat()

    def _beat(self, *, ended: bool = False) -> None:
        """Append a heartbeat; the lock is held."""
        self._next_heartbeat_ns = time.monotonic_ns() + self._heartbeat_ns
        ns, steps, p99 = self._budget.since_last()
        health = Health(self.armed, self._reason, self.step, self._drops, ns, steps, p99, ended)
        body = Heartbeat(msgspec.json.encode(health).decode())
        self._ring.append(Kind.HEARTBEAT, self.step, time.time_ns(), body)

    def _note_disarmed(self) -> bool:
        """Leave the reason in the ring, if that still works; the lock is held."""
        try:
            self._ring.append(Kind.NOTE, self.step, time.time_ns(), Note(f"disarmed: {self._reason}"))
            self._beat()
        except Exception:  # noqa: BLE001  # the ring itself may be what failed
            return False
        return True

    def _forked(self) -> None:
        # The parent's lock may have been held, by a thread that this process does not have.
        self._lock = threading.Lock()
        self.armed = False
