"""Checkpoints: a restart stands where it stood, reads back only what came since, and is never misled by one."""

import asyncio
import os
import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from service_records import batch_message, hello, identity, journalled_seqs
from simulated import Run, plan
from test_ingest import settings

from stagewatch.agents import wire
from stagewatch.agents.digest import Digester
from stagewatch.agents.evidence import digest_records
from stagewatch.agents.identity import Identity
from stagewatch.agents.record import Record
from stagewatch.monitor import checkpoint, recovery
from stagewatch.monitor.collector import Collector
from stagewatch.monitor.freezing import FrozenError, freeze, thaw
from stagewatch.monitor.incidents import Severity
from stagewatch.monitor.recovery import Hindsight
from stagewatch.monitor.sessions import Session
from stagewatch.monitor.states import Change
from stagewatch.monitor.store import Query
from stagewatch.monitor.watch import Watch


class Life:
    """One life of a collector in this process, over one directory."""

    def __init__(self, directory: Path) -> None:
        self.watch = Watch()
        self.collector = Collector(
            settings(directory, queue_bytes=1 << 26, segment_bytes=1 << 26), self.watch
        )
        self.session = Session()

    async def begin(self) -> "Life":
        await self.collector.start()
        while not self.collector.admits:
            assert self.collector.crash is None
            await asyncio.sleep(0.001)
        return self

    async def give(self, *messages: bytes) -> None:
        """Take frames, and wait until they were judged."""
        for message in messages:
            self.collector.take(message, self.session)
        while any(s.durable_seq != s.offered_seq for s in self.collector.intake.streams.by_key.values()):
            await asyncio.sleep(0.001)
        while self.collector._unstored or self.collector._storing:
            await asyncio.sleep(0.001)

    async def save(self) -> None:
        assert self.collector._judged is not None
        await self.collector._checkpoints.save(self.collector._judged, self.collector._found)

    async def crash(self) -> None:
        """End as SIGKILL does: nothing is said, nothing saved."""
        for task in self.collector._tasks:
            task.cancel()
        await asyncio.gather(*self.collector._tasks, return_exceptions=True)
        await asyncio.to_thread(self.collector.intake.journal.close)
        self.collector.store.close()
        self.collector.metrics.close()
        os.close(self.collector._lock_fd)


def frames_of(run: Run, first: float, end: float, pieces: int = 5) -> list[bytes]:
    """The records of a share of a run, in frames, the ranks' in turn."""
    made: list[tuple[int, bytes]] = []
    for place, (rank, records) in enumerate(run.records.items()):
        who, begin, stop = run.identities[rank], int(len(records) * first), int(len(records) * end)
        edges = [begin + (stop - begin) * piece // pieces for piece in range(pieces + 1)]
        for piece, (a, b) in enumerate(pairwise(edges)):
            made.append((piece * 1000 + place, frame(who, records[a:b], a)))
    return [message for _, message in sorted(made, key=lambda each: each[0])]


def frame(who: Identity, records: list[Record], first_seq: int) -> bytes:
    numbered = [replace(record, seq=first_seq + place) for place, record in enumerate(records)]
    return wire.encode_frame(wire.batch_of(who, digest_records(numbered, who, Digester(bytes(16))), -1.0))


def hellos(run: Run) -> list[bytes]:
    return [hello(who) for who in run.identities.values()]


@pytest.fixture(autouse=True)
def saves_only_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery.Checkpoints, "is_due", lambda self, position: False)


@pytest.fixture(scope="module")
def run() -> Run:
    return Run(plan("old-mask", requests=30))


def said(watch: Watch) -> tuple[Any, ...]:
    (state,) = watch.states()
    return state.verdicts, state.compared_to, watch.incidents()


def test_a_restart_from_a_checkpoint_stands_where_an_undisturbed_collector_does(
    run: Run, tmp_path: Path
) -> None:
    async def body() -> None:
        # GIVEN one collector that was never disturbed
        calm = await Life(tmp_path / "calm").begin()
        await calm.give(
            *hellos(run), *frames_of(run, 0, 0.4), *frames_of(run, 0.4, 0.7), *frames_of(run, 0.7, 1)
        )
        # AND one that saved, took more, and crashed
        life = await Life(tmp_path / "data").begin()
        await life.give(*hellos(run), *frames_of(run, 0, 0.4))
        await life.save()
        await life.give(*frames_of(run, 0.4, 0.7))
        told = life.collector.store.last_event()
        before = said(life.watch)
        await life.crash()
        # WHEN it starts again
        again = await Life(tmp_path / "data").begin()
        # THEN only what came since was read back, and it says what it said
        assert again.collector._checkpoints._saved is not None
        assert said(again.watch)[:2] == before[:2]
        assert again.collector.store.last_event() == told
        # AND goes on as if nothing had been
        await again.give(*hellos(run), *frames_of(run, 0.7, 1))
        assert said(again.watch)[:2] == said(calm.watch)[:2]
        ids = [shown.id for shown in calm.collector.store.find(Query(limit=500))]
        assert [shown.id for shown in again.collector.store.find(Query(limit=500))] == ids
        assert len(ids) > 3
        await calm.crash()
        await again.crash()

    asyncio.run(asyncio.wait_for(body(), 60))


def test_only_what_came_since_is_read(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        life = await Life(tmp_path).begin()
        await life.give(*hellos(run), *frames_of(run, 0, 0.9))
        await life.save()
        late = frames_of(run, 0.9, 1)
        await life.give(*late)
        await life.crash()
        caplog.clear()
        await (await Life(tmp_path).begin()).crash()
        assert f"journal: {len(late)} frames read back since the checkpoint" in caplog.text

    with caplog.at_level("INFO"):
        asyncio.run(asyncio.wait_for(body(), 60))


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:-9] + b"x" * 9),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
    ],
    ids=["torn", "damaged", "empty", "gone"],
)
def test_a_checkpoint_that_is_no_good_costs_time_and_nothing_else(
    run: Run, tmp_path: Path, harm: Any
) -> None:
    async def body() -> None:
        life = await Life(tmp_path).begin()
        await life.give(*hellos(run), *frames_of(run, 0, 1))
        await life.save()
        before, told = said(life.watch), life.collector.store.last_event()
        await life.crash()
        harm(tmp_path / "checkpoint")
        again = await Life(tmp_path).begin()
        assert said(again.watch)[:2] == before[:2]
        assert again.collector.store.last_event() == told
        await again.crash()

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_checkpoint_of_another_build_or_journal_is_left_alone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        life = await Life(tmp_path).begin()
        await life.give(*hellos(run), *frames_of(run, 0, 1))
        await life.save()
        await life.crash()
        with monkeypatch.context() as patch:
            patch.setattr(recovery, "build", lambda: "another")
            await (await Life(tmp_path).begin()).crash()
        assert "is of another build: the whole journal is read back instead" in caplog.text
        # WHEN the journal is replaced
        for path in (tmp_path / "journal").iterdir():
            path.unlink()
        fresh = await Life(tmp_path).begin()
        assert fresh.watch.states() == []
        assert "is of another journal: the whole journal is read back instead" in caplog.text
        await fresh.crash()

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_full_disk_keeps_the_checkpoint_before(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        life = await Life(tmp_path).begin()
        await life.give(*hellos(run), *frames_of(run, 0, 0.5))
        await life.save()
        before = (tmp_path / "checkpoint").read_bytes()

        def full(fd: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.os, "fsync", full)
            await life.save()
        assert (tmp_path / "checkpoint").read_bytes() == before
        assert not (tmp_path / "checkpoint.new").exists()
        await life.crash()

    asyncio.run(asyncio.wait_for(body(), 60))


def test_an_orderly_end_leaves_nothing_to_read_back(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        life = await Life(tmp_path).begin()
        await life.give(*hellos(run), *frames_of(run, 0, 1))
        await life.collector.stop()
        caplog.clear()
        await (await Life(tmp_path).begin()).crash()
        assert "journal: 0 frames read back since the checkpoint" in caplog.text

    with caplog.at_level("INFO"):
        asyncio.run(asyncio.wait_for(body(), 60))


def test_a_stream_that_made_room_is_not_taken_twice_when_it_comes_back(tmp_path: Path) -> None:
    async def body() -> None:
        life = Life(tmp_path)
        life.collector.intake.streams.most = 1  # type: ignore[misc]  # room for one
        await life.begin()
        await life.give(hello(identity()), batch_message(0, 5))
        life.collector.intake.leave(life.session)
        stream = life.collector.intake.streams.by_key["life-1", identity().rank]
        stream.heard_ns -= 2 * 3600 * 10**9
        life.session = Session()
        other = identity(0, "life-2")
        await life.give(hello(other))
        assert ("life-1", identity().rank) not in life.collector.intake.streams.by_key
        # WHEN it says hello again, after a crash even
        await life.save()
        await life.crash()
        again = await Life(tmp_path).begin()
        await again.give(hello(identity()), batch_message(0, 5), batch_message(5, 7))
        await again.crash()

    asyncio.run(asyncio.wait_for(body(), 60))
    assert journalled_seqs(tmp_path)["life-1.dp0.pp0.tp0"] == list(range(7))


class TestFreezing:
    def test_bytes_that_name_anything_else_are_refused(self) -> None:
        class Bad:
            def __reduce__(self) -> tuple[Any, ...]:
                return os.system, ("true",)

        for data in (pickle.dumps(Bad()), b"", b"rubbish", pickle.dumps(Path("/")), pickle.dumps(eval)):
            with pytest.raises(FrozenError):
                thaw(data)

    def test_a_class_of_ours_that_does_things_is_none_a_watch_is_made_of(self) -> None:
        for module, name in (("stagewatch.monitor.store", "Store"), ("stagewatch.agents.ring", "RingWriter")):
            with pytest.raises(FrozenError, match=f"names {module}.{name}"):
                thaw(b"\x80\x05c" + f"{module}\n{name}\n".encode() + b".")

    def test_every_class_a_watch_is_made_of_is_known(self, run: Run) -> None:
        """Else restarts would quietly become slow."""
        watch = Watch()
        for rank, records in run.records.items():
            watch.hello(run.identities[rank], 1)
            evidence = digest_records(records, run.identities[rank], Digester(bytes(16)))
            watch.take(run.identities[rank].instance, rank, evidence, -1.0, 2)
            watch.tick(10**9)
        for state in watch.states():
            engine = watch.engine((state.instance, state.dp))
            assert engine is not None
            assert thaw(freeze(engine)).state() == engine.state()  # type: ignore[attr-defined]  # it is an engine


class TestHindsight:
    def change(self, number: int, severity: Severity = Severity.WARNING) -> Change:
        from test_store import incident

        return Change("opened", incident(number, severity))

    def test_what_was_removed_since_is_no_news_unless_it_becomes_worse(self) -> None:
        hindsight = Hindsight(judged_ns=100)
        hindsight.note([self.change(1), self.change(2)], 99)
        hindsight.note([self.change(3)], 100)
        hindsight.settle(lambda found: found == self.change(2).incident.id)
        assert not hindsight.is_news(self.change(1).incident)
        assert hindsight.is_news(self.change(1, Severity.CRITICAL).incident)
        assert hindsight.is_news(self.change(2).incident)
        assert hindsight.is_news(self.change(3).incident)
