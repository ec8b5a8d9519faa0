"""Faults put into the real engine at run time: each found, each named, and nothing else."""

import numpy as np
import pytest
import runs
from runs import RunEngine

from stagewatch.agents.record import Kind, Payload, Record, request_key

ALL = {"r0", "r1", "r2"}


def dropped_rows(run: runs.Run, stage: int) -> dict[str, list[int]]:
    """Steps at which a stage's mask left out a decoding row, by request; read from the records alone."""
    records = run.records[stage]
    names = {r.body.request: runs.name_of(r.body.request_id) for r in records if r.kind is Kind.BIND}
    masks = {r.step: r.body for r in records if r.kind is Kind.MASK}
    found: dict[str, list[int]] = {}
    for record in inputs(records):
        out = (masks[record.step].engine == 0) & (record.body.prefilling == 0)
        for row in np.flatnonzero(out):
            found.setdefault(names[int(record.body.request[row])], []).append(record.step)
    return found


def last_token(payload: Payload, row: int) -> int:
    """The token that a row of a payload feeds next."""
    return int(payload.tokens[row, payload.num_sampled[row] - 1])


def inputs(records: list[Record]) -> list[Record]:
    """A stage's inputs records."""
    return [record for record in records if record.kind is Kind.INPUTS]


def steps_of(run: runs.Run, name: str) -> list[int]:
    """Steps at which a request is in the batch."""
    keys = {
        request_key(r.body.request_id)
        for r in run.records[0]
        if r.kind is Kind.BIND and runs.name_of(r.body.request_id) == name
    }
    return [r.step for r in inputs(run.records[0]) if keys & {int(k) for k in r.body.request}]


@pytest.fixture(scope="module")
def run(run_engine: RunEngine) -> runs.Run:
    """Two stages under the old mask."""
    return run_engine("basic", 2, 7, fault="old-mask")


@pytest.fixture(scope="module")
def sound(run_engine: RunEngine) -> dict[str, list[int]]:
    """What one stage serves."""
    return run_engine("basic", 1, 7).outputs


class TestOldMask:
    """The founding bug, back in the real engine."""

    def test_exactly_the_corrupted_requests_are_critical(
        self, run: runs.Run, sound: dict[str, list[int]]
    ) -> None:
        corrupted = {name for name in ALL if run.outputs[name] != sound[name]}
        dropped = dropped_rows(run, 0)
        assert corrupted and corrupted < set(dropped)
        assert run.incidents() == {("excluded-row", "critical", name) for name in corrupted} | {
            ("excluded-row", "notice", name) for name in set(dropped) - corrupted
        }

    def test_dated_at_the_first_bad_step_and_blamed_on_the_first_stage(self, run: runs.Run) -> None:
        critical = [i for i in run.replay["incidents"] if i["severity"] == "critical"]
        for incident in critical:
            name = runs.name_of(incident["request"])
            first_drop = dropped_rows(run, 0)[name][0]
            next_run = next(step for step in steps_of(run, name) if step > first_drop)
            assert (incident["first_bad_step"], incident["blamed"]) == (next_run, [0])

    def test_the_hotfix_makes_it_right_and_silent(
        self, run_engine: RunEngine, sound: dict[str, list[int]]
    ) -> None:
        fixed = run_engine("basic", 2, 7, fault="old-mask", STAGEWATCH_FIXED_MASK="1")
        assert fixed.outputs == sound
        assert fixed.replay["incidents"] == []
        for stage in (0, 1):
            assert any(note.startswith("FIXED MASK IN FORCE") for note in fixed.notes(stage))


class TestOtherFaults:
    def test_drafts_not_relayed(self, run_engine: RunEngine) -> None:
        run = run_engine("basic", 2, 7, fault="drafts-not-relayed")
        assert run.incidents() == {("draft-block", "critical", name) for name in ALL}
        for incident in run.replay["incidents"]:
            assert incident["blamed"] == [0]
            assert "draft block never relayed" in incident["chain"][0]["text"]

    def test_rejection_not_subtracted(self, run_engine: RunEngine) -> None:
        run = run_engine("basic", 2, 7, fault="rejection-not-subtracted")
        assert run.incidents() == {("position-drift", "critical", name) for name in ALL}
        assert all(incident["blamed"] == [0] for incident in run.replay["incidents"])

    def test_payload_altered_between_receive_and_consume(self, run_engine: RunEngine) -> None:
        run = run_engine("basic", 2, 7, fault="payload-altered")
        (incident,) = run.replay["incidents"]
        assert (incident["check"], incident["severity"], incident["blamed"]) == (
            "payload-mismatch",
            "critical",
            [0],
        )
        received = {r.step: r.body for r in run.records[0] if r.kind is Kind.RECEIVED}
        ((step, request),) = [
            (r.step, int(r.body.request[0]))
            for r in run.records[0]
            if r.kind is Kind.CONSUMED and last_token(r.body, 0) != last_token(received[r.step], 0)
        ]
        assert f"at step {step}" in incident["chain"][0]["text"]
        assert request_key(incident["request"]) == request

    def test_stale_write_into_a_slot_taken_again(self, run_engine: RunEngine) -> None:
        run = run_engine("reuse", 2, 7, fault="stale-write")
        stale = [
            r.body
            for r in run.records[0]
            if r.kind is Kind.CONSUMED
            and (r.body.applied.astype(bool) & (r.body.generation != r.body.generation_now)).any()
        ]
        assert stale, "the abort came at no moment that matters"
        found = run.replay["incidents"]
        assert {i["check"] for i in found} == {"slot-generation"}
        assert all(i["blamed"] == [0] for i in found)

    def test_the_same_abort_is_silent_without_the_fault(self, run_engine: RunEngine) -> None:
        assert run_engine("reuse", 2, 7).replay["incidents"] == []
