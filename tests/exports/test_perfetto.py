"""`stagewatch export perfetto`: the file, decoded again, is a sound timeline of what was recorded."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent
from recorded import BEGAN_NS, TRACES, Recorded, record
from simulated import Run, plan

from stagewatch.agents.record import Inputs, Kind, Payload
from stagewatch.monitor.exports import timeline


@dataclass
class Slice:
    track: str
    name: str
    begin: int
    depth: int
    parent: str
    flows: list[int]
    ended_flows: list[int]
    end: int = 0


@dataclass
class Decoded:
    """A trace as its readers see it: events in the order of time, those of one moment in the order of the file."""

    tracks: dict[int, Any]
    slices: list[Slice] = field(default_factory=list)
    instants: list[tuple[str, int, str, dict[str, str | int]]] = field(default_factory=list)
    clocks: list[Any] = field(default_factory=list)

    @property
    def names(self) -> dict[int, str]:
        return {uuid: track.name for uuid, track in self.tracks.items()}


def decoded(path: Path) -> Decoded:
    trace = Trace()
    trace.ParseFromString(path.read_bytes())
    tracks: dict[int, Any] = {}
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            assert packet.track_descriptor.uuid not in tracks, "a track described twice"
            tracks[packet.track_descriptor.uuid] = packet.track_descriptor
    found = Decoded(tracks, clocks=[p.clock_snapshot for p in trace.packet if p.HasField("clock_snapshot")])
    names, stacks = found.names, defaultdict[int, list[Slice]](list)
    events = sorted((p for p in trace.packet if p.HasField("track_event")), key=lambda p: p.timestamp)
    for packet in events:
        event = packet.track_event
        stack = stacks[event.track_uuid]
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            parent = stack[-1].name if stack else ""
            flows, ended = [*event.flow_ids], [*event.terminating_flow_ids]
            begun = Slice(
                names[event.track_uuid], event.name, packet.timestamp, len(stack), parent, flows, ended
            )
            stack.append(begun)
            found.slices.append(begun)
        elif event.type == TrackEvent.TYPE_SLICE_END:
            stack.pop().end = packet.timestamp  # IndexError: an end without a beginning
        else:
            notes = {n.name: n.string_value or n.int_value for n in event.debug_annotations}
            found.instants.append((names[event.track_uuid], packet.timestamp, event.name, notes))
    assert not any(stacks.values()), "slices that never end"
    return found


@pytest.fixture
def timeline_of(export: Command, tmp_path: Path) -> Any:
    def made(*arguments: Any) -> Decoded:
        assert export("perfetto", *arguments, "-o", tmp_path / "a.pftrace", "--force").status == 0
        return decoded(tmp_path / "a.pftrace")

    return made


def rank_name(run: Run, rank: Any) -> str:
    tensor = f", tp {rank.tp}" if run.sim.sizes.tp > 1 else ""
    return f"rank {run.number(rank)}: stage {rank.pp}{tensor}"


def expected_flows(run: Run) -> Counter[tuple[str, str, int, int]]:
    """(track of the broadcast, track of who consumed it, step sent, step before which it was consumed)."""
    found: Counter[tuple[str, str, int, int]] = Counter()
    for rank, own in run.records.items():
        sender = next(
            r for r in run.records if (r.dp, r.tp) == (rank.dp, rank.tp) and r.pp == run.sim.sizes.pp - 1
        )
        for each in own:
            if each.kind is Kind.CONSUMED and isinstance(each.body, Payload) and not each.body.skipped:
                found[rank_name(run, sender), rank_name(run, rank), each.step, each.body.at] += 1
    return found


def drawn_flows(drawn: Decoded) -> Counter[tuple[str, str, int, int]]:
    begins = {flow: each for each in drawn.slices for flow in each.flows}
    ends = {flow: each for each in drawn.slices for flow in each.ended_flows}
    assert begins.keys() == ends.keys(), "a flow that begins or ends nowhere"
    assert sum(len(each.flows) for each in drawn.slices) == len(begins), "a flow that begins twice"
    assert sum(len(each.ended_flows) for each in drawn.slices) == len(ends), "a flow that ends twice"
    step = {flow: int(each.parent.removeprefix("step ")) for flow, each in begins.items()}
    return Counter(
        (begins[flow].track, end.track, step[flow], int(end.parent.removeprefix("step ")))
        for flow, end in ends.items()
    )


class TestTracks:
    def test_a_track_per_rank_below_its_engine(
        self, timeline_of: Any, faulty: Recorded, faulty_run: Run
    ) -> None:
        drawn = timeline_of(faulty.journal)
        [engine] = [t for t in drawn.tracks.values() if not t.parent_uuid]
        ranks = {t.name for t in drawn.tracks.values() if t.parent_uuid == engine.uuid} - {"incidents"}
        assert ranks == {rank_name(faulty_run, rank) for rank in faulty_run.records}
        assert len(drawn.tracks) == len(faulty_run.records) + 2

    def test_times_are_said_to_be_wall_clock_times(self, timeline_of: Any, faulty: Recorded) -> None:
        [clock] = timeline_of(faulty.journal).clocks
        assert len({c.timestamp for c in clock.clocks}) == 1
        assert {c.clock_id for c in clock.clocks} == {1, 6}


class TestSlices:
    def test_every_step_of_every_rank_once_in_order_and_at_its_time(
        self, timeline_of: Any, faulty: Recorded, faulty_run: Run
    ) -> None:
        drawn = timeline_of(faulty.journal)
        for rank, own in faulty_run.records.items():
            # What is consumed after the last step is consumed before one that never comes.
            steps = {r.step for r in own if isinstance(r.body, Inputs)}
            steps |= {r.body.at for r in own if r.kind is Kind.CONSUMED and isinstance(r.body, Payload)}
            mine = [each for each in drawn.slices if each.track == rank_name(faulty_run, rank)]
            assert [each.name for each in mine if each.depth == 0] == [
                f"step {step}" for step in sorted(steps)
            ]
            assert all(a.end < b.begin for a, b in pairwise(mine) if a.depth == b.depth)
            assert all(BEGAN_NS < each.begin < BEGAN_NS + 10**12 for each in mine)

    def test_records_lie_within_the_step_they_belong_to_and_not_within_one_another(
        self, timeline_of: Any, faulty: Recorded, faulty_run: Run
    ) -> None:
        drawn = timeline_of(faulty.journal)
        inside = [each for each in drawn.slices if each.depth]
        assert {each.depth for each in inside} == {1}
        drawn_kinds = Counter(each.name.split(" of ")[0].split(" (")[0] for each in inside)
        recorded = Counter(r.kind for own in faulty_run.records.values() for r in own)
        assert {
            Kind.INPUTS: drawn_kinds["inputs"],
            Kind.MASK: drawn_kinds["mask"],
            Kind.SENT: drawn_kinds["broadcast"],
            Kind.RECEIVED: drawn_kinds["receive"],
            Kind.CONSUMED: drawn_kinds["consume"],
        } == {
            kind: recorded[kind] for kind in (Kind.INPUTS, Kind.MASK, Kind.SENT, Kind.RECEIVED, Kind.CONSUMED)
        }


class TestFlows:
    @pytest.mark.parametrize("tp", [1, 2])
    def test_each_leads_from_a_broadcast_to_where_it_was_consumed(
        self, tp: int, timeline_of: Any, tmp_path: Path
    ) -> None:
        run = Run(plan("old-mask", from_step=3, requests=8, tp=tp))
        drawn = timeline_of(record(run, tmp_path).journal)
        expected = expected_flows(run)
        assert expected
        assert drawn_flows(drawn) == expected

    def test_they_do_not_depend_on_the_order_of_ranks_in_the_recording(
        self, timeline_of: Any, faulty: Recorded, faulty_run: Run
    ) -> None:
        assert drawn_flows(timeline_of(faulty.rings)) == expected_flows(faulty_run)

    def test_of_a_trace_they_end_where_a_broadcast_was_received(self, timeline_of: Any) -> None:
        drawn = timeline_of(*TRACES.glob("good-*"))
        flows = drawn_flows(drawn)
        assert flows
        assert all((a.split(":")[0], b.split(":")[0], s) == ("rank 1", "rank 0", t) for a, b, s, t in flows)

    def test_what_waits_for_its_other_end_is_bounded_and_never_dangles(
        self, export: Command, timeline_of: Any, faulty: Recorded, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(timeline, "PENDING_MAX", 2)
        drawn = timeline_of(faulty.rings)
        assert len(drawn.slices) == len(timeline_of(faulty.journal).slices)
        drawn_flows(drawn)

    def test_a_broadcast_that_is_not_on_record_is_told(
        self, export: Command, faulty: Recorded, faulty_run: Run, tmp_path: Path
    ) -> None:
        first = sorted(path for path in faulty.rings.iterdir() if ".pp0." in path.name)
        outcome = export("perfetto", *first, "-o", tmp_path / "a.pftrace")
        assert outcome.status == 0
        assert "payloads have no flow: their broadcast is not on record" in outcome.out
        assert drawn_flows(decoded(tmp_path / "a.pftrace")) == Counter()


class TestIncidents:
    def test_each_is_an_instant_at_its_first_bad_step_on_its_own_track_and_on_the_ranks_it_names(
        self, timeline_of: Any, faulty: Recorded, faulty_run: Run
    ) -> None:
        drawn = timeline_of(faulty.journal)
        told = {
            notes["incident"]: (t, notes) for track, t, _, notes in drawn.instants if track == "incidents"
        }
        assert told.keys() == {incident.id for incident in faulty.live} and told
        for incident in faulty.live:
            t, notes = told[incident.id]
            assert (notes["first_bad_step"], notes["request"]) == (incident.first_bad_step, incident.request)
            assert notes["cause 1"] == f"step {incident.chain[0].step}: {incident.chain[0].text}"
            near = [s for s in drawn.slices if s.name == f"step {incident.first_bad_step}"]
            assert min(s.begin for s in near) <= t <= max(s.end for s in near)
            elsewhere = {track for track, _, _, n in drawn.instants if n["incident"] == incident.id}
            wanted = incident.blamed or incident.ranks
            assert elsewhere - {"incidents"} == {
                rank_name(faulty_run, rank)
                for rank in faulty_run.records
                if faulty_run.number(rank) in wanted
            }

    def test_of_a_trace_without_a_clock_lie_at_the_millisecond_of_their_step(self, timeline_of: Any) -> None:
        drawn = timeline_of(*TRACES.glob("old-mask-*"))
        assert drawn.clocks == []
        assert all(
            t == notes["first_bad_step"] * timeline.STEP_NS
            for track, t, _, notes in drawn.instants
            if track == "incidents"
        )
