"""Mutation: every check, exception and rule of blame, disabled in turn, must be missed by some test.

Each mutation names the tests that must fail without it; they are run in this process with the part taken out.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import test_checks
import test_faults
import test_shifts
import test_silence
import test_stalls
import test_verdicts
from simulated import Run, plan

from stagewatch.monitor import batches, blame, correlate, engine, gaps, history, lanes, links, recount, shifts
from stagewatch.monitor.checks import (
    cadence,
    collective_order,
    configuration,
    excluded_row,
    input_divergence,
    last_sampled,
    path_choice,
    rank_silent,
    rank_unarmed,
    registry,
    stall,
    waits,
)
from stagewatch.monitor.checks import payload_mismatch as payload

Mutation = Callable[[pytest.MonkeyPatch], None]
Test = Callable[[], None]


def fault(name: str, **overrides: Any) -> Test:
    """The harness's assertion on one fault."""

    def run() -> None:
        config = plan(name, from_step=test_faults.from_step(name), times=1, requests=40, **overrides)
        test_faults.assert_found(Run(config), cut_seed=1)

    return run


def without(check: str) -> Mutation:
    """Take a check out of the registry."""

    def mutate(monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("CHUNK_CHECKS", "ROW_CHECKS", "SYMPTOM_CHECKS", "ARMING_CHECKS", "LIVENESS_CHECKS"):
            kept = tuple(each for each in getattr(registry, name) if check != each.NAME)
            monkeypatch.setattr(registry, name, kept)

    return mutate


def replacing(target: Any, name: str, value: Any) -> Mutation:
    return lambda monkeypatch: monkeypatch.setattr(target, name, value)


def in_checks(name: str, value: Any, *modules: str) -> Mutation:
    """Replace a name that several checks import."""

    def mutate(monkeypatch: pytest.MonkeyPatch) -> None:
        for module in modules:
            monkeypatch.setattr(importlib.import_module(f"stagewatch.monitor.checks.{module}"), name, value)

    return mutate


def method(cls: type | ModuleType, name: str, *arguments: Any) -> Test:
    """One of the unit tests, of a class or of a module."""
    return lambda: getattr(cls() if isinstance(cls, type) else cls, name)(*arguments)


LIVE = test_verdicts.TestLiveness
CHECKS: dict[str, list[Test]] = {
    "configuration": [fault("drafter-layout-differs")],
    "rank-unarmed": [method(LIVE, "test_a_rank_that_never_arms_is_named_after_a_minute")],
    "rank-silent": [
        method(LIVE, "test_a_rank_whose_sidecar_died_is_silent_and_the_engine_not_stalled"),
    ],
    "stall": [fault("op-dropped")],
    "ordinal-shift": [method(test_shifts, "test_shifts_again_and_back_are_one_incident")],
    "batch-disagreement": [fault("batch-reordered")],
    "slot-generation": [fault("stale-slot-write")],
    "tp-disagreement": [fault("tp-samples-apart")],
    "payload-mismatch": [fault("payload-altered")],
    "decode-cadence": [fault("cadence-unguarded")],
    "mirror-behind": [method(test_checks.TestCounts, "test_a_mirror_behind_on_every_rank_blames_none")],
    "path-choice": [fault("drafter-skipped")],
    "collective-order": [fault("size-mismatch")],
    "mask-disagreement": [fault("mask-differs")],
    "excluded-row": [fault("old-mask")],
    "draft-block": [fault("drafts-not-relayed")],
    "last-sampled-token": [fault("tokens-at-wrong-offset")],
    "position-drift": [fault("rejection-not-subtracted")],
    "input-divergence": [method(test_checks.TestInputDivergence, "test_among_two_nobody_is_outvoted")],
    "count-continuity": [method(test_checks.TestCounts, "test_a_count_that_all_ranks_get_wrong_is_noticed")],
    "value-range": [
        method(test_checks.TestValues, "test_a_placeholder_that_is_fed_is_found_on_every_rank_that_feeds_it")
    ],
}


def _first_is_right(values: Any) -> Any:
    return values[0] if len(values) > 1 else None


def _all_equal(values: Any) -> Any:
    return None


def _masked_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    original = payload._same_rows

    def everything_applies(before: Any, after: Any) -> Any:
        before, after = original(before, after)
        ones = np.ones(len(after.applied), np.uint8)
        return type(before)(**{**_columns(before), "applied": ones}), type(after)(
            **{**_columns(after), "applied": ones}
        )

    monkeypatch.setattr(payload, "_same_rows", everything_applies)


def _columns(block: Any) -> dict[str, Any]:
    return {name: getattr(block, name) for name in block.__slots__}


def _counted_anyway(original: Any) -> Any:
    def progress(self: Any, index: int, newest: int) -> Any:
        return replace(original(self, index, newest), shared_calls=self._books[index].shared)

    return progress


def _every_stage(self: Any, chunk: Any, group: Any, history: Any) -> Any:
    for column in ("spec_tokens", "graph_mode", "padded_tokens") if chunk.inputs is not None else ():
        yield from self._differs(chunk.inputs, column, tuple(range(len(chunk.inputs.blocks))))


def _chunks_decode(self: Any, chunk: Any, group: Any, history: Any) -> Any:
    if chunk.inputs is not None:
        blocks = [replace(each, prefilling=np.zeros_like(each.prefilling)) for each in chunk.inputs.blocks]
        chunk = replace(chunk, inputs=replace(chunk.inputs, blocks=tuple(blocks)))
    return EXAMINE_CADENCE(self, chunk, group, history)


EXAMINE_CADENCE = cadence.Cadence.examine


RULES: dict[str, tuple[Mutation, list[Test]]] = {
    "blame: the broadcast says who is wrong": (
        in_checks("previous_broadcast", lambda *_: None, "position_drift", "input_divergence"),
        [fault("rollback-broken")],
    ),
    "blame: rank 0 is not taken for innocent": (
        replacing(blame, "majority", _first_is_right),
        [method(test_verdicts.TestBlame, "test_a_strict_majority_of_more_than_two")],
    ),
    "blame: a majority blames": (replacing(blame, "majority", _all_equal), [fault("mirror-inflates")]),
    "blame: evidence with a gap accuses nobody": (
        replacing(history.History, "complete", lambda *_: True),
        [method(test_checks.TestLastSampled, "test_what_was_sent_before_a_gap_is_not_held_against_anybody")],
    ),
    "blame: the first sampling step has no authority": (
        in_checks("sampled_before", lambda *_: True, "last_sampled", "draft_block"),
        [method(test_checks.TestLastSampled, "test_before_the_first_sampling_step_two_ranks_blame_nobody")],
    ),
    "exception: a final chunk at the cap": (
        replacing(
            excluded_row,
            "finishes",
            lambda *_: False,
        ),
        [method(test_checks.TestMask, "test_a_final_chunk_that_reaches_the_cap_may_be_left_out")],
    ),
    "exception: point-to-point calls": (
        replacing(collective_order, "POINT_TO_POINT", frozenset()),
        [method(test_checks.TestCollectives, "test_the_two_ends_of_a_transfer_differ_by_nature")],
    ),
    "exception: rows outside the mask": (
        _masked_exceptions,
        [method(test_checks.TestPayload, "test_rows_outside_the_mask_are_undefined")],
    ),
    "alignment: steps of which records were lost": (
        replacing(gaps.Gaps, "note", lambda *_: None),
        [method(test_checks.TestCollectives, "test_a_call_may_be_missing_from_a_record_that_lost_some")],
    ),
    "alignment: batches must be the same": (
        replacing(batches, "FINGERPRINT", ()),
        [fault("batch-reordered")],
    ),
    "alignment: a shift needs several batches": (
        replacing(shifts, "MATCHES", 1),
        [method(test_shifts, "test_too_few_batches_after_a_shift_accuse_nobody", 1)],
    ),
    "alignment: batches found again at no constant distance accuse nobody": (
        replacing(recount.Recount, "unclear", lambda _, steps: np.zeros(len(steps), np.bool_)),
        [method(test_shifts, "test_too_few_batches_after_a_shift_accuse_nobody", 2)],
    ),
    "alignment: ranks that are at one again need no longer wait": (
        replacing(shifts.Batches, "at_one", lambda *_: False),
        [method(test_shifts, "test_ranks_that_exchange_two_batches_ran_them_in_another_order")],
    ),
    "alignment: equal-looking batches are told apart by how far the request has come": (
        replacing(shifts, "_apart", lambda one, _: np.zeros(len(one.rows), np.bool_)),
        [
            method(
                test_shifts,
                "test_a_request_that_decodes_alone_is_compared_at_the_right_steps",
                2,
                0,
                "one fewer",
            )
        ],
    ),
    "alignment: what a missed batch left beside is not compared": (
        replacing(gaps.Gaps, "add", lambda *_: None),
        [method(test_shifts, "assert_told_and_compared", 2, 2, 1, "one not counted")],
    ),
    "alignment: a payload is consumed once": (
        replacing(lanes.Lane, "_ascends", lambda *_: True),
        [
            method(
                test_shifts,
                "test_a_request_that_decodes_alone_is_compared_at_the_right_steps",
                2,
                0,
                "one not counted",
            )
        ],
    ),
    "alignment: a step that stands alone is decided when the engine stands still": (
        replacing(engine, "stands_still", lambda _: False),
        [
            method(
                test_shifts,
                "test_a_step_that_belongs_to_nobody_else_is_a_batch_that_differs_even_if_the_engine_then_hangs",
            )
        ],
    ),
    "blame: who counts otherwise itself is no witness": (
        replacing(recount, "MATCHES", -100),
        [method(test_shifts, "test_three_ranks_that_count_three_ways_have_no_majority")],
    ),
    "exception: a shift of ordinals accuses no batch": (
        replacing(recount, "judge", lambda *_, **__: shifts.Verdict.OTHER_BATCH),
        [method(test_shifts, "assert_told_and_compared", 2, 1, 0, "one fewer")],
    ),
    "correlation: a life is a slot and its generation": (
        lambda monkeypatch: (
            [
                monkeypatch.setattr(module, "lives_of", lambda block: block.generation.astype(np.int64))
                for module in (history, links, engine)
            ]
            and None
        ),
        [method(test_checks.TestCounts, "test_a_request_that_starts_again_counts_anew")],
    ),
    "correlation: what a batch breaks belongs to it": (
        replacing(correlate.Correlator, "_cover", lambda *_: None),
        [fault("batch-reordered")],
    ),
    "correlation: floods are bounded": (
        replacing(correlate.Correlator, "_floods", lambda *_: False),
        [
            lambda: test_verdicts.TestCorrelation().test_a_flood_is_counted_in_one_incident(
                correlate.Correlator(test_verdicts.GROUP)
            )
        ],
    ),
    "stall: who waits for the others is not who did not come": (
        replacing(stall, "owed_calls", lambda *_: iter(())),
        [method(test_stalls, "test_a_peer_that_does_not_enter_its_stages_collective")],
    ),
    "stall: calls of replicas of which some are lost are not counted": (
        replacing(engine.Engine, "_progress", _counted_anyway(engine.Engine._progress)),
        [method(test_stalls, "test_idle_replicas_whose_first_records_are_gone_are_not_stalled", 30)],
    ),
    "stall: the size on each rank": (
        replacing(stall, "_where", lambda *_: ""),
        [method(test_stalls, "test_what_is_owed_its_size_on_each_rank_and_who_joined_are_told", 3)],
    ),
    "configuration: a draft model and its own configuration": (
        replacing(configuration.Configuration, "_contradictions", lambda *_: iter(())),
        [
            method(
                test_checks,
                "test_a_draft_model_that_contradicts_its_own_configuration_is_told_before_the_first_step",
            )
        ],
    ),
    "exception: draft models of different stages": (
        replacing(configuration, "CONFIGURED", ""),
        [method(test_checks, "test_draft_models_of_two_stages_may_be_configured_otherwise")],
    ),
    "exception: prefilling rows hold their slot's former owner's token": (
        replacing(last_sampled.LastSampled, "differs", lambda _, window: window.differing("last_digest")),
        [method(test_checks.TestLastSampled, "test_a_prefilling_row_may_hold_its_slots_former_owners_token")],
    ),
    "exception: graph mode and padding of different stages": (
        replacing(path_choice.PathChoice, "examine", _every_stage),
        [method(test_checks.TestPathChoice, "test_graphs_and_padding_are_each_stages_own", "graph_mode")],
    ),
    "exception: prefill chunks may follow each other": (
        replacing(cadence.Cadence, "examine", _chunks_decode),
        [method(test_checks.TestCadence, "test_prefill_chunks_may_follow_at_once")],
    ),
    "exception: ranks of an engine that ended": (
        replacing(rank_silent, "SILENT_NS", 0),
        [
            method(
                test_silence.TestSilence,
                "test_ranks_of_an_engine_that_ended_were_not_heard_at_the_same_instant",
            )
        ],
    ),
    "exception: the first minute of an engine": (
        replacing(rank_unarmed, "GRACE_NS", 0),
        [method(LIVE, "test_a_rank_that_never_arms_is_named_after_a_minute")],
    ),
    "blame: the last stage is the authority for what it sampled": (
        replacing(blame, "_authority", lambda *_: []),
        [method(test_verdicts.TestBlame, "test_the_last_stage_is_the_authority_for_what_it_sampled")],
    ),
    "blame: earlier stages do not outvote the last": (
        in_checks("blame", lambda *a, **k: blame.blame(*a, **{**k, "relayed": False}), "fields"),
        [method(test_checks.TestPositionDrift, "test_earlier_stages_do_not_outvote_the_last")],
    ),
    "blame: a rank that does not feed its own state": (
        replacing(input_divergence, "FEED_IS_STATE", 0),
        [method(test_checks.TestInputDivergence, "test_whoever_does_not_feed_its_own_state_is_blamed", 0)],
    ),
    "stall: an idle engine": (
        replacing(waits, "_entered", lambda *_: False),
        [method(LIVE, "test_an_idle_engine_is_not_stalled")],
    ),
    "stall: the usual order": (replacing(waits, "_unusual", lambda _: False), [fault("order-swapped")]),
}


def assert_killed(tests: list[Test]) -> None:
    for test in tests:
        with pytest.raises((AssertionError, ValueError)):
            test()


def test_every_check_has_a_mutation() -> None:
    assert set(CHECKS) == set(registry.NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_a_check_that_is_taken_out_is_missed(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for test in CHECKS[check]:
        test()
    without(check)(monkeypatch)
    assert_killed(CHECKS[check])


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_or_exception_that_is_taken_out_is_missed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation, tests = RULES[rule]
    for test in tests:
        test()
    mutation(monkeypatch)
    assert_killed(tests)
