"""What a sidecar gives up is told to the collector, and adds up there."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from service_records import KEY, append_steps, batch, identity
from simulated import DIGESTER, Run, hello

from stagewatch.agents import tail as tail_module
from stagewatch.agents import wire
from stagewatch.agents.errors import FrameError
from stagewatch.agents.evidence import digest_records
from stagewatch.agents.identity import Node, Rank
from stagewatch.agents.lab.simulator import SimConfig
from stagewatch.agents.record import Kind, Note, Record
from stagewatch.agents.ring import RingWriter
from stagewatch.agents.shipping import Destination
from stagewatch.agents.sidecar import GONE_S_MAX, Sidecar, SidecarSettings
from stagewatch.monitor.nodes import PRESENT_S, SIDECARS_MAX, Nodes
from stagewatch.monitor.watch import Watch

ONE, OTHER = "1" * 16, "2" * 16
S = 10**9


def sidecar_of(directory: Path) -> Sidecar:
    nowhere = Destination("ws://127.0.0.1:1", "t" * 20)
    made = Sidecar(SidecarSettings(directory, nowhere, KEY, False, False, 1 << 20, 0.0))
    made.scan()
    return made


def read_all(sidecar: Sidecar) -> None:
    for key, tail in list(sidecar.tails.items()):
        while sidecar._read(key, tail):
            pass


def frames(sidecar: Sidecar) -> list[wire.Batch]:
    found = []
    for tail in sidecar.tails.values():
        if not tail.welcomed:
            tail.welcome(0)
        while (held := tail.unsent()) is not None:
            frame = wire.decode_upward(held.message, wire.Limits())
            assert isinstance(frame, wire.Batch)
            found.append(frame)
    return found


@pytest.fixture
def rings(tmp_path: Path) -> Path:
    return tmp_path / "rings"


def test_records_of_a_removed_ring_are_told_with_the_next_batch_of_any_rank(
    rings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, stays = RingWriter(rings, identity(0), 1 << 18), RingWriter(rings, identity(1), 1 << 18)
    sidecar = sidecar_of(rings)
    append_steps(gone, 5)
    read_all(sidecar)
    gone.path.unlink()
    clock = iter([100.0, 101.0 + GONE_S_MAX])
    monkeypatch.setattr("stagewatch.agents.sidecar.time.monotonic", lambda: next(clock))
    sidecar.scan()
    sidecar.scan()
    monkeypatch.undo()
    append_steps(stays, 1)
    read_all(sidecar)
    (frame,) = frames(sidecar)
    assert frame.node is not None
    assert (frame.node.ring_removed, frame.node.ring_unreadable) == (5, 0)


def test_files_that_are_no_rings_are_told(rings: Path) -> None:
    ring = RingWriter(rings, identity(0), 1 << 18)
    (rings / "x.ring").write_bytes(b"no ring")
    sidecar = sidecar_of(rings)
    append_steps(ring, 1)
    read_all(sidecar)
    (frame,) = frames(sidecar)
    assert frame.node is not None
    assert frame.node.rings_refused == 1


def test_what_the_collector_refused_is_left_out_and_what_was_overwritten_is_not(rings: Path) -> None:
    """GIVEN frames of which the first is refused for good THEN the next says so, apart from what the ring lost."""
    ring = RingWriter(rings, identity(0), 1 << 18)
    sidecar = sidecar_of(rings)
    append_steps(ring, 3)
    read_all(sidecar)
    (first,) = frames(sidecar)
    (tail,) = sidecar.tails.values()
    tail.condemn(first.next_seq)
    append_steps(ring, 2, first_step=4)
    read_all(sidecar)
    (again,) = frames(sidecar)
    assert (again.first_seq, again.lost, again.left_out) == (3, 3, 3)
    append_steps(ring, 200, first_step=6)
    last = tail_module.RECORDS_PER_FRAME + 200
    append_steps(ring, last, first_step=206)
    read_all(sidecar)
    overrun = [frame for frame in frames(sidecar) if frame.lost]
    assert overrun
    assert {frame.left_out for frame in overrun} == {0}


def test_more_left_out_than_lost_is_no_frame() -> None:
    frame = msgspec.structs.replace(batch(0, 3), lost=1, left_out=2)
    with pytest.raises(FrameError, match="2 of 1 lost records"):
        wire.evidence_of(frame, wire.Limits())


@pytest.mark.parametrize("node", [Node("x" * 16), Node("1" * 15), Node(ONE, -1), Node(ONE, 0, 0, 2**63)])
def test_a_sidecar_that_tells_what_cannot_be_is_refused(node: Node) -> None:
    with pytest.raises(FrameError, match="what cannot be"):
        wire.evidence_of(msgspec.structs.replace(batch(0, 3), node=node), wire.Limits())


def test_a_frame_of_an_older_sidecar_tells_nothing_and_is_taken() -> None:
    older = msgspec.msgpack.decode(wire.encode_frame(batch(0, 3)))
    del older["left_out"], older["node"]
    frame = wire.decode_upward(msgspec.msgpack.encode(older), wire.Limits())
    assert isinstance(frame, wire.Batch)
    assert wire.evidence_of(frame, wire.Limits()).left_out == 0


class TestSums:
    def test_each_sidecar_tells_what_it_counted_so_far_and_repeats_itself(self) -> None:
        nodes = Nodes()
        for node in (Node(ONE, 3), Node(ONE, 3, 1, 0, 4), Node(OTHER, 2), Node(ONE, 5, 1, 0, 4)):
            nodes.note(node, S)
        assert nodes.drops == {
            ("sidecar", "ring_removed"): 7,
            ("sidecar", "ring_unreadable"): 1,
            ("windows", "dropped"): 4,
        }

    def test_what_forgotten_sidecars_gave_up_stays(self) -> None:
        nodes = Nodes()
        for number in range(SIDECARS_MAX + 3):
            nodes.note(Node(f"{number:016x}", 1), S)
        assert nodes.drops["sidecar", "ring_removed"] == SIDECARS_MAX + 3

    def test_files_of_sidecars_that_are_gone_no_longer_count(self) -> None:
        nodes = Nodes()
        nodes.note(Node(ONE, rings_refused=2), S)
        nodes.note(Node(OTHER, rings_refused=1), 50 * S)
        assert nodes.rings_refused(51 * S) == 3
        assert nodes.rings_refused(int((PRESENT_S + 2) * S)) == 1

    def test_what_a_restored_engine_told_before_is_no_news(self) -> None:
        """GIVEN a collector that starts from where it was saved THEN an alert on what was given up stays silent."""
        run = Run(SimConfig(seed=1, pp=2))
        watch, nodes = Watch(), Nodes()
        hello(run, watch)
        rank = Rank(0, 0, 0)
        record = Record(Kind.NOTE, 0, 0, 0, Note("x"))
        told = replace(digest_records([record], run.identities[rank], DIGESTER), node=Node(ONE, 5))
        watch.take(run.identities[rank].instance, rank, told, -1.0, S)
        nodes.know(watch.states())
        nodes.note(Node(ONE, 6), 2 * S)
        assert nodes.drops["sidecar", "ring_removed"] == 1
