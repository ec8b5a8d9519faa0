"""Frozen windows: kept once, within bounds, digested as the sidecar digests, and never in the way."""

import asyncio
import stat
from pathlib import Path

import numpy as np
import pytest
from service_records import KEY, append_note, append_steps, identity

from stagewatch.agents.credentials import key_fingerprint
from stagewatch.agents.digest import Digester
from stagewatch.agents.dumpfile import DumpFile
from stagewatch.agents.evidence import Evidence
from stagewatch.agents.record import Bind, Kind
from stagewatch.agents.ring import RingWriter
from stagewatch.agents.tail import Privacy, Tail
from stagewatch.agents.windowqueue import WAITING_MAX, Windows
from stagewatch.agents.windows import STEPS_AROUND, Freezer
from stagewatch.agents.wire import Freeze, Frozen

ONE, TWO = "1" * 16, "2" * 16


def privacy(*, raw: bool = False, pseudonymise: bool = False) -> Privacy:
    return Privacy(Digester(KEY), key_fingerprint(KEY), raw, pseudonymise)


def wanted(incident: str = ONE, first: int = 100, through: int = 105, stage: int = 0) -> Freeze:
    who = identity(stage)
    return Freeze(who.instance, who.rank, incident, first, through)


def evidence(frozen: Frozen) -> list[Evidence]:
    opened = DumpFile.open(Path(frozen.path))
    assert (opened.complete, opened.unreadable) == (True, 0)
    return list(opened.evidence((frozen.instance, frozen.rank)))


def steps(frozen: Frozen) -> list[int]:
    return [int(step) for each in evidence(frozen) if each.inputs is not None for step in each.inputs.step]


@pytest.fixture
def rings(tmp_path: Path) -> Path:
    directory = tmp_path / "rings"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def ring(rings: Path) -> RingWriter:
    """A ring of an engine that ended after 200 steps."""
    made = RingWriter(rings, identity(), 1 << 20)
    made.append(Kind.BIND, 0, 1, Bind(0, 1, 10, 100, 7, "request-1"))
    append_steps(made, 200)
    made.close()
    return made


@pytest.fixture
def freezer(rings: Path) -> Freezer:
    return Freezer(rings / "frozen", 1 << 24, 16)


class TestWhatIsKept:
    def test_the_steps_around_the_incident_and_who_holds_which_slot(
        self, ring: RingWriter, freezer: Freezer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("stagewatch.agents.windows.STEPS_BEFORE", 30)
        frozen = freezer.freeze(ring.path, privacy(), wanted())
        assert (frozen.failure, frozen.first_step, frozen.last_step) == ("", 70, 200)
        assert steps(frozen) == list(range(70, 201))
        binds = [each.events.text for each in evidence(frozen) if each.events is not None]
        assert binds == [["request-1"]]

    def test_the_owner_alone_may_read_it(self, ring: RingWriter, freezer: Freezer) -> None:
        path = Path(freezer.freeze(ring.path, privacy(), wanted()).path)
        assert [stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent, path.parent.parent)] == [
            0o600, 0o700, 0o700,
        ]  # fmt: skip

    @pytest.mark.parametrize("raw", [False, True])
    def test_token_values_are_in_it_only_where_the_sidecar_ships_them(
        self, ring: RingWriter, freezer: Freezer, raw: bool
    ) -> None:
        (first, *_) = evidence(freezer.freeze(ring.path, privacy(raw=raw), wanted()))
        assert first.inputs is not None
        assert bool(len(first.inputs.raw_ids)) == raw

    def test_requests_have_other_names_where_the_sidecar_gives_them(
        self, ring: RingWriter, freezer: Freezer
    ) -> None:
        frozen = freezer.freeze(ring.path, privacy(pseudonymise=True), wanted())
        (texts,) = [each.events.text for each in evidence(frozen) if each.events is not None]
        assert texts[0].startswith("anon-")
        assert b"request-1" not in Path(frozen.path).read_bytes()

    def test_the_digests_are_those_that_were_shipped(self, ring: RingWriter, freezer: Freezer) -> None:
        frozen = freezer.freeze(ring.path, privacy(), wanted(first=1, through=200))
        shown = DumpFile.open(Path(frozen.path)).streams[frozen.instance, frozen.rank].identity
        tail = Tail(ring.path, privacy())
        assert shown == tail.identity
        tail.close()

    def test_steps_that_are_still_to_come_are_waited_for(self, rings: Path, freezer: Freezer) -> None:
        """An engine that runs on while its window is frozen."""
        live = RingWriter(rings, identity(1), 1 << 20)
        append_steps(live, 105)

        async def both() -> Frozen:
            work = asyncio.create_task(
                asyncio.to_thread(freezer.freeze, live.path, privacy(), wanted(stage=1))
            )
            await asyncio.sleep(0)
            append_steps(live, STEPS_AROUND, first_step=106)
            return await work

        frozen = asyncio.run(both())
        assert frozen.last_step == 105 + STEPS_AROUND
        live.close()


class TestOnce:
    def test_the_same_incident_is_kept_once(self, ring: RingWriter, freezer: Freezer) -> None:
        first = freezer.freeze(ring.path, privacy(), wanted())
        inode = Path(first.path).stat().st_ino
        assert freezer.freeze(ring.path, privacy(), wanted()) == first
        assert Path(first.path).stat().st_ino == inode

    def test_a_new_life_of_the_sidecar_says_the_same(
        self, ring: RingWriter, freezer: Freezer, rings: Path
    ) -> None:
        first = freezer.freeze(ring.path, privacy(), wanted())
        inode = Path(first.path).stat().st_ino
        again = Freezer(rings / "frozen", 1 << 24, 16).freeze(ring.path, privacy(), wanted())
        assert (again, Path(again.path).stat().st_ino) == (first, inode)

    def test_an_incident_that_an_earlier_window_holds_is_told_of_that(
        self, ring: RingWriter, freezer: Freezer, rings: Path
    ) -> None:
        first = freezer.freeze(ring.path, privacy(), wanted())
        second = freezer.freeze(ring.path, privacy(), wanted(TWO, 120, 130))
        assert (second.incident, second.path) == (TWO, first.path)
        assert [path.name for path in (rings / "frozen").iterdir()] == [ONE]


class TestBounds:
    def many(self, rings: Path, freezer: Freezer, count: int, name: str = "life") -> list[Frozen]:
        """Windows of as many engines, each of an incident of its own."""
        made: list[Frozen] = []
        for number in range(count):
            who = identity(instance=f"{name}-{number}")
            ring = RingWriter(rings, who, 1 << 18)
            append_steps(ring, 110)
            ring.close()
            asked = Freeze(who.instance, who.rank, f"{number:016x}", 100, 105)
            made.append(freezer.freeze(ring.path, privacy(), asked))
        return made

    def test_the_oldest_incidents_go_and_are_counted(self, rings: Path) -> None:
        freezer = Freezer(rings / "frozen", 1 << 24, 3)
        made = self.many(rings, freezer, 5)
        assert [frozen.failure for frozen in made] == [""] * 5
        assert [Path(frozen.path).exists() for frozen in made] == [False, False, True, True, True]
        assert freezer.dropped == 2

    def test_bytes_are_bounded(self, rings: Path) -> None:
        (one,) = self.many(rings, Freezer(rings / "a", 1 << 24, 99), 1, "first")
        most = Path(one.path).stat().st_size * 10
        freezer = Freezer(rings / "frozen", most, 99)
        self.many(rings, freezer, 12)
        kept = [path.stat().st_size for path in (rings / "frozen").rglob("*.swdump")]
        assert sum(kept) <= most
        assert len(kept) + freezer.dropped == 12

    def test_what_does_not_fit_loses_the_steps_furthest_before(self, ring: RingWriter, rings: Path) -> None:
        whole = Freezer(rings / "a", 1 << 24, 9).freeze(ring.path, privacy(), wanted(first=190, through=195))
        size = Path(whole.path).stat().st_size
        part = Freezer(rings / "b", size * 4, 9).freeze(ring.path, privacy(), wanted(first=190, through=195))
        assert (part.failure, whole.first_step) == ("", 1)
        assert 1 < part.first_step <= 190
        assert part.last_step >= 195
        assert Path(part.path).stat().st_size <= size // 2

    def test_what_cannot_fit_is_told_and_leaves_nothing(self, ring: RingWriter, rings: Path) -> None:
        frozen = Freezer(rings / "frozen", 4096, 9).freeze(ring.path, privacy(), wanted())
        assert "raise --freeze-bytes" in frozen.failure
        assert [*(rings / "frozen").iterdir()] == []


class TestWhatCannotBeKept:
    def refused(self, frozen: Frozen) -> str:
        assert (frozen.path, "\n" in frozen.failure) == ("", False)
        return frozen.failure

    def test_a_step_that_the_ring_no_longer_holds(self, rings: Path, freezer: Freezer) -> None:
        small = RingWriter(rings, identity(), 1 << 16)
        append_steps(small, 400)
        small.close()
        assert "holds step 1 no more" in self.refused(freezer.freeze(small.path, privacy(), wanted(first=1)))

    def test_a_ring_that_is_gone(self, ring: RingWriter, freezer: Freezer) -> None:
        ring.path.unlink()
        assert self.refused(freezer.freeze(ring.path, privacy(), wanted()))

    def test_a_ring_without_steps(self, rings: Path, freezer: Freezer) -> None:
        empty = RingWriter(rings, identity(), 1 << 16)
        append_note(empty, "nothing")
        empty.close()
        assert self.refused(freezer.freeze(empty.path, privacy(), wanted()))

    @pytest.mark.parametrize("incident", ["../../../etc", "", "1" * 17, "G" * 16])
    def test_an_incident_whose_name_is_none(
        self, ring: RingWriter, freezer: Freezer, rings: Path, incident: str
    ) -> None:
        assert self.refused(freezer.freeze(ring.path, privacy(), wanted(incident)))
        assert not (rings / "frozen").exists()

    def test_a_directory_that_others_could_exchange(
        self, ring: RingWriter, freezer: Freezer, rings: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "theirs").mkdir()
        (rings / "frozen").symlink_to(tmp_path / "theirs")
        assert self.refused(freezer.freeze(ring.path, privacy(), wanted()))
        assert [*(tmp_path / "theirs").iterdir()] == []

    def test_damage_that_nobody_foresaw(
        self, ring: RingWriter, freezer: Freezer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*args: object, **keywords: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr("stagewatch.agents.windows.digest_records", broken)
        assert "ZeroDivisionError" in self.refused(freezer.freeze(ring.path, privacy(), wanted()))

    def test_the_end_of_the_sidecar(self, ring: RingWriter, freezer: Freezer) -> None:
        freezer.end()
        assert "the sidecar ends" in self.refused(freezer.freeze(ring.path, privacy(), wanted()))


def test_requests_that_newer_ones_overtake_are_counted(ring: RingWriter, freezer: Freezer) -> None:
    windows, tail = Windows(freezer), Tail(ring.path, privacy())
    for number in [*range(WAITING_MAX + 3), WAITING_MAX + 2]:
        windows.ask(tail, wanted(f"{number:016x}"))
    assert windows.dropped == 3
    tail.close()


def test_requests_are_answered_in_turn(ring: RingWriter, freezer: Freezer) -> None:
    async def body() -> list[str]:
        windows, tail, said = Windows(freezer), Tail(ring.path, privacy()), asyncio.Queue[Frozen]()
        windows.privacy = privacy()
        for incident in (ONE, TWO, ONE):
            windows.ask(tail, wanted(incident))
        running = asyncio.create_task(windows.run(said.put_nowait))
        told = [(await said.get()).incident for _ in range(2)]
        running.cancel()
        tail.close()
        return told

    assert asyncio.run(asyncio.wait_for(body(), 60)) == [ONE, TWO]


def test_numpy_is_not_told_upwards(ring: RingWriter, freezer: Freezer) -> None:
    """A message of numpy's numbers cannot be encoded."""
    frozen = freezer.freeze(ring.path, privacy(), wanted())
    assert not any(isinstance(getattr(frozen, name), np.generic) for name in Frozen.__struct_fields__)
