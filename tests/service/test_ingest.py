"""The door: what continues a stream is taken once, what repeats it is acknowledged, what is wrong is refused."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest
from service_records import batch, batch_message, hello, identity, journalled_seqs

from stagewatch.agents import wire
from stagewatch.agents.identity import Fingerprint, Rank, Sizes
from stagewatch.agents.wire import Ack, Downward, Limits, Refusal, Welcome
from stagewatch.monitor.ingest import CONFLICT_RETRY_S, LOST_MAX, Intake
from stagewatch.monitor.journal import EntryKind, SegmentReader, head_of, read_journal, segments_in
from stagewatch.monitor.sessions import BAD_FRAMES_MAX, FrameRefusedError, Session
from stagewatch.monitor.settings import CollectorSettings
from stagewatch.monitor.streams import BatchTaken, HelloTaken, Taken

RANK = identity().rank


def settings(directory: Path, **changes: Any) -> CollectorSettings:
    made = CollectorSettings("127.0.0.1", 0, directory, "t" * 20, 1 << 20, 1 << 30, 1 << 20, 8, "", Limits())
    return replace(made, **changes)


class Door:
    """An intake with one session, on the running loop."""

    def __init__(self, directory: Path, **changes: Any) -> None:
        self.judged: list[Taken] = []
        self.intake = Intake(
            settings(directory, **changes), lambda group, position: self.judged.extend(group)
        )
        self.restored = [self.intake.restore(entry) for entry in self.intake.journal.recover()]
        self.intake.open()
        self.session = Session()

    def take(self, *messages: bytes) -> None:
        for message in messages:
            self.intake.take(message, self.session)

    async def said(self, count: int = 1) -> list[Downward]:
        """The next ``count`` frames for the sidecar."""
        frames: list[Downward] = []
        while len(frames) < count:
            frames += [wire.decode_downward(frame) for frame in await self.session.outgoing()]
        return frames


class AtTheDoor(Protocol):
    """Runs a test's body with a fresh door over the same directory each time."""

    def __call__(self, body: Callable[[Door], Awaitable[None]], **changes: Any) -> None: ...


@pytest.fixture
def at_the_door(tmp_path: Path) -> AtTheDoor:
    def run(body: Callable[[Door], Awaitable[None]], **changes: Any) -> None:
        async def opened() -> None:
            door = Door(tmp_path, **changes)
            try:
                await asyncio.wait_for(body(door), 30)
            finally:
                await asyncio.to_thread(door.intake.journal.close)

        asyncio.run(opened())

    return run


def refusal_of(door: Door, message: bytes) -> tuple[str, Refusal]:
    with pytest.raises(FrameRefusedError) as caught:
        door.take(message)
    return caught.value.code, caught.value.answer


def test_batches_are_acknowledged_once_durable_and_then_judged(
    at_the_door: AtTheDoor, tmp_path: Path
) -> None:
    async def body(door: Door) -> None:
        door.take(hello())
        assert await door.said() == [Welcome("life-1", RANK, 0)]
        door.take(batch_message(0, 3), batch_message(3, 5))
        while (ack := (await door.said())[-1]) != Ack("life-1", RANK, 5):
            assert ack == Ack("life-1", RANK, 3)
        assert [getattr(taken, "next_seq", None) for taken in door.judged] == [0, 3, 5]

    at_the_door(body)
    assert journalled_seqs(tmp_path) == {"life-1.dp0.pp0.tp0": [0, 1, 2, 3, 4]}


def test_what_is_known_is_acknowledged_and_not_taken_again(at_the_door: AtTheDoor, tmp_path: Path) -> None:
    async def body(door: Door) -> None:
        door.take(hello(), batch_message(0, 3))
        await door.said(2)
        door.take(batch_message(0, 3), batch_message(1, 2))
        assert (await door.said())[-1] == Ack("life-1", RANK, 3)
        assert door.intake.duplicates == 2

    at_the_door(body)
    assert journalled_seqs(tmp_path) == {"life-1.dp0.pp0.tp0": [0, 1, 2]}


def test_a_restart_remembers_every_position(at_the_door: AtTheDoor, tmp_path: Path) -> None:
    async def first(door: Door) -> None:
        door.take(hello(), batch_message(0, 3))
        await door.said(2)

    async def second(door: Door) -> None:
        door.take(hello())
        assert await door.said() == [Welcome("life-1", RANK, 3)]
        door.take(batch_message(3, 4))
        await door.said()

    at_the_door(first)
    at_the_door(second)
    assert journalled_seqs(tmp_path) == {"life-1.dp0.pp0.tp0": [0, 1, 2, 3]}


def test_positions_outlive_the_segments_that_made_them(at_the_door: AtTheDoor, tmp_path: Path) -> None:
    # GIVEN a rank that has long been silent while another fills segment after segment
    other = identity(1)

    async def fill(door: Door) -> None:
        door.take(hello(), batch_message(0, 3), hello(other))
        await door.said(2)
        for number in range(0, 60, 2):
            door.take(batch_message(number, number + 2, other))
            await door.said()

    at_the_door(fill, segment_bytes=4096, keep_bytes=16384)
    assert "life-1.dp0.pp0.tp0" not in journalled_seqs(tmp_path)

    # THEN it still goes on where it was
    async def resume(door: Door) -> None:
        door.take(hello())
        assert await door.said() == [Welcome("life-1", RANK, 3)]

    at_the_door(resume)


def test_a_gap_or_an_overlap_is_refused_and_can_be_cured(at_the_door: AtTheDoor) -> None:
    async def body(door: Door) -> None:
        door.take(hello(), batch_message(0, 3))
        await door.said(2)
        for message in (batch_message(4, 6), batch_message(2, 6), batch_message(4, 6, lost=2)):
            code, answer = refusal_of(door, message)
            assert code == "out_of_order"
            assert answer.retry_s == 0
        door.take(batch_message(5, 6, lost=2))
        assert (await door.said())[-1] == Ack("life-1", RANK, 6)

    at_the_door(body)


def test_a_reconnect_is_welcomed_at_what_is_durable_not_at_what_is_queued(at_the_door: AtTheDoor) -> None:
    async def body(door: Door) -> None:
        door.take(hello())
        await door.said()
        door.take(batch_message(0, 3))
        again = Session()
        door.intake.take(hello(), again)
        (welcome,) = [wire.decode_downward(frame) for frame in again.pending()]
        assert welcome == Welcome("life-1", RANK, 0)  # its journalling has not been heard of yet
        door.intake.take(batch_message(0, 3), again)
        frames = []
        while Ack("life-1", RANK, 3) not in frames:
            frames += [wire.decode_downward(frame) for frame in await again.outgoing()]

    at_the_door(body)


def test_a_batch_needs_a_hello_on_its_own_connection(at_the_door: AtTheDoor) -> None:
    async def body(door: Door) -> None:
        assert refusal_of(door, batch_message(0, 1))[0] == "no_hello"
        door.intake.take(hello(), Session())
        assert refusal_of(door, batch_message(0, 1))[0] == "no_hello"

    at_the_door(body)


def test_evidence_that_is_wrong_is_refused_for_good_and_by_number(at_the_door: AtTheDoor) -> None:
    async def body(door: Door) -> None:
        door.take(hello())
        bad = msgspec.structs.replace(batch(0, 4), parts={"inputs": b"\x00" * 64})
        code, answer = refusal_of(door, wire.encode_frame(bad))
        assert code == "evidence"
        assert (answer.instance, answer.rank, answer.next_seq) == ("life-1", RANK, 4)
        assert answer.retry_s < 0

    at_the_door(body)


@pytest.mark.parametrize(
    "change",
    [
        {"rank": Rank(0, 2, 0)},
        {"rank": Rank(-1, 0, 0)},
        {"sizes": Sizes(1, 0, 1)},
        {"sizes": Sizes(1, 4096, 2)},
        {"instance": ""},
        {"instance": "a/b"},
        {"deployment": "x" * 65},
        {"host": "h" * 257},
        {"engine": "line\nbreak"},
    ],
)
def test_an_identity_that_cannot_be_is_refused(at_the_door: AtTheDoor, change: dict[str, Any]) -> None:
    async def body(door: Door) -> None:
        code, answer = refusal_of(door, hello(msgspec.structs.replace(identity(), **change)))
        assert code == "identity"
        assert answer.reason.startswith("identity: ")

    at_the_door(body)


def test_ranks_of_one_engine_must_tell_the_same_sizes(at_the_door: AtTheDoor) -> None:
    async def body(door: Door) -> None:
        door.take(hello())
        assert refusal_of(door, hello(identity(1, stages=3)))[0] == "identity"

    at_the_door(body)


def test_another_protocol_is_refused_with_the_side_to_upgrade(at_the_door: AtTheDoor) -> None:
    async def body(door: Door) -> None:
        for protocol, side in ((wire.PROTOCOL + 1, "collector"), (wire.PROTOCOL - 1, "sidecar")):
            code, answer = refusal_of(door, wire.encode_frame(wire.Hello(protocol, identity())))
            assert code == "protocol"
            assert answer.reason.endswith(f"upgrade the {side}")

    at_the_door(body)


def test_more_ranks_than_allowed_are_told_to_come_back(at_the_door: AtTheDoor) -> None:
    async def body(door: Door) -> None:
        for number in range(2):
            door.take(hello(identity(0, f"life-{number}")))
        code, answer = refusal_of(door, hello(identity(0, "life-2")))
        assert code == "too_many"
        assert answer.retry_s > 0

    at_the_door(body, ranks_max=2)


def test_a_full_queue_makes_readers_wait_until_the_disk_has_caught_up(at_the_door: AtTheDoor) -> None:
    async def body(door: Door) -> None:
        door.take(hello(), batch_message(0, 50))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(door.intake.room(), 0)
        await door.intake.room()
        assert door.intake.journal.bytes_waiting == 0

    at_the_door(body, queue_bytes=1024)


def test_small_frames_count_for_what_they_take(at_the_door: AtTheDoor) -> None:
    async def body(door: Door) -> None:
        door.take(hello())
        await door.said()
        messages = [batch_message(number, number + 1) for number in range(4)]
        assert sum(map(len, messages)) < 16 * 1024
        door.take(*messages)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(door.intake.room(), 0)
        await door.intake.room()

    at_the_door(body, queue_bytes=16 * 1024)


def test_a_hello_is_journalled_once_however_often_it_is_said(at_the_door: AtTheDoor, tmp_path: Path) -> None:
    async def body(door: Door) -> None:
        for _ in range(3):
            door.take(hello())
        door.take(batch_message(0, 1))
        assert await door.said(2) == [Welcome("life-1", RANK, 0), Ack("life-1", RANK, 1)]

    at_the_door(body)
    assert len(list(read_journal(tmp_path / "journal"))) == 2


def test_an_instance_used_for_a_second_life_is_refused(at_the_door: AtTheDoor) -> None:
    """Its records are numbered from 0 again: they would pass for what is known, and be dropped unseen."""

    async def body(door: Door) -> None:
        door.take(hello(), batch_message(0, 3))
        await door.said(2)
        code, answer = refusal_of(door, hello(msgspec.structs.replace(identity(), started_ns=2)))
        assert code == "identity"
        assert answer.reason.endswith("give each start an instance of its own")
        door.take(batch_message(3, 4))  # the first life goes on
        assert (await door.said())[-1] == Ack("life-1", RANK, 4)

    at_the_door(body)


def test_one_rank_is_not_streamed_with_two_keys_at_once(at_the_door: AtTheDoor) -> None:
    """GIVEN two sidecars with different keys on one ring WHEN both say hello THEN the second waits for the first."""
    rekeyed = msgspec.structs.replace(identity(), config=(Fingerprint("digest_key", "other"),))

    async def body(door: Door) -> None:
        door.take(hello())
        await door.said()
        second = Session()
        with pytest.raises(FrameRefusedError) as caught:
            door.intake.take(hello(rekeyed), second)
        assert (caught.value.code, caught.value.answer.retry_s) == ("identity", CONFLICT_RETRY_S)
        door.take(batch_message(0, 1))
        door.intake.leave(door.session)
        door.intake.take(hello(rekeyed), second)
        while len([w for w in door.judged if isinstance(w, HelloTaken)]) < 2:
            await asyncio.sleep(0)
        # each hello is judged as it was said, however late
        assert [w.identity for w in door.judged if isinstance(w, HelloTaken)] == [identity(), rekeyed]

    at_the_door(body)


def test_a_refused_hello_leaves_nothing_behind(at_the_door: AtTheDoor) -> None:
    async def body(door: Door) -> None:
        door.take(hello(identity(0, "life-0")))
        assert refusal_of(door, hello(identity(0, "life-1", stages=3)))[0] == "too_many"
        door.intake.streams.by_key.clear()
        door.take(hello(identity(0, "life-1", stages=2)))  # its sizes were not taken from the one refused

    at_the_door(body, ranks_max=1)


def test_a_peer_that_never_reads_costs_one_welcome_a_rank(at_the_door: AtTheDoor) -> None:
    async def body(door: Door) -> None:
        for _ in range(1000):
            door.take(hello())
        assert len(door.session.pending()) == 1

    at_the_door(body)


def test_refused_ranks_do_not_close_the_connection_of_the_others() -> None:
    session = Session()
    refused = FrameRefusedError("too_many", "", Refusal("", 60.0))
    assert [session.refuse(refused, 8) for _ in range(9)] == [False] * 8 + [True]


def test_bad_frames_close_the_connection() -> None:
    session = Session()
    bad = FrameRefusedError("malformed", "", Refusal("", -1.0))
    assert [session.refuse(bad, 8) for _ in range(BAD_FRAMES_MAX)] == [False] * (BAD_FRAMES_MAX - 1) + [True]


@pytest.mark.parametrize("margin_s", [float("nan"), float("inf"), float("-inf")])
def test_a_margin_that_is_no_number_is_unknown(at_the_door: AtTheDoor, margin_s: float) -> None:
    async def body(door: Door) -> None:
        door.take(hello(), wire.encode_frame(msgspec.structs.replace(batch(0, 1), margin_s=margin_s)))
        await door.said(2)
        (taken,) = [t for t in door.judged if isinstance(t, BatchTaken)]
        assert taken.margin_s == -1.0

    at_the_door(body)


def test_what_a_missing_segment_held_is_told_as_lost(at_the_door: AtTheDoor, tmp_path: Path) -> None:
    # GIVEN a journal of many segments, of which one in the middle is deleted
    async def fill(door: Door) -> None:
        door.take(hello())
        await door.said()
        for number in range(60):
            door.take(batch_message(number, number + 1))
            await door.said()

    at_the_door(fill, segment_bytes=4096)
    segments = segments_in(tmp_path / "journal")
    assert len(segments) > 5
    gone = [e for e in SegmentReader(segments[2]) if e.kind is EntryKind.BATCH]
    segments[2].unlink()

    # WHEN it is read back
    async def back(door: Door) -> None:
        heard = [t.evidence for t in door.restored if isinstance(t, BatchTaken)]
        # THEN the evidence after the gap says how much is missing, and the stream goes on
        assert sum(e.lost for e in heard) == len(gone) > 0
        assert sum(e.next_seq - e.first_seq for e in heard) == 60 - len(gone)
        door.take(hello())
        assert (await door.said())[0] == Welcome("life-1", RANK, 60)

    at_the_door(back)

    # AND where nothing follows the gap, the next live evidence says it
    for segment in segments_in(tmp_path / "journal")[3:-1]:
        segment.unlink()
    for segment in segments_in(tmp_path / "journal")[-2:]:
        keep = [e for e in SegmentReader(segment) if e.kind is EntryKind.CARRIED]
        segment.write_bytes(
            b"STGWJRN1" + b"".join(head_of(e.kind, e.t_ns, e.payload) + e.payload for e in keep)
        )

    async def live(door: Door) -> None:
        heard = sum(t.evidence.next_seq for t in door.restored[-1:] if isinstance(t, BatchTaken))
        assert heard == 0
        known = [t.next_seq for t in door.restored if isinstance(t, BatchTaken)][-1]
        door.take(hello(), batch_message(60, 61))
        await door.said(2)
        assert [t.evidence.lost for t in door.judged if isinstance(t, BatchTaken)] == [60 - known]

    at_the_door(live)


def test_answers_to_refusals_say_so_on_the_wire() -> None:
    refusal = Refusal("why", -1.0, "life-1", RANK, 9)
    assert wire.decode_downward(wire.encode_frame(refusal)) == refusal


def test_a_loss_that_no_engine_can_have_is_refused(at_the_door: AtTheDoor) -> None:
    """It would use up the numbers of its stream: whatever came after it would count as known."""

    async def body(door: Door) -> None:
        door.take(hello(), batch_message(0, 3))
        await door.said(2)
        for lost in (LOST_MAX + 1, 1 << 62):
            jump = 3 + lost
            message = msgspec.structs.replace(batch(3, 5), first_seq=jump, next_seq=jump + 2, lost=lost)
            code, answer = refusal_of(door, wire.encode_frame(message))
            assert (code, answer.next_seq) == ("out_of_order", -1)
            assert "more than an engine writes" in answer.reason
        door.take(batch_message(3, 5))
        assert (await door.said())[-1] == Ack("life-1", RANK, 5)

    at_the_door(body)


def test_more_streams_than_fit_are_read_back_without_growing(at_the_door: AtTheDoor) -> None:
    async def first(door: Door) -> None:
        for number in range(6):
            who = identity(0, f"life-{number}")
            door.take(hello(who), batch_message(0, 2, who))
        while any(stream.durable_seq < 2 for stream in door.intake.streams.by_key.values()):
            await door.session.outgoing()

    async def second(door: Door) -> None:
        assert len(door.intake.streams.by_key) == 2
        assert len(door.intake.streams.parked) == 4
        door.intake.streams.by_key.clear()
        door.take(hello(identity(0, "life-0")))  # it made room, and is welcomed where it stood all the same
        assert await door.said() == [Welcome("life-0", RANK, 2)]

    at_the_door(first)
    at_the_door(second, ranks_max=2)
