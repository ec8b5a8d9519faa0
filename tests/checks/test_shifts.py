"""A rank whose ordinals are off by a constant: found by its batches, told once, and compared at the right steps."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from simulated import (
    _RULES,
    REGISTRY,
    Expected,
    Run,
    S,
    beat,
    expected,
    feed_cut,
    feed_live,
    found,
    plan,
    reports,
    settle,
)
from test_benign import verdicts

from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.simulator import SimConfig
from stagewatch.agents.lab.workload import Workload
from stagewatch.agents.record import Inputs, Kind, Payload, Record
from stagewatch.monitor.alignment import ORDINALS_SHIFTED
from stagewatch.monitor.engine import CONSISTENT
from stagewatch.monitor.watch import Watch

Change = Callable[[list[Record]], list[Record]]
STEP = 25


def moved(record: Record, by: int, since: int, consumed_since: int = 0) -> Record:
    """A record whose ordinals from ``since`` on are others."""
    body = record.body
    bound = record.kind is Kind.BIND
    step = record.step + by if record.step + bound >= since else record.step
    if isinstance(body, Payload) and body.at >= (consumed_since or since):
        body = msgspec.structs.replace(body, at=body.at + by)
    return replace(record, step=step, body=body)


def missed(records: list[Record], step: int, batches: int = 1) -> list[Record]:
    """The rank did not execute, or its recorder did not see, some batches from ``step`` on."""
    gone = range(step, step + batches)
    kept = [r for r in records if not (r.step in gone and r.kind not in (Kind.BIND, Kind.FREE))]
    return [moved(record, -batches, step + batches) for record in kept]


def uncounted(records: list[Record], step: int) -> list[Record]:
    """The inputs of one batch were not recorded nor counted; what else belongs to it is under the ordinal before."""
    kept = [r for r in records if not (r.step == step and isinstance(r.body, Inputs))]
    return [moved(record, -1, step, step + 1) for record in kept]


def repeated(records: list[Record], step: int, batches: int = 1) -> list[Record]:
    """The rank counted some batches twice: those before ``step`` are recorded again as ``step`` and so on."""
    again = [r for r in records if step - batches <= r.step < step and isinstance(r.body, Inputs)]
    at = next(place for place, r in enumerate(records) if r.step >= step and isinstance(r.body, Inputs))
    extra = [replace(record, step=record.step + batches) for record in again]
    return [*records[:at], *extra, *(moved(record, batches, step) for record in records[at:])]


class Changed(Run):
    """A run of which one rank, or several, recorded something else than happened."""

    def __init__(self, config: SimConfig, changes: dict[Rank, Change]) -> None:
        super().__init__(config)
        for rank, change in changes.items():
            iteration = {}
            at = 0
            for number, made in enumerate(self.iterations):
                for record in self.records[rank][at : at + made[rank]]:
                    iteration[record.seq] = number
                at += made[rank]
            records = change(self.records[rank])
            for made in self.iterations:
                made[rank] = 0
            number = 0
            for record in records:
                number = max(number, iteration[record.seq])
                self.iterations[number][rank] += 1
            self.records[rank] = [replace(record, seq=seq) for seq, record in enumerate(records)]


def sound(seed: int, pp: int = 3, tp: int = 1, requests: int = 25) -> SimConfig:
    return SimConfig.benign(seed, pp=pp, tp=tp, requests=requests)


def alone(pp: int = 2, spec_tokens: int = 3) -> SimConfig:
    """One request that decodes alone: every batch has the same request, scheduled and draft counts."""
    config = SimConfig(seed=3, pp=pp, spec_tokens=spec_tokens, stops=False)
    return replace(config, workload=Workload(requests=1, prompt_len=(4, 4), max_tokens=(200, 200)))


def shift_of(run: Run, rank: Rank, step: int, seed: int = 1) -> tuple[Watch, list[Expected]]:
    """What is told live of a run, and that it is told however the evidence is cut."""
    watch, again = Watch(), Watch()
    feed_live(run, watch)
    settle(run, watch)
    feed_cut(run, again, seed)
    settle(run, again)
    assert reports(watch) == reports(again)
    assert verdicts(watch) == verdicts(again)
    ranks = run.sim.sizes.pp * run.sim.sizes.tp
    blamed = (run.number(rank),) if ranks > 2 else ()
    return watch, [Expected("ordinal-shift", "", step, blamed, "warning")]


CHANGES: dict[str, tuple[Change, int, int]] = {
    "one fewer": (lambda records: missed(records, STEP), -1, 0),
    "five fewer": (lambda records: missed(records, STEP, 5), -5, 0),
    "forty fewer": (lambda records: missed(records, STEP, 40), -40, 0),
    "one not counted": (lambda records: uncounted(records, STEP), -1, 0),
    "one more": (lambda records: repeated(records, STEP), 1, 1),
    "five more": (lambda records: repeated(records, STEP, 5), 5, 5),
}
SHAPES = [(2, 1, 0), (2, 1, 1), (3, 1, 0), (3, 1, 2), (4, 1, 1), (2, 2, 1), (2, 2, 3), (3, 2, 4)]


def assert_told_and_compared(pp: int, tp: int, place: int, change: str) -> None:
    """No row diverges; those of the batches in question are INDETERMINATE, and every row is counted."""
    how, batches, extra = CHANGES[change]
    config = sound(1, pp, tp)
    rank = Rank(0, place // tp, place % tp)
    run = Changed(config, {rank: how})
    watch, must = shift_of(run, rank, STEP)
    assert found(watch) == must
    (incident,) = watch.incidents()
    told = (
        batches if len(run.sim.ranks) > 2 or rank.pp == 0 else -batches
    )  # among two it is as the first one counts
    assert incident.values[0].text == f"{told:+d}"
    counts = verdicts(watch)
    assert counts.keys() == {CONSISTENT, ORDINALS_SHIFTED}
    honest = Run(config)
    rows = {r.step: len(r.body.request) for r in honest.records[rank] if isinstance(r.body, Inputs)}
    repeated_rows = sum(rows[step] for step in range(STEP - extra, STEP))
    lacking_rows = sum(rows[step] for step in range(STEP, STEP - batches))
    assert counts[ORDINALS_SHIFTED] == repeated_rows + lacking_rows
    assert counts.total() == sum(rows.values()) + repeated_rows


@pytest.mark.parametrize(
    ("change", "pp", "tp", "place"),
    [
        ("one fewer", 2, 1, 0),
        ("one fewer", 2, 1, 1),
        ("one more", 3, 1, 2),
        ("five more", 2, 2, 3),
        ("one not counted", 2, 2, 1),
        ("five fewer", 4, 1, 1),
        ("forty fewer", 3, 1, 0),
    ],
)
def test_a_rank_that_counts_otherwise_is_told_once_and_compared_at_the_right_steps(
    change: str, pp: int, tp: int, place: int
) -> None:
    assert_told_and_compared(pp, tp, place, change)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("pp", "tp", "place"), SHAPES)
def test_any_change_of_count_in_any_pipeline(pp: int, tp: int, place: int, change: str) -> None:
    assert_told_and_compared(pp, tp, place, change)


@pytest.mark.parametrize("change", ["one fewer", "five fewer", "one not counted", "one more", "five more"])
@pytest.mark.parametrize(("pp", "place"), [(2, 0), (2, 1), (3, 1)])
def test_a_request_that_decodes_alone_is_compared_at_the_right_steps(
    pp: int, place: int, change: str
) -> None:
    """GIVEN batches that all look the same, THEN how far the request has come tells them apart."""
    run = Changed(alone(pp), {Rank(0, place, 0): CHANGES[change][0]})
    watch, must = shift_of(run, Rank(0, place, 0), STEP)
    assert found(watch) == must
    assert verdicts(watch).keys() == {CONSISTENT, ORDINALS_SHIFTED}


def test_equal_looking_batches_alone_shift_nothing() -> None:
    run = Run(alone())
    watch = Watch()
    feed_live(run, watch)
    settle(run, watch)
    assert (found(watch), verdicts(watch)) == ([], {CONSISTENT: run.sim.request_steps})


def test_shifts_again_and_back_are_one_incident() -> None:
    """One fewer, then three more, then two fewer, on two ranks: all of it compared at the right steps."""
    first, second = Rank(0, 0, 0), Rank(0, 2, 0)

    def often(records: list[Record]) -> list[Record]:
        return missed(repeated(missed(records, 20), 50, 3), 80, 2)

    run = Changed(sound(2, requests=40), {first: often, second: lambda records: missed(records, 60)})
    watch, _ = shift_of(run, first, 20)
    told = watch.incidents()
    assert [(i.check, i.first_bad_step, i.blamed) for i in told] == [("ordinal-shift", 20, (0, 2))]
    assert verdicts(watch).keys() == {CONSISTENT, ORDINALS_SHIFTED}


def assert_found_beside_a_shift(name: str, place: int) -> None:
    """The fault's incidents are those of the same run in which everybody counts alike."""
    config = plan(name, from_step=40, times=2, requests=40)
    honest = Run(config)
    rank = Rank(0, place, 0)
    run = Changed(config, {rank: lambda records: missed(records, 10)})
    must = expected(honest)
    if name == "dummy-skipped":
        # How often the rank met its counterpart in the other replica is not known.
        partner = honest.number(rank) + honest.sim.sizes.pp * honest.sim.sizes.tp
        must = [replace(one, blamed=tuple(n for n in one.blamed if n != partner)) for one in must]
    watch = Watch()
    feed_cut(run, watch, place)
    settle(run, watch)
    told = found(watch)
    shift = [one for one in told if one.check == "ordinal-shift"]
    assert [(one.first_bad_step, one.severity) for one in shift] == [(10, "warning")]
    assert [one for one in told if one.check != "ordinal-shift"] == must, config.line


@pytest.mark.parametrize("name", ["old-mask", "payload-altered", "op-dropped"])
def test_a_true_fault_beside_a_shift_is_found_and_blamed_rightly(name: str) -> None:
    """GIVEN a rank that counts one batch fewer before a fault strikes, THEN what that leads to is told as ever."""
    assert_found_beside_a_shift(name, 1)


FAULTS = sorted(name for name in REGISTRY if name in _RULES and name != "drafter-layout-differs")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_any_fault_beside_a_shift_of_any_stage_is_found_and_blamed_rightly(name: str, place: int) -> None:
    assert_found_beside_a_shift(name, place)


def test_a_rank_that_armed_later_counts_from_another_batch() -> None:
    run = Changed(sound(4), {Rank(0, 1, 0): lambda records: missed(records, 1, 7)})
    watch, _ = shift_of(run, Rank(0, 1, 0), 1)
    assert [(i.check, i.first_bad_step) for i in watch.incidents()] == [("ordinal-shift", 1)]
    assert verdicts(watch).keys() == {CONSISTENT, ORDINALS_SHIFTED}


@pytest.mark.parametrize("left", [1, 2])
def test_too_few_batches_after_a_shift_accuse_nobody(left: int) -> None:
    """GIVEN evidence that ends just after a rank missed a batch, THEN these rows are INDETERMINATE."""
    whole = Run(sound(5))
    last = max(r.step for r in whole.records[Rank(0, 0, 0)])

    def change(records: list[Record]) -> list[Record]:
        return missed(records, last - left)

    watch = Watch()
    feed_live(Changed(sound(5), {Rank(0, 0, 0): change}), watch)
    watch.finish()
    assert found(watch) == []
    assert verdicts(watch)[ORDINALS_SHIFTED] > 0


def test_ranks_that_exchange_two_batches_ran_them_in_another_order() -> None:
    """No constant distance: that is a batch that differs, at the first of the two."""

    def swap(records: list[Record]) -> list[Record]:
        first, second = (
            next(r for r in records if r.step == step and isinstance(r.body, Inputs))
            for step in (STEP, STEP + 1)
        )
        bodies = {id(first): second.body, id(second): first.body}
        return [replace(r, body=bodies.get(id(r), r.body)) for r in records]

    run = Changed(sound(6), {Rank(0, 0, 0): swap})
    watch = Watch()
    feed_live(run, watch)
    settle(run, watch)
    assert [(i.check, i.first_bad_step, i.blamed) for i in watch.incidents()] == [
        ("batch-disagreement", STEP, (0,))
    ]
    assert watch.incidents()[0].latency_steps <= run.sim.sizes.pp + 2


def test_a_step_that_belongs_to_nobody_else_is_a_batch_that_differs_even_if_the_engine_then_hangs() -> None:
    """GIVEN the newest step of one rank has other requests, WHEN nothing more comes, THEN a tick tells of it."""
    run = Run(sound(7))
    last = max(r.step for r in run.records[Rank(0, 0, 0)])

    def other(records: list[Record]) -> list[Record]:
        def strange(body: Inputs) -> Inputs:
            return msgspec.structs.replace(body, request=body.request + body.request.dtype.type(1))

        return [
            replace(r, body=strange(r.body)) if r.step == last and isinstance(r.body, Inputs) else r
            for r in records
            if r.step <= last
        ]

    run = Changed(sound(7), {Rank(0, 0, 0): other})
    watch = Watch()
    feed_live(run, watch)
    assert found(watch) == []
    beat(run, watch, 25 * S)
    watch.tick(34 * S)
    assert ("batch-disagreement", last) in [(i.check, i.first_bad_step) for i in watch.incidents()]


def test_a_stage_that_counts_otherwise_is_nobodys_minority() -> None:
    """GIVEN both ranks of one of two stages, THEN nobody is outvoted, and one finding names both."""
    first, second = Rank(0, 0, 0), Rank(0, 0, 1)
    run = Changed(sound(1, 2, 2), dict.fromkeys((first, second), lambda records: missed(records, 20)))
    watch, _ = shift_of(run, first, 20)
    (incident,) = watch.incidents()
    assert (incident.check, incident.first_bad_step, incident.blamed) == ("ordinal-shift", 20, ())
    assert incident.chain[0].text == "ranks 0, 1 count 1 batch fewer than the others"
    assert verdicts(watch).keys() == {CONSISTENT, ORDINALS_SHIFTED}


def test_three_ranks_that_count_three_ways_have_no_majority() -> None:
    run = Changed(
        sound(1),
        {
            Rank(0, 0, 0): lambda records: missed(records, 20),
            Rank(0, 1, 0): lambda records: repeated(records, 20, 2),
        },
    )
    watch, _ = shift_of(run, Rank(0, 0, 0), 20)
    assert [(i.check, i.blamed) for i in watch.incidents()] == [("ordinal-shift", ())]
    assert verdicts(watch).keys() == {CONSISTENT, ORDINALS_SHIFTED}
