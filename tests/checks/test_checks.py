"""Each check by itself: what it finds, whom it blames, and on what it stays silent."""

from dataclasses import replace

import pytest
from stories import K, Row, Sent, Story, prefill

from stagewatch.agents.identity import Fingerprint


def decoded(pp: int = 3, tp: int = 1) -> tuple[Story, Row]:
    """Request "a" has decoded one step, whose broadcast is on record; and its sound next row."""
    story, row = Story(pp, tp), Row()
    story.step(row)
    story.masks(True)
    story.broadcast((row, Sent()))
    return story, replace(row, computed=13, last=53, drafts=(61, 62))


class TestLastSampled:
    @pytest.mark.parametrize("wrong", [0, 1, 2])
    def test_whoever_does_not_hold_what_was_sent_is_blamed(self, wrong: int) -> None:
        """Any stage, the first and the last included: nobody is taken for innocent."""
        story, row = decoded()
        story.step(row, **{f"r{wrong}": {"last": 9}})
        assert story.told() == [("last-sampled-token", "critical", "a", 2, (wrong,))]

    def test_a_prefilling_row_may_hold_its_slots_former_owners_token(self) -> None:
        story = Story()
        story.step(prefill(), r0={"last": 9})
        assert story.told() == []

    def test_before_the_first_sampling_step_two_ranks_blame_nobody(self) -> None:
        """A prompt prefilled elsewhere: the last stage has not sampled this token either."""
        story = Story(pp=2)
        story.step(Row(computed=8), r0={"last": 9})
        assert story.told() == [("last-sampled-token", "critical", "a", 1, ())]

    def test_what_was_sent_before_a_gap_is_not_held_against_anybody(self) -> None:
        """The request may have run in the step that is missing: its broadcast then would say something else."""
        story, row = decoded(pp=2)
        story.step(row)
        story.lose(0)
        story.step(replace(row, computed=16, last=53), r1={"last": 77})
        assert story.told() == [("last-sampled-token", "critical", "a", 3, ())]


class TestDraftBlock:
    def test_a_block_never_relayed_is_called_that(self) -> None:
        story, row = decoded()
        story.step(row, r0={"drafts": (0, 0)}, r1={"drafts": (0, 0)})
        (incident,) = story.incidents()
        assert (incident.check, incident.blamed) == ("draft-block", (0, 1))
        assert "never relayed" in incident.chain[0].text

    def test_columns_beyond_the_drafts_used_are_padding(self) -> None:
        story, row = decoded()
        story.step(replace(row, draft_count=1), r0={"drafts": (61, 9), "draft_count": 1})
        assert story.told() == []


class TestPositionDrift:
    @pytest.mark.parametrize("wrong", [0, 2])
    def test_whose_count_does_not_follow_is_blamed(self, wrong: int) -> None:
        story, row = decoded()
        story.step(row, **{f"r{wrong}": {"computed": 15, "positions_from": 13}})
        (incident,) = story.incidents()
        assert (incident.check, incident.blamed) == ("position-drift", (wrong,))

    def test_earlier_stages_do_not_outvote_the_last(self) -> None:
        """Without the broadcast two that took the count from it may err alike."""
        story, row = decoded()
        story.step(row)
        story.lose(0)
        story.step(replace(row, computed=16), r2={"computed": 18})
        assert [told[:1] + told[4:] for told in story.told()] == [("position-drift", ())]

    def test_a_mirror_of_its_own_is_outvoted(self) -> None:
        story, row = decoded()
        story.step(row, r0={"ahead": 4})
        assert story.told() == [("position-drift", "critical", "a", 2, (0,))]

    def test_a_mirror_that_leads_on_every_rank_is_sound(self) -> None:
        story, row = decoded()
        story.step(replace(row, ahead=2))
        assert story.told() == []


class TestInputDivergence:
    @pytest.mark.parametrize("wrong", [0, 2])
    def test_whoever_does_not_feed_its_own_state_is_blamed(self, wrong: int) -> None:
        story, row = decoded()
        story.step(row, **{f"r{wrong}": {"ids": (53, 61, 9)}})
        assert story.told() == [("input-divergence", "critical", "a", 2, (wrong,))]

    def test_a_prompt_chunk_is_put_to_the_vote(self) -> None:
        story = Story()
        story.step(prefill(), r1={"ids": (100, 101, 9, 103)})
        assert story.told() == [("input-divergence", "critical", "a", 1, (1,))]

    def test_among_two_nobody_is_outvoted(self) -> None:
        story = Story(pp=2)
        story.step(prefill(), r1={"ids": (100, 101, 9, 103)})
        assert story.told() == [("input-divergence", "critical", "a", 1, ())]


class TestCounts:
    def test_a_count_that_all_ranks_get_wrong_is_noticed(self) -> None:
        story, row = decoded()
        story.step(replace(row, computed=14, positions_from=14))
        assert story.told() == [("count-continuity", "warning", "a", 2, ())]

    def test_a_count_is_not_held_to_a_step_before_a_gap(self) -> None:
        story, row = decoded()
        story.step(row)
        story.lose(1)
        story.step(replace(row, computed=16))
        assert story.told() == []

    def test_a_request_that_starts_again_counts_anew(self) -> None:
        """Preempted and resumed in another slot, which happens to be at the same generation."""
        story, _ = decoded()
        story.step(prefill(slot=3))
        assert story.told() == []

    def test_a_device_ahead_of_its_mirror_is_blamed_alone(self) -> None:
        story, row = decoded()
        story.step(row, r1={"ahead": -1})
        (incident,) = story.incidents()
        assert (incident.check, incident.blamed, len(incident.chain)) == ("position-drift", (1,), 1)

    def test_a_mirror_behind_on_every_rank_blames_none(self) -> None:
        story, row = decoded()
        story.step(replace(row, ahead=-1))
        assert story.told() == [("mirror-behind", "warning", "a", 2, ())]


class TestMask:
    def test_whoever_departs_from_the_fixed_mask_is_blamed(self) -> None:
        """Even among two: both compute the fixed mask from the same host state."""
        story, row = Story(pp=2), Row()
        other = Row("b", slot=1)
        story.step(row, other)
        story.masks(True, True, r0=(True, False), fixed=(True, True))
        assert story.told() == [("mask-disagreement", "critical", "b", 1, (0,))]

    def test_a_mask_that_is_none_on_one_rank_is_the_engines_incident(self) -> None:
        story = Story()
        story.step(prefill(), prefill("b", slot=1))
        story.masks(False, False, r2=(True, True), r0=None, r1=None, fixed=(False, False))
        assert story.told() == [("mask-disagreement", "critical", "", 1, (2,))]

    def test_an_excluded_row_escalates(self) -> None:
        """Dropped: notice. Scheduled again: warning. Then its state differs: critical, dated there."""
        story, row = decoded()
        excluded = [row, replace(row, computed=16), replace(row, computed=19)]
        seen = []
        for place, each in enumerate(excluded):
            story.step(each, **({"r0": {"last": 9}} if place == 2 else {}))
            story.masks(False, fixed=(True,))
            seen.append([told[:2] + told[3:] for told in story.told()])
        assert seen == [
            [("excluded-row", "notice", 2, ())],
            [("excluded-row", "warning", 3, ())],
            [("excluded-row", "critical", 4, seen[2][0][3])],
        ]

    def test_a_final_chunk_that_reaches_the_cap_may_be_left_out(self) -> None:
        story = Story()
        story.step(prefill(chunk=8, cap=9), Row("b", slot=1))
        story.masks(False, True, fixed=(True, True))
        assert story.told() == []

    def test_a_slots_next_owner_is_not_the_excluded_one(self) -> None:
        story, row = decoded()
        story.step(row)
        story.masks(False, fixed=(True,))
        story.step(prefill("a", slot=4))
        assert [told[:2] for told in story.told()] == [("excluded-row", "notice")]


class TestCadence:
    def test_a_decode_too_soon_blames_nobody(self) -> None:
        story, row = Story(), Row()
        story.step(row)
        story.step(replace(row, computed=13), ticks=2)
        assert story.told() == [("decode-cadence", "warning", "a", 2, ())]

    def test_what_follows_from_it_blames_nobody_either(self) -> None:
        story, row = decoded()
        story.step(row, ticks=1, r0={"last": 9}, r1={"last": 9})
        assert story.told() == [("decode-cadence", "critical", "a", 2, ())]

    def test_prefill_chunks_may_follow_at_once(self) -> None:
        """Chunks of a prompt, and streaming input that comes while a token is under way: none needs that token."""
        story = Story()
        story.step(prefill())
        story.step(prefill(computed=4), ticks=1)
        story.step(Row(computed=8), ticks=3)
        story.step(prefill(computed=11, prefill_len=20), ticks=1)
        assert story.told() == []

    def test_without_iterations_nothing_is_said(self) -> None:
        story, row = Story(), Row()
        story.step(row, tick=-1)
        story.step(replace(row, computed=13), tick=-1)
        assert story.told() == []


class TestPathChoice:
    def test_planned_drafts_are_the_same_everywhere(self) -> None:
        story = Story()
        story.step(prefill(), scalars1={"spec_tokens": 0})
        assert story.told() == [("path-choice", "warning", "", 1, (1,))]

    @pytest.mark.parametrize("column", ["graph_mode", "padded_tokens"])
    def test_graphs_and_padding_are_each_stages_own(self, column: str) -> None:
        stages, peers = Story(pp=2, tp=1), Story(pp=2, tp=2)
        for story in (stages, peers):
            story.step(prefill(), scalars1={column: 5})
        assert stages.told() == []
        assert peers.told() == [("path-choice", "warning", "", 1, ())]


class TestBatch:
    def test_a_batch_of_its_own_is_outvoted_and_what_follows_belongs_to_it(self) -> None:
        """Rows exchanged on one rank: their masks and, later, their tokens differ; it is one incident."""
        story, row, other = Story(), Row(), Row("b", slot=1)
        story.step(row, other, r0=(other, row))
        story.masks(True, False, r0=(False, True), fixed=(True, True))
        story.step(replace(row, computed=13), ticks=3, r0={"last": 9})
        (incident,) = story.incidents()
        assert (incident.check, incident.request, incident.blamed) == ("batch-disagreement", "", (0,))
        assert any("different last sampled tokens" in link.text for link in incident.chain)
        assert incident.last_bad_step == 2


class TestPayload:
    def test_a_payload_that_arrives_otherwise_is_found_on_its_receiver(self) -> None:
        story, row = Story(), Row()
        story.step(row)
        story.broadcast((row, Sent()), r1={"tokens": (51, 52, 9)})
        assert story.told() == [("payload-mismatch", "critical", "a", 1, (1,))]

    def test_a_buffer_that_changes_while_it_waits_is_found_at_its_consumption(self) -> None:
        story, row = decoded()
        story.consume(1, (row, Sent()), r0={"drafts": (9, 62)})
        story.step(replace(row), ticks=3)
        assert story.told() == [("payload-mismatch", "critical", "a", 2, (0,))]

    def test_columns_beyond_num_sampled_are_undefined(self) -> None:
        story, row = Story(), Row()
        story.step(row)
        story.broadcast((row, Sent(num_sampled=1, num_rejected=2)), r0={"tokens": (51, 8, 9)})
        assert story.told() == []

    def test_rows_outside_the_mask_are_undefined(self) -> None:
        story, row = Story(), Row()
        story.step(row)
        story.broadcast((row, Sent(applied=False)), r0={"num_sampled": 99})
        assert story.told() == []


class TestSlots:
    def test_an_update_written_to_the_slots_next_owner_harms_that_one(self) -> None:
        story, row = decoded()
        story.step(prefill("b", generation=1))
        story.consume(1, (row, Sent(generation_now=1)), r1={"applied": False})
        story.step(prefill("b", generation=1, computed=4))
        assert story.told() == [("slot-generation", "critical", "b", 3, (0,))]

    def test_an_update_written_to_a_free_slot_is_a_warning(self) -> None:
        story, row = decoded()
        story.step(prefill("b", slot=1))
        story.consume(1, (row, Sent(generation_now=1)), r1={"applied": False})
        story.step(prefill("b", slot=1, computed=4))
        assert story.told() == [("slot-generation", "warning", "a", 3, (0,))]

    def test_a_life_that_ends_as_it_is_harmed_is_not_taken_for_the_next_one(self) -> None:
        # GIVEN "b" in the slot, then preempted, and back in it at the very step before which "a" is written there
        story, row = decoded()
        story.step(prefill("b", generation=1))
        story.consume(1, (row, Sent(generation_now=1)), r1={"applied": False})
        story.step(prefill("b", generation=2))
        # WHEN its new life is struck, too
        story.consume(2, (prefill("b", generation=1), Sent(generation_now=2)), r1={"applied": False})
        story.step(prefill("b", generation=2, computed=4))
        # THEN both lives are told of
        assert story.told() == [
            ("slot-generation", "critical", "b", 3, (0,)),
            ("slot-generation", "critical", "b", 4, (0,)),
        ]

    def test_an_update_that_the_generation_check_dropped_is_sound(self) -> None:
        story, row = decoded()
        story.step(prefill("b", slot=1))
        story.consume(1, (row, Sent(generation_now=1, applied=False)))
        story.step(prefill("b", slot=1, computed=4))
        assert story.told() == []

    def test_a_new_owner_of_the_same_generation_is_a_warning(self) -> None:
        story, _ = decoded()
        story.step(prefill("b", slot=0, generation=1), r1={"generation": 0})
        assert story.told() == [("slot-generation", "warning", "b", 2, (1,))]

    def test_slots_are_each_ranks_own_affair(self) -> None:
        story = Story()
        story.step(Row(), r1={"slot": 5, "generation": 2})
        assert story.told() == []


class TestTensorParallel:
    def test_peers_that_sample_apart_blame_nobody_among_two(self) -> None:
        story, row = Story(pp=2, tp=2), Row()
        story.step(row)
        story.broadcast((row, Sent()), r3={"tokens": (51, 52, 9)}, r1={"tokens": (51, 52, 9)})
        assert story.told() == [("tp-disagreement", "critical", "a", 1, ())]

    def test_among_three_the_odd_one_is_named(self) -> None:
        story, row = Story(pp=1, tp=3), Row()
        story.step(row)
        story.broadcast((row, Sent()), r1={"drafts": (61, 9)})
        assert story.told() == [("tp-disagreement", "critical", "a", 1, (1,))]

    def test_a_last_token_outside_the_mask_is_compared(self) -> None:
        # GIVEN a final prefill chunk that reaches the cap: no other stage needs what it samples, but the user sees it
        story, row, other = Story(pp=2, tp=2), prefill(), Row("b", slot=1)
        story.step(row, other)
        story.broadcast(
            (row, Sent(num_sampled=1, applied=False)), (other, Sent()), r3={"tokens": (9, 52, 53)}
        )
        assert story.told() == [("tp-disagreement", "critical", "a", 1, ())]

    def test_outside_the_mask_drafts_and_rows_that_sample_nothing_may_differ(self) -> None:
        story, row, other = Story(pp=2, tp=2), prefill(), Row("b", slot=1)
        story.step(row, other)
        last = Sent(num_sampled=1, applied=False)
        story.broadcast((row, last), (other, Sent()), r3={"drafts": (9, 9)})
        story.step(prefill(computed=4), other)
        chunk = Sent(num_sampled=0, applied=False)
        story.broadcast((row, chunk), (other, Sent()), r3={"tokens": (9, 9, 9), "num_rejected": 1})
        assert [each for each in story.told() if each[2] == "a"] == []


class TestCollectives:
    def test_a_call_of_another_size_is_named(self) -> None:
        story = Story()
        for _ in range(2):
            story.step(prefill())
            story.call(r2=3 if story.step_now == 1 else 8)
        assert story.told() == [("collective-order", "critical", "", 1, (2,))]

    def test_among_two_nobody_is_blamed(self) -> None:
        story = Story(pp=2)
        story.step(prefill())
        story.call(r1=3)
        story.step(prefill(computed=4))
        assert story.told() == [("collective-order", "critical", "", 1, ())]

    def test_the_two_ends_of_a_transfer_differ_by_nature(self) -> None:
        story = Story(pp=2)
        story.step(prefill())
        story.call("pp_p2p", op="send", r1=None)
        story.call("pp_p2p", op="receive", numel=-1, r0=None)
        story.step(prefill(computed=4))
        assert story.told() == []

    def test_a_call_that_a_rank_may_yet_enter_is_not_missing(self) -> None:
        story = Story()
        story.step(prefill())
        story.call(r0=None)
        assert story.told() == []

    def test_a_call_may_be_missing_from_a_record_that_lost_some(self) -> None:
        story = Story()
        story.step(prefill())
        story.call()
        story.lose(0)
        story.step(prefill(computed=4))
        story.step(prefill(computed=8, prefill_len=20))
        assert story.told() == []


class TestValues:
    def test_a_placeholder_that_is_fed_is_found_on_every_rank_that_feeds_it(self) -> None:
        story = Story()
        story.step(Row(drafts=(-1, -1)))
        assert story.told() == [("value-range", "critical", "a", 1, (0, 1, 2))]

    @pytest.mark.parametrize("fields", [{"ids": (5000,)}, {"positions_from": 900}, {"ids": (-1,)}])
    def test_ids_and_positions_lie_in_their_ranges(self, fields: dict[str, object]) -> None:
        story = Story()
        story.step(prefill(chunk=1), **{f"r{index}": {**fields, "chunk": 1} for index in range(3)})
        assert [told[0] for told in story.told()] == ["value-range"]

    def test_counts_lie_within_the_draft_block(self) -> None:
        story, row = Story(pp=2), Row()
        story.step(row)
        story.broadcast((row, Sent(num_sampled=K + 1, num_rejected=1)))
        assert [told[0] for told in story.told()] == ["value-range"]


def test_configurations_are_compared_before_the_first_step() -> None:
    story = Story()
    story.fingerprints = {
        index: (Fingerprint("drafter", "tied" if index else "untied"),) for index in range(3)
    }
    story.step(prefill())
    incidents = story.incidents()
    assert [(i.check, i.first_bad_step, i.blamed, i.fields) for i in incidents] == [
        ("configuration", 0, (0,), ("drafter",))
    ]


def draft(loaded: str) -> tuple[Fingerprint, ...]:
    return (Fingerprint("draft_configured", "hidden size 64"), Fingerprint("draft_loaded", loaded))


def test_a_draft_model_that_contradicts_its_own_configuration_is_told_before_the_first_step() -> None:
    """GIVEN one rank that drafts, THEN it is held against its own word: no other rank has anything to compare."""
    story = Story()
    story.fingerprints = {2: draft("hidden size 32")}
    story.step(prefill())
    (incident,) = story.incidents()
    assert (incident.check, incident.first_bad_step, incident.blamed) == ("configuration", 0, (2,))
    assert [value.text for value in incident.values] == ["hidden size 64", "hidden size 32"]


def test_draft_models_of_two_stages_may_be_configured_otherwise() -> None:
    """Loading a drafter changes its configuration on the last stage alone."""
    story = Story()
    story.fingerprints = {1: (Fingerprint("draft_configured", "hidden size 32"),), 2: draft("hidden size 64")}
    story.step(prefill())
    assert story.incidents() == []
