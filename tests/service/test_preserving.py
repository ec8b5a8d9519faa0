"""Asking for windows: every rank of the engine once, again until answered, and nobody who would not understand."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from service_records import hello, identity
from test_ingest import settings
from test_store import incident

from stagewatch.agents import wire
from stagewatch.agents.errors import FrameError
from stagewatch.agents.identity import Node
from stagewatch.agents.wire import Downward, Freeze, Frozen, Limits
from stagewatch.monitor.incidents import Incident, Severity, Window
from stagewatch.monitor.ingest import Intake
from stagewatch.monitor.preserving import WAITING_MAX, Preserver
from stagewatch.monitor.sessions import FrameRefusedError, Session
from stagewatch.monitor.store import Store


class Hall:
    """An intake, a store and who asks for windows, on the running loop."""

    def __init__(self, directory: Path) -> None:
        self.dropped = 0
        self.store = Store(directory / "incidents.sqlite3")
        self.intake = Intake(
            settings(directory),
            lambda group, position: None,
            greeted=lambda stream, session: self.preserver.greeted(stream, session),
            frozen=lambda frozen, stream: self.preserver.took(frozen, stream),
        )
        self.preserver = Preserver(self.intake.streams, self.store, self._drop)
        list(self.intake.journal.recover())
        self.intake.open()

    def _drop(self) -> None:
        self.dropped += 1

    def connect(self, *stages: int, freezes: bool = True, instance: str = "life-1") -> Session:
        """A sidecar that says hello for some stages."""
        session = Session()
        for stage in stages:
            frame = wire.Hello(wire.PROTOCOL, identity(stage, instance), freezes)
            self.intake.take(wire.encode_frame(frame), session)
        return session

    async def answered(self, session: Session, frozen: Frozen) -> None:
        self.intake.take(wire.encode_frame(frozen), session)
        while self.preserver._tasks:
            await asyncio.sleep(0)


def asked(session: Session) -> list[tuple[int, str]]:
    """(stage, incident) of the windows a sidecar is asked for now."""
    frames: list[Downward | None] = [wire.decode_downward(frame) for frame in session.pending()]
    return [(frame.rank.pp, frame.incident) for frame in frames if isinstance(frame, Freeze)]


def critical(number: int = 1, **changes: object) -> Incident:
    made = msgspec.structs.replace(incident(number, Severity.CRITICAL), id=f"{number:016x}", dp=0)
    return msgspec.structs.replace(made, **changes)


def frozen(number: int = 1, stage: int = 0, path: str = "/frozen/x", failure: str = "") -> Frozen:
    who = identity(stage)
    return Frozen(who.instance, who.rank, f"{number:016x}", path, 1, 9, failure)


InTheHall = Callable[[Callable[[Hall], Awaitable[None]]], None]


@pytest.fixture
def in_the_hall(tmp_path: Path) -> InTheHall:
    def run(body: Callable[[Hall], Awaitable[None]]) -> None:
        async def opened() -> None:
            hall = Hall(tmp_path)
            try:
                await asyncio.wait_for(body(hall), 30)
            finally:
                await asyncio.to_thread(hall.intake.journal.close)
                hall.store.close()

        asyncio.run(opened())

    return run


FIRST = f"{1:016x}"


class TestWhoIsAsked:
    def test_every_rank_of_the_engine_through_its_own_sidecar_and_no_other(
        self, in_the_hall: InTheHall
    ) -> None:
        async def body(hall: Hall) -> None:
            one, two, foreign = hall.connect(0), hall.connect(1), hall.connect(0, instance="life-2")
            hall.preserver.note(critical())
            assert [asked(session) for session in (one, two, foreign)] == [[(0, FIRST)], [(1, FIRST)], []]

        in_the_hall(body)

    def test_once_however_often_the_incident_is_told(self, in_the_hall: InTheHall) -> None:
        async def body(hall: Hall) -> None:
            session = hall.connect(0)
            hall.preserver.note(critical(severity=Severity.WARNING))
            assert asked(session) == []
            hall.preserver.note(critical())
            assert asked(session) == [(0, FIRST)]
            hall.preserver.note(critical(last_bad_step=99))
            assert asked(session) == []

        in_the_hall(body)

    def test_a_sidecar_of_an_earlier_build_is_not_asked(self, in_the_hall: InTheHall) -> None:
        """It would hang up over a frame that it does not know."""

        async def body(hall: Hall) -> None:
            older = msgspec.msgpack.decode(hello())
            del older["freezes"]
            session = Session()
            hall.intake.take(msgspec.msgpack.encode(older), session)
            hall.preserver.note(critical())
            assert asked(session) == []

        in_the_hall(body)

    def test_the_steps_are_those_of_the_incident(self, in_the_hall: InTheHall) -> None:
        async def body(hall: Hall) -> None:
            session = hall.connect(0)
            hall.preserver.note(critical(first_bad_step=40, latency_steps=3, last_bad_step=41))
            (frame,) = [f for f in map(wire.decode_downward, session.pending()) if isinstance(f, Freeze)]
            assert (frame.first_step, frame.through_step) == (40, 43)

        in_the_hall(body)


class TestUntilAnswered:
    def test_a_sidecar_that_comes_back_is_asked_again_and_no_more_once_it_said_where(
        self, in_the_hall: InTheHall
    ) -> None:
        async def body(hall: Hall) -> None:
            hall.store.apply([critical()])
            first = hall.connect(0)
            hall.preserver.note(critical())
            hall.intake.leave(first)
            again = hall.connect(0)
            assert asked(again) == [(0, FIRST)]
            await hall.answered(again, frozen())
            hall.intake.leave(again)
            assert asked(hall.connect(0)) == []
            shown = hall.store.get(FIRST)
            assert shown is not None
            assert shown.windows == (Window("dp0.pp0.tp0", "node", "/frozen/x", 1, 9),)

        in_the_hall(body)

    def test_a_rank_that_was_away_is_asked_when_it_comes(self, in_the_hall: InTheHall) -> None:
        async def body(hall: Hall) -> None:
            hall.intake.leave(hall.connect(0, 1))
            hall.preserver.note(critical())
            assert asked(hall.connect(0, 1)) == [(0, FIRST), (1, FIRST)]

        in_the_hall(body)

    def test_after_a_restart_recent_ones_are_asked_for_again(self, in_the_hall: InTheHall) -> None:
        """One rank may have answered before it, and another not."""

        async def body(hall: Hall) -> None:
            hall.store.apply([critical(1), critical(2)])
            hall.intake.leave(hall.connect(0, 1))  # known from the journal
            hall.preserver.recall(hall.store.critical_since(0))
            assert sorted(asked(hall.connect(0))) == [(0, FIRST), (0, f"{2:016x}")]

        in_the_hall(body)

    def test_few_wait_and_what_is_given_up_is_counted(self, in_the_hall: InTheHall) -> None:
        async def body(hall: Hall) -> None:
            hall.intake.leave(hall.connect(0))
            for number in range(WAITING_MAX + 2):
                hall.preserver.note(critical(number))
            assert (len(asked(hall.connect(0))), hall.dropped) == (WAITING_MAX, 2)

        in_the_hall(body)

    def test_why_there_is_none_is_told_in_a_line_of_bounded_length(self, in_the_hall: InTheHall) -> None:
        async def body(hall: Hall) -> None:
            hall.store.apply([critical()])
            session = hall.connect(0)
            hall.preserver.note(critical())
            await hall.answered(session, frozen(path="", failure="\x1b[2J\n" + "x" * 5000))
            shown = hall.store.get(FIRST)
            assert shown is not None
            (window,) = shown.windows
            assert (window.failure.isprintable(), len(window.failure)) == (True, 1024)

        in_the_hall(body)


class TestAnswersThatAreNone:
    def test_what_nobody_asked_for_is_not_kept(self, in_the_hall: InTheHall) -> None:
        async def body(hall: Hall) -> None:
            hall.store.apply([critical()])
            await hall.answered(hall.connect(0), frozen())
            shown = hall.store.get(FIRST)
            assert shown is not None
            assert shown.windows == ()

        in_the_hall(body)

    def test_a_rank_of_another_connection_cannot_be_spoken_for(self, in_the_hall: InTheHall) -> None:
        async def body(hall: Hall) -> None:
            hall.connect(0)
            other = hall.connect(1)
            hall.preserver.note(critical())
            with pytest.raises(FrameRefusedError, match="no hello"):
                await hall.answered(other, frozen(stage=0))

        in_the_hall(body)

    def test_steps_that_cannot_be_are_refused(self, in_the_hall: InTheHall) -> None:
        async def body(hall: Hall) -> None:
            session = hall.connect(0)
            with pytest.raises(FrameRefusedError, match="cannot be"):
                await hall.answered(session, msgspec.structs.replace(frozen(), first_step=-1))

        in_the_hall(body)


class TestBuildsOfDifferentAge:
    def test_a_frame_of_a_kind_to_come_is_ignored(self) -> None:
        later = msgspec.msgpack.encode({"type": "rewind", "instance": "life-1", "to": 3})
        assert wire.decode_downward(later) is None

    @pytest.mark.parametrize("broken", [{"type": "ack"}, {"kind": "ack"}, {"type": 7}, "ack"])
    def test_a_frame_that_is_broken_is_not(self, broken: object) -> None:
        with pytest.raises(FrameError):
            wire.decode_downward(msgspec.msgpack.encode(broken))

    def test_a_journal_holds_no_answers_about_windows(self) -> None:
        with pytest.raises(FrameError):
            wire.decode_upward(wire.encode_frame(frozen()), Limits())

    def test_an_earlier_collector_reads_what_a_sidecar_says_of_itself_now(self) -> None:
        class Earlier(msgspec.Struct, tag="hello"):
            protocol: int
            identity: dict[str, object]

        class EarlierNode(msgspec.Struct, array_like=True):
            sidecar: str
            ring_removed: int = 0
            ring_unreadable: int = 0
            rings_refused: int = 0

        frame = wire.encode_frame(wire.Hello(wire.PROTOCOL, identity(), freezes=True))
        assert msgspec.msgpack.decode(frame, type=Earlier).protocol == wire.PROTOCOL
        node = msgspec.msgpack.encode(Node("0" * 16, 1, 2, 3, 4))
        assert msgspec.msgpack.decode(node, type=EarlierNode).rings_refused == 3
