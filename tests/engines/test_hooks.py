"""What the hooks record of each variant: every stage's step, as it was, and nothing else."""

from collections.abc import Callable

import numpy as np
import pytest
from standins import RELAYING, VARIANTS, Pipeline, Request, expected_text
from watched import Watched

from stagewatch.agents.record import Kind, Record

Watch = Callable[..., Watched]
INPUT_COLUMNS = (
    "request",
    "slot",
    "generation",
    "mirror",
    "computed",
    "prefill_len",
    "scheduled",
    "draft_count",
    "cap",
    "last_sampled",
    "input_ids",
    "positions",
    "prefilling",
)


def requests() -> list[Request]:
    """Chunked prefill, mixed batches, an abort whose slot is taken again at once."""
    return [
        Request("long", [1, 2, 3, 4, 5, 6], 14),
        Request("aborted", [3, 3], 50, aborted=6),
        Request("heir", [9, 8], 12, arrives=6),
        Request("late", [5] * 9, 12, arrives=3),
    ]


def by_step(records: list[Record], kind: Kind) -> dict[int, Record]:
    """Records of a kind by step."""
    return {record.step: record for record in records if record.kind is kind}


@pytest.mark.parametrize("variant", ["A+relay", "B", "C", "D"])
class TestRelayingVariants:
    def test_ranks_agree_in_every_row(self, watch: Watch, variant: str) -> None:
        watched = watch(variant)
        watched.pipeline.serve(requests())
        first, last = (by_step(watched.records(stage), Kind.INPUTS) for stage in (0, 1))
        assert list(first) == list(last) == list(range(1, len(first) + 1))
        assert len(first) > 10
        for step, record in first.items():
            for name in INPUT_COLUMNS:
                assert np.array_equal(getattr(record.body, name), getattr(last[step].body, name)), (
                    step,
                    name,
                )
            used = record.body.draft_count > 0
            assert np.array_equal(record.body.draft_tokens[used], last[step].body.draft_tokens[used])

    def test_the_payload_is_the_same_sent_received_and_consumed(self, watch: Watch, variant: str) -> None:
        watched = watch(variant)
        watched.pipeline.serve(
            [Request("alone", [4] * 6, 3)]
        )  # its first chunk is a batch that broadcasts nothing
        watched.pipeline.serve(requests())
        sent = by_step(watched.records(1), Kind.SENT)
        assert {record.body.skipped for record in sent.values()} == {0, 1}
        received = by_step(watched.records(0), Kind.RECEIVED)
        consumed = by_step(watched.records(0), Kind.CONSUMED)
        assert list(sent) == list(received)
        assert len(consumed) >= len([r for r in sent.values() if not r.body.skipped]) - 2
        for step, record in sent.items():
            same = [received[step].body]
            if step in consumed:
                body = consumed[step].body
                held = body.generation == body.generation_now
                assert np.array_equal(body.applied.astype(bool), record.body.applied.astype(bool) & held)
                same.append(body)
                assert record.step < consumed[step].body.at <= record.step + 2
            for body in same:
                assert body.skipped == record.body.skipped
                assert np.array_equal(body.request, record.body.request)
                assert np.array_equal(body.num_sampled, record.body.num_sampled)
                assert np.array_equal(body.draft_tokens, record.body.draft_tokens)
                for row, count in enumerate(record.body.num_sampled):
                    assert np.array_equal(body.tokens[row, :count], record.body.tokens[row, :count])


@pytest.mark.parametrize("variant", VARIANTS)
class TestEveryVariant:
    def test_the_probe_changes_no_output(self, watch: Watch, variant: str) -> None:
        served = watch(variant).pipeline.serve(requests())
        assert served == Pipeline(variant).serve(requests())

    def test_the_mask_stands_beside_the_fixed_one_once_a_step(self, watch: Watch, variant: str) -> None:
        watched = watch(variant)
        # Its one token ends it: A's mask drops it wrongly, C's and D's rightly, B's keeps it.
        watched.pipeline.serve([Request("one", [7, 7], 1), *requests()])
        for stage in (0, 1):
            records = watched.records(stage)
            masks = [record for record in records if record.kind is Kind.MASK]
            assert [m.step for m in masks] == sorted(by_step(records, Kind.INPUTS))
            differs = any(not np.array_equal(m.body.engine, m.body.fixed) for m in masks)
            assert differs == variant.startswith("A")

    def test_slots_are_bound_and_freed_with_their_generation(self, watch: Watch, variant: str) -> None:
        watched = watch(variant)
        watched.pipeline.serve(requests())
        stories = []
        for stage in (0, 1):
            records = watched.records(stage)
            bound = {r.body.request_id: r.body for r in records if r.kind is Kind.BIND}
            assert sorted(bound) == ["aborted", "heir", "late", "long"]
            aborted, heir = bound["aborted"], bound["heir"]
            assert (heir.slot, heir.generation) == (aborted.slot, aborted.generation + 1)
            assert (heir.prompt_len, heir.cap) == (2, 14)
            freed = [(r.body.slot, r.body.generation, r.body.request) for r in records if r.kind is Kind.FREE]
            assert (aborted.slot, 0, aborted.request) in freed
            stories.append([(r.kind, r.step, r.body) for r in records if r.kind in (Kind.BIND, Kind.FREE)])
        assert stories[0] == stories[1]

    def test_a_payload_for_a_slot_taken_again_is_not_applied(self, watch: Watch, variant: str) -> None:
        watched = watch(variant)
        watched.pipeline.serve(requests())
        stale = [
            body
            for record in watched.records(0)
            if record.kind is Kind.CONSUMED
            for body in [record.body]
            if not np.array_equal(body.generation, body.generation_now)
        ]
        assert stale
        for body in stale:
            assert not body.applied[body.generation != body.generation_now].any()

    def test_collectives_are_recorded_before_the_call_with_their_size(
        self, watch: Watch, variant: str
    ) -> None:
        watched = watch(variant)
        watched.pipeline.serve([Request("one", [4, 2], 5)])
        lists = [
            [
                (r.step, r.body.what, r.body.numel)
                for r in watched.records(stage)
                if r.kind is Kind.COLLECTIVE and r.body.what.startswith("pp_broadcast ")
            ]
            for stage in (0, 1)
        ]
        first = [numel for step, _, numel in lists[1] if step == 1]
        if variant in RELAYING:
            assert lists[0] == lists[1]
            assert first == [1 if variant == "D" else 4, 2, 3]  # a prompt's step verifies no drafts
        else:
            assert first == [1, 2]  # the sender's width on a step without drafts
            assert [numel for step, _, numel in lists[0] if step == 1] == [4, 2]

    def test_hidden_states_are_recorded_under_the_step_they_belong_to(
        self, watch: Watch, variant: str
    ) -> None:
        watched = watch(variant)
        watched.pipeline.serve(requests())
        lists = [
            [
                (r.step, r.body.what, r.body.numel)
                for r in watched.records(stage)
                if r.kind is Kind.COLLECTIVE and r.body.what.startswith("pp_p2p ")
            ]
            for stage in (0, 1)
        ]
        steps = sorted(by_step(watched.records(0), Kind.INPUTS))
        assert lists == [
            [(step, "pp_p2p send float32", 2) for step in steps],
            [(step, "pp_p2p receive unknown", -1) for step in steps],
        ]

    def test_dummy_batches_leave_no_trace(self, watch: Watch, variant: str) -> None:
        watched = watch(variant)
        before = [len(watched.records(stage)) for stage in (0, 1)]
        for rank in watched.pipeline.ranks:
            rank.runner.execute_model(None, None, True)
            rank.runner.execute_model(None, dummy_run=True)
        assert [len(watched.records(stage)) for stage in (0, 1)] == before
        watched.pipeline.serve([Request("real", [4, 2], 5)])
        assert by_step(watched.records(0), Kind.INPUTS)[1].body.tick == 1

    def test_nothing_is_recorded_while_suspended(self, watch: Watch, variant: str) -> None:
        watched = watch(variant)
        for hooks in watched.hooks:
            hooks.suspended = True
        watched.pipeline.serve([Request("warm-up", [4, 2], 5)])
        for hooks in watched.hooks:
            hooks.suspended = False
        served = watched.pipeline.serve([Request("real", [4, 2], 5)])
        assert served["real"][:5] == expected_text(Request("real", [4, 2], 5))
        for stage in (0, 1):
            records = watched.records(stage)
            assert [r.body.request_id for r in records if r.kind is Kind.BIND] == ["real"]
            assert min(by_step(records, Kind.INPUTS)) == 1

    def test_removed_wrappers_leave_the_engine_as_it_was(self, watch: Watch, variant: str) -> None:
        watched = watch(variant)
        rank = watched.pipeline.ranks[0]
        assert "execute_model" in vars(rank.runner)
        for hooks in watched.hooks:
            hooks.remove()
        for target in (rank.runner, rank.runner.req_states, rank.runner.pp_handler):
            assert not [name for name, value in vars(target).items() if callable(value)]
        assert not hasattr(rank.pp_utils.compute_need_sampled_mask, "__wrapped__")
        assert not hasattr(rank.distributed.broadcast, "__wrapped__")


class TestHarm:
    def test_an_exception_in_a_hook_disarms_the_rank_and_the_engine_runs_on(self, watch: Watch) -> None:
        """GIVEN an engine that hides a column WHEN it serves THEN text is right and the rank says why it disarmed."""
        watched = watch("C")
        rank = watched.pipeline.ranks[0]
        del rank.runner.req_states.max_seq_len
        states = rank.runner.req_states
        states.max_seq_len = Unreadable(states)  # type: ignore[assignment]
        request = Request("r", [1, 2], 6)
        served = watched.pipeline.serve([request])
        assert served["r"][:6] == expected_text(request)
        assert [probe.armed for probe in watched.probes] == [False, True]
        notes = [r.body.text for r in watched.records(0) if r.kind is Kind.NOTE]
        assert len(notes) == 1
        assert notes[0].startswith("disarmed: ")
        assert "the engine hides it" in notes[0]

    def test_the_engines_own_exception_passes_through(self, watch: Watch) -> None:
        watched = watch("C")
        with pytest.raises(AttributeError, match="finished"):
            watched.pipeline.ranks[0].runner.execute_model(object())
        assert watched.probes[0].armed

    def test_a_forked_child_writes_nothing(self, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
        watched = watch("C")
        monkeypatch.setattr("os.getpid", lambda: -1)
        watched.pipeline.serve([Request("r", [1, 2], 6)])
        assert watched.records(0) == []


class Unreadable:
    """A column that takes values and gives none, from the moment a batch asks for rows."""

    def __init__(self, states: object) -> None:
        self._values: dict[int, int] = {}

    def __setitem__(self, slot: int, value: int) -> None:
        self._values[slot] = value

    def take(self, slots: np.ndarray) -> np.ndarray:
        raise ValueError("the engine hides it")

    def __getitem__(self, slot: object) -> int:
        if isinstance(slot, np.ndarray):
            return np.array([self._values[int(each)] for each in slot])  # type: ignore[return-value]
        return self._values[slot]  # type: ignore[index]
