"""Legitimate events that change what a step looks like: recorded as they were, equal on both stages."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import standins
import torch
from standins import RELAYING, SLOTS, Request, expected_text
from watched import Watched

from stagewatch.agents.engines import vllm_batch
from stagewatch.agents.engines.staging import HostStaging
from stagewatch.agents.engines.vllm_batch import Plan, Rows
from stagewatch.agents.record import Inputs, Kind, Record, request_key

Watch = Callable[..., Watched]


def bodies(records: list[Record], kind: Kind) -> dict[int, object]:
    """Bodies of a kind by step."""
    return {record.step: record.body for record in records if record.kind is kind}


def assert_stages_agree(watched: Watched) -> list[Inputs]:
    """Both stages fed the same; returns what the first fed."""
    first, last = (bodies(watched.records(stage), Kind.INPUTS) for stage in (0, 1))
    assert list(first) == list(last)
    for step, body in first.items():
        for name in (
            "request",
            "slot",
            "generation",
            "computed",
            "scheduled",
            "draft_count",
            "input_ids",
            "tick",
        ):
            assert np.array_equal(getattr(body, name), getattr(last[step], name)), (step, name)
    return list(first.values())


def consumed_and_sent_agree(watched: Watched) -> int:
    """Every consumed payload is the one sent; returns how many."""
    sent, consumed = bodies(watched.records(1), Kind.SENT), bodies(watched.records(0), Kind.CONSUMED)
    for step, body in consumed.items():
        assert np.array_equal(body.num_sampled, sent[step].num_sampled)
        assert np.array_equal(body.draft_tokens, sent[step].draft_tokens)
    return len(consumed)


class TestVariableWidth:
    """Release 0.33: steps that verify drafts are k+1 wide, the others one; drafts are relayed where any are planned."""

    def test_widths_change_by_step_and_agree(self, watch: Watch) -> None:
        watched = watch("D")
        watched.pipeline.planned = lambda step: 3 if step % 7 < 4 else 0
        request = Request("r", [1, 2, 3], 30)
        served = watched.pipeline.serve([request, Request("other", [4, 4], 20, arrives=1)])
        assert served["r"][:30] == expected_text(request)
        fed = assert_stages_agree(watched)
        assert {int(count) for body in fed for count in body.draft_count} == {0, 3}
        assert consumed_and_sent_agree(watched) > 5
        sent, received = bodies(watched.records(1), Kind.SENT), bodies(watched.records(0), Kind.RECEIVED)
        assert {body.draft_tokens.shape[1] for body in sent.values()} == {0, 3}
        for step, body in sent.items():
            assert body.draft_tokens.shape == received[step].draft_tokens.shape
        assert {body.tokens.shape[1] for body in received.values()} == {1, 4}
        lists = [
            [
                (r.step, r.body.numel)
                for r in watched.records(stage)
                if r.kind is Kind.COLLECTIVE and r.body.what.startswith("pp_broadcast ")
            ]
            for stage in (0, 1)
        ]
        assert lists[0] == lists[1]


@pytest.mark.parametrize("variant", RELAYING)
class TestFewerDrafts:
    def test_placeholders_in_the_draft_table_are_recorded_as_they_are(
        self, watch: Watch, variant: str
    ) -> None:
        """GIVEN steps that plan two of three drafts THEN the third is -1 on both stages."""
        watched = watch(variant)
        watched.pipeline.planned = lambda step: 2
        watched.pipeline.serve([Request("r", [1, 2], 16)])
        fed = assert_stages_agree(watched)
        decoding = [body for body in fed if body.draft_count.any()]
        assert decoding
        assert all(body.draft_count.tolist() == [2] for body in decoding)
        for stage in (0, 1):
            found = bodies(watched.records(stage), Kind.INPUTS).values()
            assert {int(b.draft_tokens[0, 2]) for b in found if b.draft_count.any()} == {-1}
        assert {body.spec_tokens for body in fed} == {2}

    def test_rows_of_one_batch_verify_different_numbers(self, watch: Watch, variant: str) -> None:
        """GIVEN a grammar that lets one request verify a single draft THEN each row has its own count."""
        watched = watch(variant)
        watched.pipeline.serve([Request("free", [1, 2], 16), Request("strict", [3, 4], 12, drafts_max=1)])
        fed = assert_stages_agree(watched)
        assert any(sorted(body.draft_count.tolist()) == [1, 3] for body in fed)
        assert consumed_and_sent_agree(watched) > 3


class TestAdaptiveVerification:
    def test_counts_are_the_devices_because_the_hosts_are_bounds(self) -> None:
        """GIVEN a budget of four tokens that the device gave to the second row THEN it is recorded so."""
        states = SimpleNamespace(
            num_computed_tokens=SimpleNamespace(gpu=torch.tensor([5, 6], dtype=torch.int32)),
            last_sampled_tokens=torch.zeros(2, 1, dtype=torch.int64),
            draft_tokens=torch.zeros(2, 3, dtype=torch.int64),
            max_seq_len=np.array([20, 20], np.int32),
        )
        slots = np.array([0, 1])
        batch = SimpleNamespace(
            idx_mapping=torch.from_numpy(slots),
            idx_mapping_np=slots,
            num_reqs=2,
            num_tokens=5,
            num_tokens_after_padding=8,
            query_start_loc_np=np.array([0, 3, 5], np.int32),
            query_start_loc=torch.tensor([0, 1, 4, 4], dtype=torch.int32),
            cu_num_logits=torch.tensor([0, 1, 4], dtype=torch.int32),
            num_draft_tokens_per_req=np.array([3, 3], np.int32),
            num_computed_tokens_np=np.array([5, 6], np.int32),
            prefill_len_np=np.array([2, 2], np.int32),
            is_prefilling_np=np.array([False, False]),
            input_ids=torch.arange(8, dtype=torch.int32),
            positions=torch.arange(8, dtype=torch.int64),
        )
        rows = Rows(np.array([7, 8], np.uint64), slots.astype(np.int32), np.zeros(2, np.int32))
        found: list[Inputs] = []
        vllm_batch.stage_inputs(
            HostStaging(), batch, states, rows, Plan(1, 1, -1, 3), True, lambda body, step: found.append(body)
        )
        (body,) = found
        assert body.scheduled.tolist() == [1, 3]
        assert body.draft_count.tolist() == [0, 2]
        assert body.input_ids.tolist() == [0, 1, 2, 3]
        assert body.positions.tolist() == [0, 1, 2, 3]


class TestStepsOfOtherKinds:
    def test_drafts_of_a_prefilling_row_are_recorded_and_marked_unused(self, watch: Watch) -> None:
        """GIVEN a slot whose owner before left other drafts on each stage THEN they are recorded, with a count of 0."""
        watched = watch("C")
        stale = {0: 11, 1: 22}

        def poison(step: int) -> None:
            if step == 1:
                for stage, value in stale.items():
                    states = watched.pipeline.ranks[stage].runner.req_states
                    states.draft_tokens[states.req_id_to_index["r"]] = value

        watched.pipeline.between = poison
        watched.pipeline.serve([Request("r", [1, 2, 3, 4, 5, 6], 4)])
        for stage, value in stale.items():
            body = bodies(watched.records(stage), Kind.INPUTS)[2]
            assert (body.draft_tokens.tolist(), body.draft_count.tolist()) == ([[value] * 3], [0])
            assert body.prefilling.tolist() == [1]

    def test_iterations_without_a_batch_count_as_ticks_and_not_as_steps(self, watch: Watch) -> None:
        watched = watch("C")
        watched.pipeline.serve([Request("r", [1, 2], 9)])  # its decodes are two iterations apart
        fed = assert_stages_agree(watched)
        assert [body.tick for body in fed] == [1 + 2 * index for index in range(len(fed))]

    def test_dummy_batches_between_real_ones_change_nothing(self, watch: Watch) -> None:
        quiet, disturbed = watch("C"), watch("C")

        def dummies(step: int) -> None:
            for rank in disturbed.pipeline.ranks:
                rank.runner.execute_model(None, None, True)

        disturbed.pipeline.between = dummies
        request = Request("r", [1, 2, 3, 4, 5], 12)
        served = [
            each.pipeline.serve([request, Request("s", [9], 6, arrives=2)]) for each in (quiet, disturbed)
        ]
        assert served[0] == served[1]
        for stage in (0, 1):
            lists = [[(r.kind, r.step) for r in each.records(stage)] for each in (quiet, disturbed)]
            assert lists[0] == lists[1]

    def test_payloads_left_over_from_warm_up_take_no_real_one_with_them(self, watch: Watch) -> None:
        """GIVEN a warm-up that leaves entries in the queue THEN every later payload is recorded as consumed."""
        watched = watch("C")
        for hooks in watched.hooks:
            hooks.suspended = True
        watched.pipeline.serve([Request("warm-up", [4, 2], 1)])
        leftover = watched.pipeline.ranks[0].runner.pp_handler.queue
        for hooks in watched.hooks:
            hooks.suspended = False
        kept = [entry for entry in leftover if entry is not None]
        if not kept:
            leftover[-1] = self.entry_of_warm_up(watched)
        watched.pipeline.serve([Request("real", [4, 2], 9)])
        received = [s for s, b in bodies(watched.records(0), Kind.RECEIVED).items() if b.applied.any()]
        consumed = bodies(watched.records(0), Kind.CONSUMED)
        assert received[0] in consumed
        assert watched.probes[0]._drops == 0

    @staticmethod
    def entry_of_warm_up(watched: Watched) -> object:
        """An entry for a slot that is free again."""
        rank = watched.pipeline.ranks[0]
        zeros, slots = torch.zeros(1, dtype=torch.int32), np.array([0])
        return rank.pp_utils.PendingRecv(
            None, torch.zeros(1, 4, dtype=torch.int64), zeros, zeros, torch.from_numpy(slots), slots,
            np.array([True]), rank.runner.pp_handler.req_idx_gen_np[slots] - 1, torch.zeros(1, 3, dtype=torch.int64),
        )  # fmt: skip


class TestSlots:
    def test_an_id_that_comes_again_after_an_abort_is_bound_again(self, watch: Watch) -> None:
        """GIVEN a request that ends and resumes under its id, as a preempted one THEN its lives are told apart."""
        watched = watch("C")
        again = Request("same", [3, 3], 8, arrives=5)
        served = watched.pipeline.serve([Request("same", [3, 3], 50, aborted=4), again])
        assert served["same"][:8] == expected_text(again)
        assert_stages_agree(watched)
        for stage in (0, 1):
            bound = [r.body for r in watched.records(stage) if r.kind is Kind.BIND]
            assert [body.request_id for body in bound] == ["same", "same"]
            assert bound[0].request == bound[1].request
            assert (bound[0].slot, bound[0].generation) != (bound[1].slot, bound[1].generation)
            assert all(body.request.all() for body in bodies(watched.records(stage), Kind.INPUTS).values())

    def test_thousands_of_aborts_leave_nothing_behind(self, watch: Watch) -> None:
        watched = watch("C")
        for start in range(0, 2000, SLOTS):
            watched.pipeline.serve([Request(f"r{start + i}", [1, 2], 50, aborted=2) for i in range(SLOTS)])
        for hooks in watched.hooks:
            assert len(hooks._keys._by_id) == len(hooks._keys._id_of_slot) == 0
            assert len(hooks._deferred) <= len(watched.pipeline.ranks[0].runner.pp_handler.queue)
        assert [probe.armed for probe in watched.probes] == [True, True]

    def test_a_slot_taken_without_being_freed_forgets_its_former_request(self) -> None:
        keys = vllm_batch.Keys()
        keys.bind("former", 3, 1)
        keys.bind("owner", 3, 2)
        assert keys.of(["former", "owner"]).tolist() == [0, 2]

    def test_a_very_long_request_id_is_cut_and_keyed_whole(self, watch: Watch) -> None:
        watched = watch("C")
        names = ["x" * 100_000 + end for end in "ab"]
        watched.pipeline.serve([Request(name, [1, 2], 4) for name in names])
        bound = [r.body for r in watched.records(0) if r.kind is Kind.BIND]
        assert [len(body.request_id) for body in bound] == [4096, 4096]
        assert bound[0].request != bound[1].request
        assert_stages_agree(watched)


class TestExtremes:
    """The largest and the oddest batches, on every variant that relays drafts."""

    @pytest.mark.parametrize("variant", RELAYING)
    def test_fifteen_drafts(self, watch: Watch, variant: str) -> None:
        watched = watch(variant, drafts=15)
        request = Request("r", [1, 2, 3], 40)
        assert watched.pipeline.serve([request])["r"][:40] == expected_text(request)
        fed = assert_stages_agree(watched)
        assert max(int(body.draft_count.max()) for body in fed) == 15
        assert consumed_and_sent_agree(watched) > 1

    def test_a_thousand_rows(self, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(standins, "SLOTS", 1024)
        watched = watch("C", drafts=1)
        watched.pipeline.serve([Request(f"r{i}", [i % 200 + 1, 2], 3) for i in range(1024)])
        fed = assert_stages_agree(watched)
        assert max(len(body.request) for body in fed) == 1024
        assert all(len(set(body.request.tolist())) == len(body.request) for body in fed)
        assert [probe._drops for probe in watched.probes] == [0, 0]

    @pytest.mark.parametrize("variant", RELAYING)
    def test_a_batch_of_prefill_chunks_alone_broadcasts_nothing(self, watch: Watch, variant: str) -> None:
        watched = watch(variant)
        watched.pipeline.serve([Request(name, list(range(1, 11)), 4) for name in ("a", "b")])
        for stage, kind in ((0, Kind.RECEIVED), (1, Kind.SENT)):
            skipped = [step for step, body in bodies(watched.records(stage), kind).items() if body.skipped]
            masks = bodies(watched.records(stage), Kind.MASK)
            assert skipped == [step for step, body in masks.items() if body.engine_none] == [1, 2]

    def test_request_ids_of_any_script_and_length(self, watch: Watch) -> None:
        names = ["é" * 512, "请求-1", "a\tb\x1b[31m", "🙂" * 128]
        watched = watch("C")
        served = watched.pipeline.serve([Request(name, [1, 2], 4) for name in names])
        assert sorted(served) == sorted(names)
        for stage in (0, 1):
            bound = [r.body.request_id for r in watched.records(stage) if r.kind is Kind.BIND]
            assert sorted(bound) == sorted(names)
        assert_stages_agree(watched)

    def test_a_batch_that_stays_the_same_while_a_request_ends_and_comes_again(self, watch: Watch) -> None:
        """GIVEN rows of the same ids at every step WHEN one is bound anew THEN no key is left over from before."""
        watched = watch("C")
        for _ in range(3):
            watched.pipeline.serve([Request("same", [5, 6], 6), Request("other", [7], 6)])
        for stage in (0, 1):
            keys = {
                int(key)
                for body in bodies(watched.records(stage), Kind.INPUTS).values()
                for key in body.request
            }
            assert keys == {request_key("same"), request_key("other")}
