"""Whatever goes wrong in the hooks, the engine serves what it would have served, and somebody is told."""

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from standins import Pipeline, Request
from watched import Watched, hooks_of, make_probe

from stagewatch.agents.budget import Budget
from stagewatch.agents.engines.staging import HostStaging
from stagewatch.agents.engines.vllm import _Timer
from stagewatch.agents.engines.vllm_hooks import RankHooks
from stagewatch.agents.engines.wrapping import Wrapping
from stagewatch.agents.errors import StagewatchError
from stagewatch.agents.probe import Probe
from stagewatch.agents.record import Kind
from stagewatch.agents.ring import RingReader

Watch = Callable[..., Watched]

BOTH, FIRST, LAST = (0, 1), (0,), (1,)
HOOKS = {
    "_execute": BOTH,
    "_prepared": BOTH,
    "_sampled": LAST,
    "_added": BOTH,
    "_freed": BOTH,
    "_masked": BOTH,
    "_collective": BOTH,
    "_broadcast": LAST,
    "_relayed": LAST,
    "_sending": FIRST,
    "_receiving": LAST,
    "_received": FIRST,
    "_consuming": FIRST,
    "_consumed": FIRST,
}
REQUESTS = [
    Request("r", [1, 2, 3, 4, 5], 14),
    Request("s", [3, 3], 50, aborted=6),
    Request("t", [9], 8, arrives=6),
]


class UnspeakableError(Exception):
    """An exception that fails again when it is asked what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class PanicError(BaseException):
    """What an extension of another language raises when it gives up: no Exception."""


ERRORS = [
    ValueError("two\nlines"),
    UnspeakableError(),
    MemoryError(),
    RecursionError("maximum recursion depth exceeded"),
    torch.OutOfMemoryError("device out of memory"),
    PanicError(),
    StopIteration(),
]


def wrapped(watched: Watched, stage: int) -> list[str]:
    """Names of the wrappers that a stage's objects carry."""
    rank = watched.pipeline.ranks[stage]
    owners = (rank.runner, rank.runner.req_states, rank.runner.pp_handler, rank.pp_utils, rank.distributed)
    return [n for owner in owners for n, v in vars(owner).items() if hasattr(v, "__wrapped__")]


class TestEveryHook:
    def test_the_list_is_complete(self, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
        installed: set[str] = set()
        wrap = Wrapping.wrap

        def note(self: Wrapping, target: Any, name: str, before: Any = None, after: Any = None) -> None:
            installed.update(hook.__name__ for hook in (before, after) if hook is not None)
            wrap(self, target, name, before, after)

        monkeypatch.setattr(Wrapping, "wrap", note)
        watch("C")
        assert installed == set(HOOKS)

    @pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
    @pytest.mark.parametrize("hook", HOOKS)
    def test_an_exception_disarms_its_rank_and_goes_no_further(
        self, watch: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
        hook: str, error: BaseException,
    ) -> None:  # fmt: skip
        def failing(*_: Any) -> None:
            raise error

        failing.__name__ = hook
        monkeypatch.setattr(RankHooks, hook, failing)
        watched = watch("C")
        assert watched.pipeline.serve(REQUESTS) == Pipeline("C").serve(REQUESTS)
        assert [probe.armed for probe in watched.probes] == [stage not in HOOKS[hook] for stage in BOTH]
        said = f"{hook.lstrip('_')} failed: {type(error).__name__}"
        for stage in HOOKS[hook]:
            notes = [r.body.text for r in watched.records(stage) if r.kind is Kind.NOTE]
            assert [note.startswith(f"disarmed: {said}") for note in notes] == [True]
            assert ("two lines" in notes[0]) == isinstance(error, ValueError)
        messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == len(HOOKS[hook])
        assert all(said in message and "\n" not in message for message in messages)


class Sampler:
    """Something of the engine's that is hooked."""

    def sample(self, deeper: int = 0) -> str:
        return self.sample(deeper - 1) if deeper else "sampled"


def at_the_edge(call: Callable[[], str], room: int) -> str:
    """What ``call`` returns where the stack has room for ``room`` frames more."""

    def descend(left: int) -> str:
        return call() if left <= 0 else descend(left - 1)

    return descend(sys.getrecursionlimit() - len(inspect.stack(0)) - room)


def passed_on(call: Callable[..., str]) -> Callable[..., str]:
    """A wrapper that does nothing: how much of the stack it takes is up to Python's version."""

    def passing(*args: Any, **kwargs: Any) -> str:
        return call(*args, **kwargs)

    return passing


def least_room(call: Callable[[], str]) -> int:
    """The room that ``call`` needs to return."""
    for room in range(200):
        with contextlib.suppress(RecursionError):
            at_the_edge(call, room)
            return room
    raise AssertionError("it needs more than it should")


class TestTheEdgeOfTheStack:
    """An engine deep in its own calls has room left for itself, and none for what a hook needs."""

    @pytest.mark.parametrize("side", ["before", "after"])
    def test_a_hook_without_room_is_told_of_by_another_thread(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, side: str
    ) -> None:
        """GIVEN every depth near the limit WHEN the engine makes a hooked call THEN it returns and is told of."""
        told_late = 0
        enough = least_room(passed_on(Sampler().sample))
        for room in range(enough, enough + 200):
            directory = tmp_path / str(room)
            directory.mkdir(mode=0o700)
            probe, path = make_probe(directory, "C", 0, 3)
            target, wrapping = Sampler(), Wrapping(probe)

            def sampling(*_: object, probe: Probe = probe) -> None:
                probe.note(Sampler().sample(2))

            wrapping.wrap(target, "sample", **{side: sampling})
            caplog.clear()
            assert at_the_edge(target.sample, room) == "sampled"
            if probe.armed:
                break
            told_late += not caplog.records
            probe.report()
            probe.report()
            assert ["RecursionError" in record.getMessage() for record in caplog.records] == [True]
            notes = [r.body.text for r in RingReader(path).read() if r.kind is Kind.NOTE]
            # The call may have failed behind its own record.
            assert len([note for note in notes if note.startswith("disarmed: ")]) == 1
        assert probe.armed
        assert told_late, "no depth was without room to say so"


class TestSignals:
    @pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
    @pytest.mark.parametrize("hook", ["_execute", "_masked"])
    def test_what_ends_the_engine_is_let_through(
        self, watch: Watch, monkeypatch: pytest.MonkeyPatch, hook: str, signal: type[BaseException]
    ) -> None:
        """GIVEN a signal that arrives while a hook runs THEN it ends the engine as it would have."""

        def interrupted(*_: Any) -> None:
            raise signal

        monkeypatch.setattr(RankHooks, hook, interrupted)
        watched = watch("C")
        with pytest.raises(signal):
            watched.pipeline.serve(REQUESTS)
        assert [probe.armed for probe in watched.probes] == [True, True]


class Noting(HostStaging):
    """A staging that remembers which events it was told to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.afters: list[object] = []

    def take(self, pieces: Any, publish: Any, after: Any = None) -> None:
        """Note and publish."""
        self.afters.append(after)
        super().take(pieces, publish, after)


class TestDeferred:
    def test_an_engine_that_never_consumes_is_not_made_to_keep_its_tensors(self, watch: Watch) -> None:
        watched = watch("C")
        handler = watched.pipeline.ranks[0].runner.pp_handler
        hooks, probe = watched.hooks[0], watched.probes[0]
        batch = one_row()
        for number in range(20):
            for size in (4, 2, 3):
                handler.broadcast_group.wire.sent.append(torch.zeros(size))
            handler.queue[-1] = None
            probe.step = number
            handler.receive(batch)
        assert len(hooks._deferred) <= len(handler.queue)
        assert probe.armed
        assert probe._drops == 20 - len(hooks._deferred)

    def test_values_that_the_engine_does_not_wait_for_are_waited_for(self, watch: Watch) -> None:
        """GIVEN a payload of which no row is applied THEN it is copied after the event of its arrival."""
        watched = watch("C")
        hooks = watched.hooks[0]
        staging = Noting()
        hooks._staging = staging
        watched.pipeline.serve(
            [Request("aborted", [3, 3], 50, aborted=5), Request("other", [4, 4], 20, arrives=1)]
        )
        consumed = {r.step: r.body for r in watched.records(0) if r.kind is Kind.CONSUMED}
        applied = [bool(body.applied.any()) for body in consumed.values()]
        assert set(applied) == {True, False}
        received = len([r for r in watched.records(0) if r.kind is Kind.RECEIVED and not r.body.skipped])
        assert len([after for after in staging.afters if after is not None]) == received + applied.count(
            False
        )

    def test_a_probe_that_is_disarmed_in_mid_step_keeps_nothing(self, watch: Watch) -> None:
        watched = watch("C")
        watched.pipeline.between = lambda step: watched.probes[0].disarm("told to") if step == 5 else None
        assert watched.pipeline.serve(REQUESTS) == Pipeline("C").serve(REQUESTS)
        kept = len(watched.hooks[0]._deferred)
        watched.pipeline.serve([Request("more", [1, 2], 20)])
        assert len(watched.hooks[0]._deferred) == kept <= 2
        watched.hooks[0].remove()
        assert len(watched.hooks[0]._deferred) == 0

    def test_a_place_that_was_not_filled_anew_is_counted_and_not_recorded_twice(self, watch: Watch) -> None:
        """GIVEN an engine that receives again into the place of the entry before THEN only one is recorded."""
        watched = watch("C")
        watched.pipeline.serve([Request("r", [1, 2], 3)])
        hooks, handler = watched.hooks[0], watched.pipeline.ranks[0].runner.pp_handler
        zeros, slots = torch.zeros(1, dtype=torch.int32), np.array([0])
        handler.queue[-1] = watched.pipeline.ranks[0].pp_utils.PendingRecv(
            None,
            torch.zeros(1, 4),
            zeros,
            zeros,
            torch.from_numpy(slots),
            slots,
            np.array([True]),
            slots,
            None,
        )
        before = len([r for r in watched.records(0) if r.kind is Kind.RECEIVED])
        hooks._received(None, None, (one_row(),), {})
        hooks._received(None, None, (one_row(),), {})
        assert len([r for r in watched.records(0) if r.kind is Kind.RECEIVED]) == before + 1
        assert (watched.probes[0]._drops, watched.probes[0].armed) == (1, True)


def one_row() -> SimpleNamespace:
    """A batch of one decoding row."""
    slots = np.array([0])
    return SimpleNamespace(
        req_ids=["r"], num_reqs=1, idx_mapping=torch.from_numpy(slots), idx_mapping_np=slots,
        num_computed_tokens_np=np.array([5]), num_scheduled_tokens=np.array([4]), prefill_len_np=np.array([2]),
        is_prefilling_np=np.array([False]), max_seq_len_np=None,
    )  # fmt: skip


class TestBudget:
    def test_a_rank_over_its_budget_disarms_and_takes_its_wrappers_off(
        self, watch: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """GIVEN a budget that hooks cannot keep WHEN a window of steps is over THEN no wrapper is left."""
        monkeypatch.setattr(Budget, "WINDOW", 8)
        watched = watch("C", budget_share=1e-6)
        timers = [
            _Timer(probe, lambda: None, hooks.remove, 0.01)
            for probe, hooks in zip(watched.probes, watched.hooks, strict=True)
        ]
        for timer in timers:
            timer.start()
        assert wrapped(watched, 0)
        request = Request("r", [1, 2], 40)
        assert watched.pipeline.serve([request]) == Pipeline("C").serve([request])
        for timer in timers:
            timer.join(timeout=30)
        assert [probe.armed for probe in watched.probes] == [False, False]
        assert [wrapped(watched, stage) for stage in (0, 1)] == [[], []]
        assert all("budget exceeded: p99" in record.getMessage() for record in caplog.records)
        assert len(caplog.records) == 2

    def test_hook_time_is_accounted_to_its_step(self, watch: Watch) -> None:
        watched = watch("C")
        watched.pipeline.serve([Request("r", [1, 2], 20)])
        ns, steps, p99 = watched.probes[0]._budget.since_last()
        assert steps == watched.probes[0].step
        assert 0 < p99 <= ns


class TestOneRankAProcess:
    def test_a_second_worker_is_refused_while_the_first_is_armed(self, watch: Watch) -> None:
        watched = watch("C")
        rank = watched.pipeline.ranks[0]
        with pytest.raises(StagewatchError, match="another worker of this process is armed"):
            hooks_of(rank, watched.probes[1]).install()
        watched.probes[0].disarm("its engine is gone")
        second = hooks_of(rank, watched.probes[1])
        second.install()
        second.remove()

    def test_removal_while_the_engine_calls_is_harmless(self, watch: Watch) -> None:
        """GIVEN a thread that takes the wrappers off in mid-run THEN the engine serves the same."""
        watched = watch("C")
        removers: list[threading.Thread] = []

        def remove(step: int) -> None:
            if step == 4:
                removers.extend(threading.Thread(target=hooks.remove) for hooks in watched.hooks)
                for thread in removers:
                    thread.start()

        watched.pipeline.between = remove
        assert watched.pipeline.serve(REQUESTS) == Pipeline("C").serve(REQUESTS)
        for thread in removers:
            thread.join()
        assert wrapped(watched, 0) == wrapped(watched, 1) == []
