"""What the watch counts beside verdicts, held against what the simulator wrote down: raw records, never digests."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from simulated import DIGESTER, Run, S, feed_cut, feed_live, hello, plan, settle

from stagewatch.agents.evidence import digest_records
from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.engine import LabConfig, run_lab
from stagewatch.agents.lab.fault import Plan
from stagewatch.agents.lab.simulator import SimConfig
from stagewatch.agents.lab.workload import Workload
from stagewatch.agents.mask import faulty_mask, fixed_mask
from stagewatch.agents.probe import Health, Probe
from stagewatch.agents.record import Collective, Heartbeat, Inputs, Kind, Mask, Payload, Record
from stagewatch.agents.ring import RingReader, RingWriter
from stagewatch.agents.settings import ProbeSettings
from stagewatch.monitor.incidents import Severity
from stagewatch.monitor.states import EngineState
from stagewatch.monitor.watch import Watch


def watched(run: Run, seed: int = 1) -> EngineState:
    watch = Watch()
    feed_cut(run, watch, seed)
    settle(run, watch)
    (state,) = watch.states()
    return state


def masks(run: Run) -> dict[int, Mask]:
    """The first rank's masks by step."""
    own = run.records[min(run.records)]
    return {record.step: record.body for record in own if isinstance(record.body, Mask)}


def fed(run: Run, step: int) -> Inputs:
    by_rank = run.inputs[0, step]
    return by_rank[max(by_rank)]


class TestExclusions:
    def test_on_a_sound_mask_nothing_is_excluded_and_nothing_harmed(self) -> None:
        state = watched(Run(SimConfig.benign(3, pp=3, requests=20)))
        assert (state.rows_excluded, state.rows_harmed) == (0, 0)

    def test_every_dropped_row_is_counted_and_those_whose_request_diverges_later_again(self) -> None:
        """GIVEN the founding fault THEN rows dropped at a request's very end are excluded and not harmed."""
        run = Run(plan("old-mask"))
        state = watched(run)
        dropped = {(one.request_id, one.step) for one in run.injections}
        diverging = set()
        for (request, life), rows in run.rows.items():
            first = min((step for name, step in dropped if name == request), default=None)
            harm = run.divergence(request, life, first) if first is not None else None
            if harm is not None:
                steps = {step for _, step, _ in rows}
                diverging |= {(request, step) for name, step in dropped if name == request and step in steps}
        assert state.rows_excluded == len(dropped)
        assert 0 < state.rows_harmed <= len(diverging) < len(dropped)


class TestBroadcast:
    @pytest.mark.parametrize("tp", [1, 2])
    def test_bytes_steps_and_rows_are_those_of_the_records(self, tp: int) -> None:
        run = Run(SimConfig.benign(5, pp=3, tp=tp, requests=20))
        state = watched(run)
        sender = Rank(0, 2, 0)
        sizes = {"int32": 4, "int64": 8}
        calls = [
            (record.step, record.body.numel * sizes[record.body.what.split()[2]])
            for record in run.records[sender]
            if isinstance(record.body, Collective) and record.body.what.startswith("pp_broadcast ")
        ]
        # The newest step may still be going on: its calls are not complete.
        newest = max(step for step, _ in calls)
        complete = [(step, size) for step, size in calls if step < newest]
        assert state.broadcast_steps in (
            len({step for step, _ in complete}),
            len({step for step, _ in calls}),
        )
        assert state.broadcast_bytes in (sum(size for _, size in complete), sum(size for _, size in calls))
        assert state.broadcast_rows == sum(int(mask.engine.sum()) for mask in masks(run).values())

    def test_what_only_the_fixed_mask_sends_is_what_the_faulty_one_would_drop(self) -> None:
        run = Run(replace(SimConfig.benign(5, pp=3, requests=30), stops=False))
        only_fixed = 0
        for step, mask in masks(run).items():
            body = fed(run, step)
            old = faulty_mask(body.mirror, body.scheduled, body.prefill_len, body.cap)
            kept = np.zeros(len(body.cap), np.bool_) if old is None else old
            only_fixed += int(((mask.engine != 0) & ~kept).sum())
        state = watched(run)
        assert state.broadcast_rows_fixed == only_fixed > 0
        assert state.broadcast_rows_fixed < state.broadcast_rows

    def test_on_the_faulty_mask_nothing_of_it_is_sent(self) -> None:
        run = Run(plan("old-mask"))
        fixed_would = sum(
            int(rows.sum())
            for step in masks(run)
            if (body := fed(run, step)) is not None
            and (rows := fixed_mask(body.mirror, body.scheduled, body.prefill_len)) is not None
        )
        state = watched(run)
        assert state.broadcast_rows_fixed == 0
        assert state.broadcast_rows < fixed_would


class TestTroubles:
    def test_a_sound_engine_has_none(self) -> None:
        assert watched(Run(SimConfig.benign(3, pp=3, requests=20))).troubles == ()

    @pytest.mark.parametrize("fault", ["old-mask", "width-mismatch"])
    def test_the_worst_is_that_of_the_incidents(self, fault: str) -> None:
        """It is asked for at each scrape, and must not cost a walk through thousands of incidents."""
        run, watch = Run(plan(fault)), Watch()
        feed_cut(run, watch, 1)
        settle(run, watch)
        (state,) = watch.states()
        assert state.worst == max((incident.severity for incident in watch.incidents()), default=None)

    def test_the_founding_fault_names_the_stage_and_when_it_began_and_was_last_seen(self) -> None:
        """GIVEN a fault judged at one moment and again at a later one THEN its trouble spans both, and then stays."""
        run, watch = Run(plan("old-mask")), Watch()
        feed_live(run, watch)
        settle(run, watch)
        incidents = [one for one in watch.incidents() if one.severity is Severity.CRITICAL]
        worst = {
            (trouble.check, trouble.stage): trouble
            for trouble in watch.states()[0].troubles
            if trouble.severity is Severity.CRITICAL
        }
        assert {check for check, _ in worst} == {"excluded-row"}
        stages = {rank // run.sim.sizes.tp for one in incidents for rank in one.blamed}
        assert {stage for _, stage in worst} == stages
        for trouble in worst.values():
            assert trouble.first_ns == min(
                one.first_bad_ns for one in incidents if trouble.stage * run.sim.sizes.tp in one.blamed
            )
            assert trouble.last_ns > trouble.first_ns

    def test_nobody_to_blame_is_stage_minus_one(self) -> None:
        run, watch = Run(plan("old-mask")), Watch()
        feed_live(run, watch)
        notices = [t for t in watch.states()[0].troubles if t.severity is Severity.NOTICE]
        assert {trouble.stage for trouble in notices} == {-1}


def state_of(watch: Watch, rank: Rank) -> Any:
    return next(r for state in watch.states() for r in state.ranks if r.identity.rank == rank)


def say(run: Run, watch: Watch, rank: Rank, number: int, health: Health) -> None:
    """The rank's heartbeat number ``number``."""
    text = msgspec.json.encode(health).decode()
    record = Record(Kind.HEARTBEAT, number, 0, number, Heartbeat(text))
    evidence = digest_records([record], run.identities[rank], DIGESTER)
    watch.take(run.identities[rank].instance, rank, evidence, -1.0, S)


class TestRanks:
    FIRST, LAST = Rank(0, 0, 0), Rank(0, 1, 0)
    WELL = Health(True, "", 5, 0, 1000, 2, 700)

    def setup_method(self) -> None:
        self.run = Run(SimConfig(seed=1, pp=2))
        self.watch = Watch()
        hello(self.run, self.watch)

    def beat(self, rank: Rank, number: int, **changed: Any) -> EngineState:
        say(self.run, self.watch, rank, number, msgspec.structs.replace(self.WELL, **changed))
        return self.watch.states()[0]

    def test_probe_time_adds_up_over_heartbeats_and_drops_are_the_last_told(self) -> None:
        self.beat(self.FIRST, 0)
        state = self.beat(self.FIRST, 1, probe_ns=500, busy_steps=1, drops=3, probe_p99_ns=900).ranks[0]
        told = (state.probe_ns, state.probe_steps, state.probe_drops, state.probe_p99_ns)
        assert told == (1500, 3, 3, 900)

    def test_an_engine_has_ended_when_every_rank_said_so(self) -> None:
        assert not self.beat(self.FIRST, 0, ended=True).ended
        assert self.beat(self.LAST, 0, ended=True).ended

    def test_a_rank_that_disarmed_does_not_keep_its_engine_from_ending(self) -> None:
        assert not self.beat(self.FIRST, 0, armed=False).ended
        assert self.beat(self.LAST, 0, ended=True).ended

    def test_a_probe_says_that_it_ends_and_only_then(self, tmp_path: Path) -> None:
        identity = self.run.identities[self.FIRST]
        probe = Probe(RingWriter(tmp_path / "rings", identity, 1 << 16), identity)
        probe.heartbeat()
        probe.close()
        records = [*RingReader(tmp_path / "rings" / identity.ring_name).read(100)]
        beats = [
            msgspec.json.decode(r.body.health, type=Health) for r in records if isinstance(r.body, Heartbeat)
        ]
        assert [(health.armed, health.ended) for health in beats] == [(True, False), (True, True)]


def test_a_step_that_broadcasts_nothing_is_recorded_after_those_under_way(tmp_path: Path) -> None:
    """GIVEN a mask that drops every row while an earlier broadcast is on its way THEN no payload comes late."""
    lab = LabConfig(
        seed=7,
        workload=Workload(requests=3, prompt_len=(8, 12), max_tokens=(8, 16)),
        probe=ProbeSettings(tmp_path / "rings", "test", 8 << 20, 0.2, 0.0, 2, fixed_mask=False),
        fault=Plan("old-mask"),
    )
    assert run_lab(lab).error == ""
    skipped = 0
    for ring in (tmp_path / "rings").glob("*.ring"):
        steps = []
        for record in RingReader(ring).read(1 << 20):
            if record.kind is Kind.RECEIVED and isinstance(record.body, Payload):
                steps.append(record.step)
                skipped += record.body.skipped
        assert steps == sorted(steps)
    assert skipped
