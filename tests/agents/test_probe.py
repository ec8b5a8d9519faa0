"""The probe's contract: it records, and whatever happens to it, the engine never notices."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from foundation_records import body_of, decoding, identity, same
from msgspec.structs import replace

from stagewatch.agents.budget import Budget
from stagewatch.agents.probe import REASON_MAX, REQUEST_ID_MAX, SLOTS_MAX, Health, Probe
from stagewatch.agents.record import Bind, Collective, Free, Heartbeat, Kind, Mask, Note, Record, request_key
from stagewatch.agents.ring import RingReader, RingWriter

Make = Callable[..., Probe]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A probe whose only heartbeat is its first, unless told otherwise."""

    def make(capacity: int = 1 << 20, heartbeat_s: float = 3600, **options: Any) -> Probe:
        ring = RingWriter(tmp_path, identity(), capacity)
        return Probe(ring, identity(), heartbeat_s=heartbeat_s, **options)

    return make


@pytest.fixture
def probe(make: Make) -> Probe:
    return make()


def records(probe: Probe) -> list[Record]:
    return list(RingReader(probe._ring.path).read(1 << 20))


def recorded(probe: Probe) -> list[Record]:
    """What was recorded, heartbeats aside."""
    return [found for found in records(probe) if found.kind is not Kind.HEARTBEAT]


def beats(probe: Probe) -> list[Health]:
    return [
        msgspec.json.decode(found.body.health, type=Health)
        for found in records(probe)
        if isinstance(found.body, Heartbeat)
    ]


class TestRecording:
    def test_a_step_is_numbered_by_its_inputs(self, probe: Probe) -> None:
        mask = np.array([True, False, True, True])
        for step in (1, 2):
            probe.collective("pp_p2p", "receive", "bfloat16", 10, 2, step=step)
            probe.inputs(decoding(step))
            probe.mask(mask, None, 4)
            probe.payload(Kind.CONSUMED, step - 1, body_of(Kind.CONSUMED))  # type: ignore[arg-type]
        assert [(found.kind, found.step) for found in recorded(probe)] == [
            (kind, step + late)
            for step in (1, 2)
            for kind, late in ((Kind.COLLECTIVE, 0), (Kind.INPUTS, 0), (Kind.MASK, 0), (Kind.CONSUMED, -1))
        ]
        assert same(recorded(probe)[1].body, decoding(1))

    def test_inputs_that_are_ready_late_go_under_the_step_that_began(self, probe: Probe) -> None:
        first, second = probe.begin(), probe.begin()
        probe.inputs(decoding(2), second)
        probe.inputs(decoding(1), first)
        assert [found.step for found in recorded(probe)] == [2, 1]
        assert probe.step == 2

    @pytest.mark.parametrize(
        "engine",
        [
            np.array([True, False, True]),
            np.array([True, True, False, False, True, True])[::2],
            np.array([7, 0, -1]),
            [True, False, True],
        ],
        ids=["bool", "scattered", "integers", "list"],
    )
    def test_masks_of_any_dtype_and_layout(self, probe: Probe, engine: Any) -> None:
        probe.mask(engine, None, 3)
        [found] = recorded(probe)
        expected = Mask(0, 1, np.array([1, 0, 1], np.uint8), np.zeros(3, np.uint8))
        assert same(found.body, expected)

    def test_a_missing_mask_is_told_from_an_empty_one(self, probe: Probe) -> None:
        probe.mask(None, np.zeros(2, np.bool_), 2)
        [found] = recorded(probe)
        assert same(found.body, Mask(1, 0, np.zeros(2, np.uint8), np.zeros(2, np.uint8)))

    def test_binds_and_frees_carry_the_request(self, probe: Probe) -> None:
        probe.bind("r", 300, 2, 10, 20)
        probe.free(300, 2)
        probe.free(999, 0)
        key = request_key("r")
        assert [found.body for found in recorded(probe)] == [
            Bind(300, 2, 10, 20, key, "r"),
            Free(300, 2, key),
            Free(999, 0, 0),
        ]

    def test_a_request_id_of_any_length_and_content(self, probe: Probe) -> None:
        # A client chooses it: it must not be able to switch the watch off.
        long = "ä" * 5_000_000
        probe.bind(long, 0, 0, 1)
        probe.bind("\ud800\n\0", 1, 0, 1)
        first, second = (found.body for found in recorded(probe))
        assert isinstance(first, Bind) and isinstance(second, Bind)
        assert (first.request_id, first.request) == (long[:REQUEST_ID_MAX], request_key(long))
        assert second.request == request_key("\ud800\n\0")
        assert probe.armed

    def test_keys_of_slots(self, probe: Probe) -> None:
        for slot in (0, 1, 255, 256, 5000):
            probe.bind(f"r{slot}", slot, 1, 1)
        slots = np.array([[5000, 0, 256], [255, 1, 7]])
        expected = [[request_key(f"r{slot}") if slot != 7 else 0 for slot in row] for row in slots.tolist()]
        assert probe.keys_of(slots).tolist() == expected

    @pytest.mark.parametrize("slot", [-1, -(2**31), 2**31 - 1, 257, 1 << 40])
    def test_a_slot_never_bound_has_no_key_whatever_its_number(self, probe: Probe, slot: int) -> None:
        probe.bind("first", 0, 1, 1)
        probe.bind("last", 255, 1, 1)
        assert probe.keys_of(np.array([slot])).tolist() == [0]

    def test_collectives_are_counted_across_threads(self, probe: Probe) -> None:
        in_threads(lambda: [probe.collective("g", "op", "int64", 1) for _ in range(200)])
        indices = [found.body.index for found in recorded(probe) if isinstance(found.body, Collective)]
        assert sorted(indices) == list(range(1, 801))


def broken_calls() -> dict[str, Callable[[Probe], None]]:
    """A call of each recording method that cannot succeed."""
    inputs, sent = decoding(), body_of(Kind.SENT)
    return {
        "bind": lambda probe: probe.bind("r", -1, 0, 0),
        "bind-far": lambda probe: probe.bind("r", SLOTS_MAX, 0, 0),
        "bind-none": lambda probe: probe.bind(None, 0, 0, 0),  # type: ignore[arg-type]
        "free": lambda probe: probe.free(0, None),  # type: ignore[arg-type]
        "inputs": lambda probe: probe.inputs(replace(inputs, slot=inputs.slot[:1])),
        "inputs-none": lambda probe: probe.inputs(None),  # type: ignore[arg-type]
        "mask": lambda probe: probe.mask(np.ones(3, np.bool_), None, 4),
        "payload": lambda probe: probe.payload(Kind.SENT, 2**70, sent),  # type: ignore[arg-type]
        "collective": lambda probe: probe.collective("g", "op", "int64", 2**70),
        "note": lambda probe: probe.note(5),  # type: ignore[arg-type]
        "spent": lambda probe: probe.spent("long"),  # type: ignore[arg-type]
    }


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


class Trap:
    """Raises when it is put into a text."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __format__(self, _: str) -> str:
        raise self.error


class TestPeace:
    """A failure disarms the probe, once, with one line and a note, and never reaches the engine."""

    @pytest.mark.parametrize("call", broken_calls().values(), ids=broken_calls())
    def test_a_failure_in_any_method(
        self, probe: Probe, caplog: pytest.LogCaptureFixture, call: Callable[[Probe], None]
    ) -> None:
        for _ in range(3):
            call(probe)
        probe.note("more")
        assert not probe.armed
        [line] = caplog.messages
        assert line.startswith("stagewatch: rank dp0.pp0.tp0 disarmed: ")
        assert line.endswith("The engine is not affected.")
        assert [found.body for found in recorded(probe)] == [Note("disarmed: " + beats(probe)[-1].reason)]
        assert beats(probe)[-1].armed is False
        assert beats(probe)[-1].reason in line

    @pytest.mark.parametrize("call", broken_calls().values(), ids=broken_calls())
    def test_a_failure_of_the_ring_itself(
        self, probe: Probe, caplog: pytest.LogCaptureFixture, call: Callable[[Probe], None]
    ) -> None:
        probe._ring.close()
        call(probe)
        probe.note("more")
        probe.heartbeat()
        probe.close()
        [line] = caplog.messages
        assert "which its ring could not take" in line
        assert records(probe) == []

    def test_the_lock_is_free_after_a_failure(self, probe: Probe) -> None:
        probe.bind("r", 0, 2**70, 0)
        assert not probe.armed
        assert probe._lock.acquire(blocking=False)

    @pytest.mark.parametrize("error", [UnspeakableError(), ValueError("two\nlines"), MemoryError()])
    def test_whatever_the_exception_the_line_is_one(
        self, probe: Probe, caplog: pytest.LogCaptureFixture, error: Exception
    ) -> None:
        probe.collective("g", Trap(error), "int64", 1)  # type: ignore[arg-type]
        [line] = caplog.messages
        assert type(error).__name__ in line
        assert "\n" not in line

    def test_an_endless_reason_is_cut(self, probe: Probe) -> None:
        probe.disarm("x" * 10_000_000)
        assert beats(probe)[-1].reason == "x" * REASON_MAX

    def test_a_log_handler_that_raises(self, probe: Probe) -> None:
        class Raising(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                raise OSError("the log is full")

        handler = Raising()
        logging.getLogger("stagewatch").addHandler(handler)
        try:
            probe.disarm("a reason")
        finally:
            logging.getLogger("stagewatch").removeHandler(handler)
        assert beats(probe)[-1].reason == "a reason"

    def test_threads_that_fail_at_once_say_so_once(
        self, probe: Probe, caplog: pytest.LogCaptureFixture
    ) -> None:
        in_threads(lambda: probe.bind("r", -1, 0, 0))
        assert len(caplog.messages) == 1
        assert [found.kind for found in recorded(probe)] == [Kind.NOTE]

    def test_what_ends_the_engine_is_let_through(self, probe: Probe) -> None:
        with pytest.raises(SystemExit):
            probe.collective("g", Trap(SystemExit()), "int64", 1)  # type: ignore[arg-type]
        assert probe.armed

    def test_a_record_that_does_not_fit_is_dropped_and_counted(self, make: Make) -> None:
        # A prefill too long for a small ring: the next steps are worth as much as before.
        probe = make(1 << 16)
        probe.inputs(decoding(rows=2000))
        probe.dropped(2)
        probe.inputs(decoding())
        probe.heartbeat()
        assert probe.armed
        assert [found.step for found in recorded(probe)] == [2]
        assert beats(probe)[-1].drops == 3


class TestHeartbeat:
    def test_the_first_record_brings_one_and_then_it_takes_its_time(self, probe: Probe) -> None:
        for _ in range(5):
            probe.inputs(decoding())
        assert [found.kind for found in records(probe)].count(Kind.HEARTBEAT) == 1

    def test_it_can_be_asked_for(self, probe: Probe) -> None:
        probe.inputs(decoding())
        probe.spent(1500)
        probe.heartbeat()
        assert beats(probe)[-1] == Health(True, "", 1, 0, 1500, 1, 0)

    def test_it_does_not_wait_for_a_wall_clock_that_was_set_back(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        probe = make(heartbeat_s=0)
        probe.note("before")
        monkeypatch.setattr(time, "time_ns", lambda: 0)
        probe.note("after")
        assert len(beats(probe)) == 2

    def test_time_spent_is_told_once(self, probe: Probe) -> None:
        for step in range(1, 4):
            probe.inputs(decoding())
            probe.spent(step * 1000)
            probe.spent(500)
        probe.heartbeat()
        probe.heartbeat()
        assert [(beat.probe_ns, beat.busy_steps) for beat in beats(probe)[-2:]] == [(7500, 3), (0, 0)]
        assert beats(probe)[-1].probe_p99_ns == 2500  # of the two steps that are complete


class TestBudget:
    def test_a_probe_that_takes_too_much_of_a_step_takes_itself_out(
        self, make: Make, caplog: pytest.LogCaptureFixture
    ) -> None:
        probe = make(8 << 20, budget_share=0.05)
        for _ in range(Budget.WINDOW + 2):
            probe.inputs(decoding())
            probe.spent(10**9)  # a second of each step, which took next to nothing
        assert not probe.armed
        assert "budget exceeded" in beats(probe)[-1].reason
        assert "allowed 5.00%" in beats(probe)[-1].reason
        assert len(caplog.messages) == 1

    def test_it_is_off_where_the_share_is_0(self, make: Make) -> None:
        probe = make(8 << 20)
        for _ in range(Budget.WINDOW + 2):
            probe.inputs(decoding())
            probe.spent(10**9)
        assert probe.armed

    def test_rare_slow_steps_are_not_held_against_it(self, make: Make) -> None:
        # One step in 256 is beyond the 99th percentile: the garbage collector, a heartbeat.
        probe = make(8 << 20, budget_share=1.0)
        for step in range(Budget.WINDOW + 2):
            probe.inputs(decoding())
            probe.spent(10**12 if step % 256 == 0 else 0)
        assert probe.armed

    @pytest.mark.parametrize(("steps", "expected"), [(1, 0), (2, 1), (101, 99), (Budget.WINDOW + 1, 507)])
    def test_the_99th_percentile_of_the_steps_seen(self, steps: int, expected: int) -> None:
        budget = Budget(0)
        for step in range(1, steps + 1):
            budget.add(step, step)
        assert budget.since_last()[2] == expected


def in_threads(work: Callable[[], object], threads: int = 4) -> None:
    """Run ``work`` in several threads that start together."""
    barrier = threading.Barrier(threads)

    def run() -> None:
        barrier.wait()
        work()

    running = [threading.Thread(target=run) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


class TestThreads:
    def test_concurrent_calls_keep_the_ring_sound(self, make: Make) -> None:
        probe = make(8 << 20)

        def work() -> None:
            name = threading.get_ident()
            for index in range(300):
                probe.note(f"{name} {index}")
                probe.heartbeat()

        in_threads(work)
        found = records(probe)
        assert [each.seq for each in found] == list(range(len(found)))
        by_thread: dict[str, list[int]] = {}
        for each in recorded(probe):
            assert isinstance(each.body, Note)
            name, index = each.body.text.split()
            by_thread.setdefault(name, []).append(int(index))
        assert list(by_thread.values()) == [list(range(300))] * 4

    def test_drops_are_counted_across_threads(self, probe: Probe) -> None:
        in_threads(lambda: [probe.dropped() for _ in range(10_000)])
        probe.heartbeat()
        assert beats(probe)[-1].drops == 40_000

    def test_nothing_comes_after_another_thread_disarmed(self, probe: Probe) -> None:
        # GIVEN a thread that found the probe armed, and waits for the lock
        class Late:
            def __enter__(self) -> None:
                # WHEN the one that holds it disarms
                probe._lock = lock
                probe.disarm("by another thread")
                lock.acquire()

            def __exit__(self, *_: object) -> None:
                lock.release()

        lock = probe._lock
        probe._lock = Late()  # type: ignore[assignment]
        probe.note("late")
        # THEN the last word is the reason
        assert [found.body for found in recorded(probe)] == [Note("disarmed: by another thread")]
        assert records(probe)[-1].kind is Kind.HEARTBEAT

    def test_nothing_comes_after_the_end_whoever_is_recording(self, make: Make) -> None:
        probe = make(8 << 20)
        go_on = True

        def record() -> None:
            while go_on:
                probe.note("x")

        threads = [threading.Thread(target=record) for _ in range(3)]
        for thread in threads:
            thread.start()
        while probe._ring.records_written < 100:
            pass
        probe.close()
        written = probe._ring.records_written
        reader = RingReader(probe._ring.path)
        assert reader.closed
        go_on = False
        for thread in threads:
            thread.join()
        assert probe._ring.records_written == written == len(records(probe))


class TestTheEnd:
    def test_the_engine_says_that_it_leaves(self, probe: Probe, caplog: pytest.LogCaptureFixture) -> None:
        probe.inputs(decoding())
        probe.close()
        found = records(probe)
        assert found[-1].kind is Kind.HEARTBEAT
        assert RingReader(probe._ring.path).closed
        for call in broken_calls().values():
            call(probe)
        probe.close()
        probe.disarm("late")
        assert len(records(probe)) == len(found)
        assert caplog.messages == []


class TestFork:
    """A fork of the engine's process has the ring's memory, but it is not its ring."""

    def in_child(self, work: Callable[[], object]) -> int:
        """Exit status of a fork that does ``work``: 0 if it came to its end."""
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)  # a lock that is never released ends the test, not the suite
            try:
                work()
            except BaseException:  # noqa: BLE001
                os._exit(1)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def test_it_writes_nothing(self, probe: Probe) -> None:
        probe.inputs(decoding())
        before = probe._ring.path.read_bytes()

        def work() -> None:
            assert not probe.armed
            probe.inputs(decoding())
            probe.note("child")
            probe.heartbeat()
            probe.disarm("child")
            probe.close()
            with pytest.raises(Exception, match="not of its fork"):
                probe._ring.append(Kind.NOTE, 0, 0, Note("child"))
            probe._ring.close()

        assert self.in_child(work) == 0
        assert probe._ring.path.read_bytes() == before
        assert probe.armed
        probe.note("parent")
        assert len(recorded(probe)) == 2

    def test_it_does_not_wait_for_a_thread_it_does_not_have(self, probe: Probe) -> None:
        with probe._lock:
            assert self.in_child(lambda: (probe.note("x"), probe.dropped(), probe.close())) == 0
