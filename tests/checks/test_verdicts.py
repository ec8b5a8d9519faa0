"""Blame, correlation, alignment and liveness, each by itself."""

from collections.abc import Iterator

import pytest
from simulated import DIGESTER, Run, S, beat, feed_cut, feed_live, hello, plan, take
from stories import Row, Sent, Story, prefill

from stagewatch.agents.evidence import digest_records
from stagewatch.agents.identity import Sizes
from stagewatch.agents.lab.simulator import SimConfig
from stagewatch.monitor import alignment
from stagewatch.monitor.alignment import BATCH_DIFFERS, GAP, NOT_CONSUMED, RANK_MISSING
from stagewatch.monitor.blame import blame, outvoted
from stagewatch.monitor.checks.base import Finding, Phase
from stagewatch.monitor.correlate import FLOOD_MAX, Context, Correlator
from stagewatch.monitor.engine import CONSISTENT
from stagewatch.monitor.incidents import Incident, Severity
from stagewatch.monitor.watch import Watch
from stagewatch.monitor.windows import Group

GROUP = Group("d", "i", 0, Sizes(1, 3, 1))
PAIR = Group("d", "i", 0, Sizes(1, 2, 1))


class TestBlame:
    def test_what_was_broadcast_says_who_is_wrong(self) -> None:
        assert blame(GROUP, (0, 1, 2), [5, 5, 7], expected=7, sampled=True) == (0, 1)
        assert blame(GROUP, (0, 1, 2), [5, 5, 7], expected=5, sampled=True) == (2,)

    def test_if_nobody_holds_what_was_broadcast_nobody_can_tell(self) -> None:
        assert blame(GROUP, (0, 1, 2), [5, 5, 7], expected=9, sampled=True) == ()

    def test_the_last_stage_is_the_authority_for_what_it_sampled(self) -> None:
        assert blame(PAIR, (0, 1), [5, 7], expected=None, sampled=True) == (0,)
        assert blame(PAIR, (0, 1), [5, 7], expected=None, sampled=False) == ()

    def test_peers_of_the_last_stage_that_disagree_are_no_authority(self) -> None:
        group = Group("d", "i", 0, Sizes(1, 2, 2))
        assert blame(group, (0, 1, 2, 3), [5, 5, 5, 7], expected=None, sampled=True) == ()

    def test_a_strict_majority_of_more_than_two(self) -> None:
        assert outvoted(GROUP, (0, 1, 2), [7, 5, 5]) == (0,)
        assert outvoted(GROUP, (0, 1), [7, 5]) == ()
        assert outvoted(GROUP, (0, 1, 2, 3), [7, 7, 5, 5]) == ()

    def test_earlier_stages_do_not_outvote_the_last_on_what_came_with_a_broadcast(self) -> None:
        values = [5, 5, 7]
        assert blame(GROUP, (0, 1, 2), values, expected=None, sampled=False, relayed=True) == ()
        assert blame(GROUP, (0, 1, 2), values, expected=None, sampled=False) == (2,)


def finding(step: int, severity: Severity, request: int = 1, **fields: object) -> Finding:
    values: dict[str, object] = {
        "check": "draft-block",
        "text": "t",
        "remedy": "r",
        "ranks": (0,),
        "blamed": (0,),
    }
    return Finding(severity=severity, step=step, phase=Phase.INPUTS, request=request, **{**values, **fields})  # type: ignore[arg-type]


def context(name: str = "a") -> Context:
    return Context(name, lambda: 0, 0, 0)


@pytest.fixture
def correlator() -> Iterator[Correlator]:
    yield Correlator(GROUP)


def only(correlator: Correlator) -> Incident:
    (incident,) = correlator.current()
    return incident


class TestCorrelation:
    def test_severity_rises_and_dates_the_incident(self, correlator: Correlator) -> None:
        for step, severity in ((5, Severity.NOTICE), (6, Severity.CRITICAL), (7, Severity.WARNING)):
            correlator.add(finding(step, severity, check="excluded-row"), context())
        incident = only(correlator)
        assert (incident.severity, incident.first_bad_step, incident.last_bad_step) == (
            Severity.CRITICAL,
            6,
            7,
        )

    def test_what_a_broken_request_does_later_changes_nobodys_blame(self, correlator: Correlator) -> None:
        correlator.add(finding(5, Severity.CRITICAL), context())
        correlator.add(finding(6, Severity.CRITICAL, blamed=(2,), check="position-drift"), context())
        assert (only(correlator).blamed, only(correlator).last_bad_step) == ((0,), 6)

    def test_two_lives_of_a_request_are_two_incidents(self, correlator: Correlator) -> None:
        for life in (1, 2):
            correlator.add(finding(5, Severity.CRITICAL, life=life), context())
        assert len(correlator.current()) == 2

    def test_an_absolving_cause_keeps_everyone_innocent(self, correlator: Correlator) -> None:
        correlator.add(
            finding(5, Severity.WARNING, check="decode-cadence", blamed=(), absolves=True), context()
        )
        correlator.add(finding(6, Severity.CRITICAL, blamed=(1,)), context())
        assert only(correlator).blamed == ()

    def test_two_checks_that_see_one_step_go_wrong_are_one_incident(self, correlator: Correlator) -> None:
        correlator.add(finding(5, Severity.WARNING, request=0, check="path-choice", blamed=(2,)), context(""))
        correlator.add(finding(5, Severity.CRITICAL, request=0, check="stall", blamed=(1,)), context(""))
        incident = only(correlator)
        assert (incident.check, incident.severity, incident.blamed) == (
            "path-choice",
            Severity.CRITICAL,
            (2,),
        )

    def test_a_silent_rank_is_no_cause_of_a_stall(self, correlator: Correlator) -> None:
        silent = finding(5, Severity.WARNING, request=0, check="rank-silent", of_step=False)
        correlator.add(silent, context(""))
        correlator.add(finding(5, Severity.CRITICAL, request=0, check="stall"), context(""))
        assert [incident.check for incident in correlator.current()] != ["rank-silent"]

    def test_requests_that_one_step_breaks_are_named_in_its_chain(self, correlator: Correlator) -> None:
        cause = finding(5, Severity.CRITICAL, request=0, check="batch-disagreement", covers=((1, 0), (2, 0)))
        correlator.add(cause, context(""))
        correlator.add(finding(8, Severity.CRITICAL, request=2, blamed=(2,)), context("two"))
        incident = only(correlator)
        assert (incident.blamed, incident.chain[-1].text) == ((0,), "request two: t")
        assert correlator.is_critical(2, 0, 9) and not correlator.is_critical(1, 0, 9)

    def test_a_flood_is_counted_in_one_incident(self, correlator: Correlator) -> None:
        for request in range(1, FLOOD_MAX + 31):
            correlator.add(finding(5, Severity.CRITICAL, request=request), context(str(request)))
        incidents = correlator.current()
        (flood,) = [incident for incident in incidents if not incident.request]
        assert len(incidents) == FLOOD_MAX + 1
        assert flood.chain[-1].text == "and so 30 more requests than are told one by one"

    def test_a_flood_without_a_culprit_finds_none_later(self, correlator: Correlator) -> None:
        for request in range(1, FLOOD_MAX + 11):
            correlator.add(finding(5, Severity.WARNING, request=request, blamed=(), absolves=True), context())
        correlator.add(finding(6, Severity.CRITICAL, request=FLOOD_MAX + 5, blamed=(1,)), context())
        assert {incident.blamed for incident in correlator.current()} == {()}


class TestAlignment:
    def test_ranks_wait_for_the_slowest(self) -> None:
        story = Story()
        for place in range(4):
            row = Row(computed=10 + 3 * place)
            story.step(row)
            story.masks(True)
            story.broadcast((row, Sent(tokens=(30, 30, 30), drafts=(41, 42))))
        del story.records[1][-6:]
        story.seq[1] -= 6
        watch = story.watch(finish=False)
        assert [state.compared_to for state in watch.states()] == [2]
        watch.finish()
        assert watch.states()[0].verdicts == {CONSISTENT: 2, "DIVERGED": 0, NOT_CONSUMED: 2}

    def test_a_step_that_a_rank_lost_is_a_gap(self) -> None:
        story = Story()
        story.step(prefill(chunk=1))
        story.step(prefill(chunk=1, computed=1))
        story.lose(1)
        story.step(prefill(chunk=1, computed=2))
        assert story.watch().states()[0].verdicts == {CONSISTENT: 2, "DIVERGED": 0, GAP: 1}

    def test_a_rank_never_heard_of_leaves_nothing_to_compare(self) -> None:
        story = Story()
        story.step(prefill(chunk=1), without=(2,))
        story.records.pop(2, None)
        state = story.watch().states()[0]
        assert state.verdicts == {RANK_MISSING: 1}

    def test_different_batches_are_counted_as_such(self) -> None:
        story = Story(pp=2)
        story.step(Row(), Row("b", slot=1), r0=(Row("b", slot=1), Row()))
        assert story.watch().states()[0].verdicts[BATCH_DIFFERS] == 2

    def test_a_rank_far_behind_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """GIVEN more rows than may wait for a laggard, THEN they are let go, counted, and what comes late too."""
        monkeypatch.setattr(alignment, "PENDING_ROWS_MAX", 50)
        run, watch = Run(SimConfig.benign(2, pp=2, requests=15)), Watch()
        hello(run, watch)
        first, second = run.sim.ranks
        for rank in (first, second):
            for at in range(0, len(run.records[rank]), 20):
                take(run, watch, rank, at, min(at + 20, len(run.records[rank])))
        watch.finish()
        state = watch.states()[0]
        assert watch.incidents() == []
        assert state.verdicts[RANK_MISSING] > 0 < state.late_rows
        lanes = [lane for engine in watch._engines.values() for lane in engine._aligner.lanes]
        assert [lane.pending_rows for lane in lanes] == [0, 0]


class TestLiveness:
    def standing(self, name: str) -> tuple[Run, Watch]:
        run, watch = Run(plan(name, from_step=20, requests=40)), Watch()
        feed_live(run, watch)
        return run, watch

    def test_a_stall_names_who_did_not_enter_the_call_and_who_joined(self) -> None:
        """Ranks 0 and 1 left out a broadcast, and nobody has moved for half a minute: the engine is wedged."""
        run, watch = self.standing("op-dropped")
        beat(run, watch, 25 * S)
        assert watch.tick(20 * S) == []
        (change,) = watch.tick(34 * S)
        incident = change.incident
        assert (incident.check, incident.blamed, incident.first_bad_step) == ("stall", (0, 1), 20)
        assert "did not enter pp_broadcast" in incident.chain[0].text
        assert "joined the batch: r" in incident.chain[0].text
        assert len(incident.values) == 6
        assert watch.states()[0].wedged == incident.chain[0].text

    def test_an_engine_that_goes_on_is_wedged_no_more(self) -> None:
        run, watch = self.standing("op-dropped")
        beat(run, watch, 25 * S)
        watch.tick(34 * S)
        rank = run.sim.ranks[0]
        identity, records = run.identities[rank], run.records[rank]
        moved = [record for record in records if record.kind.name == "INPUTS"][-1]
        later = type(moved)(moved.kind, records[-1].seq + 2, moved.step + 1, 0, moved.body)
        watch.take(identity.instance, rank, digest_records([later], identity, DIGESTER), -1.0, 36 * S)
        watch.tick(37 * S)
        assert watch.states()[0].wedged == ""

    def test_an_idle_engine_is_not_stalled(self) -> None:
        run, watch = Run(SimConfig.benign(3, pp=3, tp=2, requests=10)), Watch()
        feed_live(run, watch)
        for second in (25, 50, 75, 100):
            beat(run, watch, second * S)
            assert watch.tick((second + 9) * S) == []
        assert watch.states()[0].wedged == ""

    def test_a_rank_whose_sidecar_died_is_silent_and_the_engine_not_stalled(self) -> None:
        run, watch = Run(SimConfig.benign(3, pp=3, requests=10)), Watch()
        hello(run, watch)
        dead, *alive = run.sim.ranks
        take(run, watch, dead, 0, len(run.records[dead]) // 2)
        for rank in alive:
            take(run, watch, rank, 0, len(run.records[rank]))
        for second in (20, 40):
            beat(run, watch, second * S, alive)
            watch.tick((second + 5) * S)
        told = [(i.check, i.severity, i.ranks, i.blamed) for i in watch.incidents()]
        assert told == [("rank-silent", Severity.WARNING, (0,), ())]
        assert watch.states()[0].wedged == ""
        assert watch.states()[0].verdicts[RANK_MISSING] > 0

    def test_a_rank_that_never_arms_is_named_after_a_minute(self) -> None:
        run, watch = Run(SimConfig.benign(3, pp=3, requests=5)), Watch()
        for rank in run.sim.ranks[:2]:
            watch.hello(run.identities[rank], S)
        beat(run, watch, 30 * S, run.sim.ranks[:2])
        assert watch.tick(31 * S) == []
        beat(run, watch, 62 * S, run.sim.ranks[:2])
        watch.tick(63 * S)
        assert [(i.check, i.ranks) for i in watch.incidents()] == [("rank-unarmed", (2,))]


def test_memory_stays_bounded_over_a_long_run() -> None:
    """What is kept depends on how much runs at once, not on how long it ran."""
    sizes = []
    for requests in (30, 120):
        run, watch = Run(SimConfig.benign(5, pp=3, requests=requests)), Watch()
        feed_cut(run, watch, 1)
        (engine,) = watch._engines.values()
        lanes = engine._aligner.lanes
        sizes.append(
            (
                sum(len(blocks) for lane in lanes for blocks in lane._pending.values()) < 50,
                sum(len(lane._calls) + len(lane._binds) + len(lane.gaps) for lane in lanes) < 50,
                len(engine._aligner._comparable) < 10,
                len(engine._history._rows._buffers["key"]) <= 4 * 64 * 32,
                len(engine._history._rows._last_keys) <= 64 * 32,
                sum(len(window.steps) for window in engine._history._inputs) < 600,
            )
        )
    assert sizes == [(True,) * 6] * 2
