"""Properties: whatever is lost, doubled, late or out of order on the way, nobody is accused wrongly, nothing uncounted.

Every run is simulated once; what hypothesis draws is how its records reach the watch.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated import _RULES, DIGESTER, REGISTRY, Run, S, beat, cut, expected, feed_cut, hello, plan, settle
from test_benign import verdicts

from stagewatch.agents.evidence import digest_records
from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.simulator import SimConfig
from stagewatch.agents.record import Collective, Inputs, Kind, Payload, Record
from stagewatch.monitor.alignment import GAP, NOT_CONSUMED, RANK_MISSING
from stagewatch.monitor.engine import CONSISTENT
from stagewatch.monitor.watch import Watch

HONEST = {"rank-silent", "rank-unarmed"}
"""What may be said of a sound engine of which evidence is missing: who does not deliver it."""
WHOLE = 1000
"""Places in a rank's stream are drawn in thousandths of its length."""


@dataclass(frozen=True)
class Loss:
    """A stretch of one rank's records that never comes: told as a gap, as by a ring that was overrun."""

    rank: int
    at: int
    records: int


@dataclass(frozen=True)
class Delivery:
    """How records reach the watch."""

    frame: int
    """Records of a frame, at most."""
    order: tuple[int, ...]
    """Whose frame comes next, over and over."""
    losses: tuple[Loss, ...]
    again: tuple[int, ...]
    """Frames that are delivered twice, by number."""
    swapped: tuple[int, ...]
    """Frames that change places with the next one of their rank."""


def losses(most: int) -> st.SearchStrategy[Loss]:
    # Single records, a few frames, a rank that is gone for long.
    records = st.one_of(st.integers(1, 3), st.integers(1, 80), st.integers(200, 2000))
    return st.builds(Loss, st.integers(0, 5), st.integers(0, WHOLE), records.map(lambda n: min(n, most)))


def deliveries(*, in_order: bool, most: int = 2000) -> st.SearchStrategy[Delivery]:
    numbers = st.lists(st.integers(0, 400), max_size=6).map(tuple)
    return st.builds(
        Delivery,
        frame=st.integers(1, 120),
        order=st.lists(st.integers(0, 5), min_size=1, max_size=12).map(tuple),
        losses=st.lists(losses(most), max_size=6).map(tuple),
        again=numbers,
        swapped=st.just(()) if in_order else numbers,
    )


def frames(run: Run, rank: Rank, index: int, delivery: Delivery) -> list[tuple[int, int, int]]:
    """(first record, end, records lost before the end) of each frame of a rank that comes."""
    records = len(run.records[rank])
    gone = set()
    for loss in delivery.losses:
        if loss.rank % len(run.records) == index:
            first = loss.at * records // WHOLE
            gone.update(range(first, min(first + loss.records, records)))
    found, lost, at = [], 0, 0
    while at < records:
        if at in gone:
            lost, at = lost + 1, at + 1
            continue
        end = at
        while end < records and end - at < delivery.frame and end not in gone:
            end += 1
        found.append((at, end, lost))
        lost, at = 0, end
    return found


def feed(run: Run, watch: Watch, delivery: Delivery) -> None:
    hello(run, watch)
    queues = [frames(run, rank, index, delivery) for index, rank in enumerate(run.records)]
    for queue in queues:
        for number in delivery.swapped:
            if queue and number % len(queue) + 1 < len(queue):
                place = number % len(queue)
                queue[place], queue[place + 1] = queue[place + 1], queue[place]
    ranks, turn, number = list(run.records), 0, 0
    while any(queues):
        index = delivery.order[turn % len(delivery.order)] % len(ranks)
        index = index if queues[index] else max(range(len(ranks)), key=lambda i: len(queues[i]))
        turn += 1
        first, end, lost = queues[index].pop(0)
        evidence = cut(run.evidence[ranks[index]], first, end, lost)
        for _ in range(2 if number in delivery.again else 1):
            watch.take(run.identities[ranks[index]].instance, ranks[index], evidence, -1.0, 2 * S)
        number += 1


def rows_delivered(run: Run, delivery: Delivery) -> int:
    """Rows of every step of which any rank's inputs come."""
    rows: dict[tuple[int, int], int] = {}
    for index, (rank, records) in enumerate(run.records.items()):
        for first, end, _ in frames(run, rank, index, delivery):
            for record in records[first:end]:
                if isinstance(record.body, Inputs):
                    rows[rank.dp, record.step] = len(record.body.request)
    return sum(rows.values())


@cache
def sound(shape: tuple[int, int]) -> Run:
    pp, tp = shape
    return Run(SimConfig.benign(pp, pp=pp, tp=tp, requests=18))


@cache
def faulty(name: str) -> Run:
    return Run(plan(name, from_step=20, requests=25))


def checked(examples: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=examples < 100,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


SHAPES = st.sampled_from([(2, 1), (3, 1), (2, 2), (4, 1)])


def assert_nothing_is_said(shape: tuple[int, int], delivery: Delivery) -> None:
    run, watch = sound(shape), Watch()
    feed(run, watch, delivery)
    settle(run, watch)
    assert [incident.check for incident in watch.incidents()] == []
    counts = verdicts(watch)
    assert counts.keys() <= {CONSISTENT, GAP, NOT_CONSUMED, RANK_MISSING}
    whole, late = rows_delivered(run, delivery), sum(state.late_rows for state in watch.states())
    if delivery.swapped:
        assert whole - late <= counts.total() <= whole
    else:
        assert counts.total() == whole


def assert_nobody_is_accused_wrongly(name: str, delivery: Delivery) -> None:
    run, watch = faulty(name), Watch()
    feed(run, watch, delivery)
    settle(run, watch)
    guilty: dict[str, set[int]] = {}
    since: dict[str, int] = {}
    for each in expected(run):
        guilty.setdefault(each.request, set()).update(each.blamed)
        since[each.request] = min(each.first_bad_step, since.get(each.request, each.first_bad_step))
    everyone = set().union(*guilty.values()) if "" in guilty else set()
    earliest = min(since.values(), default=0)
    for incident in watch.incidents():
        assert {*incident.blamed} <= guilty.get(incident.request, everyone), (incident, run.config.line)
        assert incident.check in HONEST or incident.first_bad_step >= earliest, (incident, run.config.line)


FAULTS = [name for name in REGISTRY if name in _RULES]


@checked(15)
@given(SHAPES, deliveries(in_order=True))
def test_what_is_lost_or_doubled_raises_no_alarm_and_every_row_is_counted(
    shape: tuple[int, int], delivery: Delivery
) -> None:
    assert_nothing_is_said(shape, delivery)


@checked(12)
@given(SHAPES, deliveries(in_order=False))
def test_frames_out_of_order_raise_no_alarm(shape: tuple[int, int], delivery: Delivery) -> None:
    """What comes too late is left out and counted."""
    assert_nothing_is_said(shape, delivery)


@checked(15)
@given(st.sampled_from(FAULTS), deliveries(in_order=False))
def test_whatever_is_lost_nobody_is_accused_wrongly_or_too_early(name: str, delivery: Delivery) -> None:
    assert_nobody_is_accused_wrongly(name, delivery)


@pytest.mark.slow
@pytest.mark.timeout(900)
@checked(400)
@given(SHAPES, deliveries(in_order=False))
def test_no_alarm_in_many_examples(shape: tuple[int, int], delivery: Delivery) -> None:
    assert_nothing_is_said(shape, delivery)


@pytest.mark.slow
@pytest.mark.timeout(900)
@checked(400)
@given(st.sampled_from(FAULTS), deliveries(in_order=False))
def test_no_wrong_blame_in_many_examples(name: str, delivery: Delivery) -> None:
    assert_nobody_is_accused_wrongly(name, delivery)


def gone_for_a_while(run: Run, rank: Rank, silent: Sequence[Rank]) -> Watch:
    """A rank's sidecar is down while the others go on; then it comes back with all it kept."""
    watch = Watch()
    hello(run, watch)
    half = {other: len(run.records[other]) // 2 for other in run.records}
    for other, records in run.records.items():
        end = half[other] if other == rank else len(records)
        for first in range(0, end, 50):
            evidence = cut(run.evidence[other], first, min(first + 50, end))
            watch.take(run.identities[other].instance, other, evidence, -1.0, 2 * S)
    beat(run, watch, 40 * S, [other for other in run.records if other not in silent])
    watch.tick(41 * S)
    evidence = cut(run.evidence[rank], half[rank], len(run.records[rank]))
    watch.take(run.identities[rank].instance, rank, evidence, -1.0, 42 * S)
    watch.finish()
    return watch


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_rank_that_comes_back_late_is_told_silent_and_its_rows_are_counted_once(place: int) -> None:
    run = sound((3, 1))
    rank = run.sim.ranks[place]
    watch = gone_for_a_while(run, rank, [rank])
    assert {incident.check for incident in watch.incidents()} <= {"rank-silent"}
    counts = verdicts(watch)
    assert counts[RANK_MISSING] > 0
    assert counts.total() == run.sim.request_steps


@dataclass(frozen=True)
class Skip:
    """Of some broadcasts in a row, one rank records that it took no part in them, as if its mask had been None."""

    rank: int
    at: int
    broadcasts: int
    calls: bool
    """Whether it enters the calls nevertheless."""


def skipping(shape: tuple[int, int], skip: Skip) -> tuple[Run, set[int]]:
    """(the sound run with one rank's broadcasts skipped, their steps); its masks and inputs are as they were."""
    run = copy(sound(shape))
    rank = list(run.records)[skip.rank % len(run.records)]
    own = Kind.SENT if rank.pp == shape[0] - 1 else Kind.RECEIVED
    broadcasts = [
        record.step
        for record in run.records[rank]
        if record.kind is own and isinstance(record.body, Payload) and not record.body.skipped
    ]
    first = skip.at * len(broadcasts) // WHOLE
    steps = {*broadcasts[first : first + skip.broadcasts]}
    records = [
        one
        for record in run.records[rank]
        if (one := skipped(record, calls=skip.calls) if record.step in steps else record) is not None
    ]
    records = [replace(record, seq=seq) for seq, record in enumerate(records)]
    run.records = {**run.records, rank: records}
    run.evidence = {**run.evidence, rank: digest_records(records, run.identities[rank], DIGESTER)}
    return run, steps


def skipped(record: Record, *, calls: bool) -> Record | None:
    """What a rank that takes no part in a step's broadcast records in place of ``record``; None for nothing."""
    body = record.body
    if isinstance(body, Collective):
        return record if calls or not body.what.startswith("pp_broadcast") else None
    if not isinstance(body, Payload):
        return record
    if record.kind is Kind.CONSUMED:
        return None
    rows = len(body.request)
    nothing, zeros = np.zeros((rows, 0), np.int32), np.zeros(rows, np.int32)
    empty = msgspec.structs.replace(
        body,
        skipped=1,
        num_sampled=zeros,
        num_rejected=zeros,
        tokens=nothing,
        draft_tokens=nothing,
        applied=zeros.astype(np.uint8),
    )
    return replace(record, body=empty)


SKIPS = st.builds(
    Skip,
    rank=st.integers(0, 5),
    at=st.integers(0, WHOLE - 1),
    broadcasts=st.one_of(st.integers(1, 3), st.integers(1, 60)),
    calls=st.booleans(),
)


def assert_only_who_skipped_is_blamed(shape: tuple[int, int], skip: Skip, delivery: Delivery) -> None:
    (run, steps), watch = skipping(shape, skip), Watch()
    feed(run, watch, delivery)
    settle(run, watch)
    for incident in watch.incidents():
        assert {*incident.blamed} <= {skip.rank % len(run.records)}, (incident, skip)
        assert incident.check in HONEST or incident.first_bad_step >= min(steps), (incident, skip)


@checked(10)
@given(SHAPES, SKIPS, deliveries(in_order=False))
def test_a_rank_that_alone_skips_broadcasts_is_the_only_one_to_be_blamed(
    shape: tuple[int, int], skip: Skip, delivery: Delivery
) -> None:
    assert_only_who_skipped_is_blamed(shape, skip, delivery)


@pytest.mark.slow
@pytest.mark.timeout(900)
@checked(150)
@given(SHAPES, SKIPS, deliveries(in_order=False))
def test_only_who_skips_is_blamed_in_many_examples(
    shape: tuple[int, int], skip: Skip, delivery: Delivery
) -> None:
    assert_only_who_skipped_is_blamed(shape, skip, delivery)


@pytest.mark.parametrize("shape", [(2, 1), (3, 1), (2, 2)])
def test_a_rank_that_stays_out_of_a_broadcast_is_found_at_once(shape: tuple[int, int]) -> None:
    """GIVEN everything arrives THEN the first broadcast it stayed out of is told, and the rank is among those named."""
    for rank in range(shape[0] * shape[1]):
        (run, steps), watch = skipping(shape, Skip(rank, 500, 1, calls=False)), Watch()
        feed_cut(run, watch, seed=rank)
        settle(run, watch)
        first = min(watch.incidents(), key=lambda incident: incident.first_bad_step)
        assert {first.first_bad_step} == steps
        assert rank in first.ranks
        assert {*first.blamed} <= {rank}


def test_a_rank_that_only_records_nothing_of_a_broadcast_is_no_matter() -> None:
    """It entered the calls, and what it holds afterwards is what all hold: there is nothing to accuse it of."""
    (run, _), watch = skipping((3, 1), Skip(0, 500, 5, calls=True)), Watch()
    feed_cut(run, watch, seed=1)
    settle(run, watch)
    assert watch.incidents() == []
