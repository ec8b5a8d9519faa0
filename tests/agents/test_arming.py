"""Arming a rank: its ring, its probe, and the rings that earlier lives left behind."""

import os
from pathlib import Path

import pytest
from foundation_records import identity, note

from stagewatch.agents.arming import arm, is_alive, remove_old_rings
from stagewatch.agents.errors import RingError
from stagewatch.agents.identity import Identity, Rank
from stagewatch.agents.record import Heartbeat, Kind, Note
from stagewatch.agents.ring import CAPACITY_MIN, RingReader, RingWriter
from stagewatch.agents.settings import ProbeSettings


def settings(directory: Path, **changes: object) -> ProbeSettings:
    values: dict[str, object] = {
        "ring_dir": directory,
        "deployment": "test",
        "ring_bytes": CAPACITY_MIN,
        "heartbeat_s": 1.0,
        "budget_share": 0.0,
        "rings_kept": 2,
        "fixed_mask": False,
    }
    return ProbeSettings(**{**values, **changes})  # type: ignore[arg-type]


def life(number: int, **changes: object) -> Identity:
    return identity(**{"instance": f"life-{number}", "started_ns": number, **changes})


def ended(directory: Path, who: Identity) -> Path:
    """The ring of an engine that was killed."""
    writer = RingWriter(directory, who, CAPACITY_MIN)
    writer.append(Kind.NOTE, 0, 0, note(0))
    return writer.path  # the writer goes, and its lock with it


class TestArming:
    def test_a_rank_gets_a_ring_of_its_own_and_says_so(self, tmp_path: Path) -> None:
        probe = arm(life(1), settings(tmp_path / "rings"))
        reader = RingReader(tmp_path / "rings" / "life-1.dp0.pp0.tp0.ring")
        armed, beat = (found.body for found in reader.read())
        assert armed == Note("armed: none 1, variant C")
        assert isinstance(beat, Heartbeat)
        assert '"armed":true' in beat.health
        assert probe.armed
        assert reader.margin().capacity == CAPACITY_MIN

    def test_what_cannot_be_made_is_said_in_one_line(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(RingError, match="is not a directory"):
            arm(life(1), settings(tmp_path / "file"))

    def test_the_same_rank_twice(self, tmp_path: Path) -> None:
        first = arm(life(1), settings(tmp_path, rings_kept=0))
        with pytest.raises(RingError, match="claims the same rank"):
            arm(life(1), settings(tmp_path, rings_kept=0))
        assert first.armed

    def test_arming_makes_room(self, tmp_path: Path) -> None:
        old = [ended(tmp_path, life(number)) for number in (1, 2, 3)]
        arm(life(4), settings(tmp_path, rings_kept=1)).note("alive")
        assert [path.exists() for path in old] == [False, False, True]


class TestOldRings:
    @pytest.mark.parametrize(
        ("kept", "left"), [(0, []), (1, [5]), (2, [3, 5]), (4, [1, 2, 3, 5]), (9, [1, 2, 3, 5])]
    )
    def test_the_newest_are_kept(self, tmp_path: Path, kept: int, left: list[int]) -> None:
        # By their age, in whatever order they are found
        paths = {number: ended(tmp_path, life(number)) for number in (5, 1, 3, 2)}
        assert remove_old_rings(tmp_path, life(6), kept) == 4 - len(left)
        assert sorted(number for number, path in paths.items() if path.exists()) == left

    def test_a_live_engine_is_left_alone_although_its_process_id_is_unknown_here(
        self, tmp_path: Path
    ) -> None:
        # As in another container of the pod, which has process ids of its own
        gone = os.fork()
        if gone == 0:
            os._exit(0)
        os.waitpid(gone, 0)
        writer = RingWriter(tmp_path, life(1, pid=gone), CAPACITY_MIN)
        assert remove_old_rings(tmp_path, life(2), 0) == 0
        writer.append(Kind.NOTE, 0, 0, note(0))
        assert [found.seq for found in RingReader(writer.path).read()] == [0]

    def test_an_ended_engine_goes_although_its_process_id_came_again(self, tmp_path: Path) -> None:
        # As in a container that is restarted: the new worker has the old one's number
        path = ended(tmp_path, life(1, pid=os.getpid()))
        assert remove_old_rings(tmp_path, life(2, pid=os.getpid()), 0) == 1
        assert not path.exists()

    @pytest.mark.parametrize(
        "foreign",
        [{"deployment": "other"}, {"host": "elsewhere"}, {"rank": Rank(0, 1, 0)}],
        ids=["deployment", "host", "rank"],
    )
    def test_rings_of_others_are_left_alone(self, tmp_path: Path, foreign: dict[str, object]) -> None:
        path = ended(tmp_path, life(1, **foreign))
        # Also under a name that this rank's would have
        moved = path.rename(tmp_path / "life-1.dp0.pp0.tp0.ring")
        assert remove_old_rings(tmp_path, life(2), 0) == 0
        assert moved.exists()

    def test_files_that_are_no_rings_are_left_alone(self, tmp_path: Path) -> None:
        name = "{}.dp0.pp0.tp0.ring"
        damaged = ended(tmp_path, life(1))
        with damaged.open("r+b") as file:
            file.write(b"DAMAGED!")
        (tmp_path / name.format("empty")).touch()
        (tmp_path / name.format("text")).write_text("mine" * 10_000)
        (tmp_path / name.format("folder")).mkdir()
        (tmp_path / name.format("link")).symlink_to(ended(tmp_path, life(2, rank=Rank(1, 0, 0))))
        os.mkfifo(tmp_path / name.format("pipe"))
        (tmp_path / "notes.txt").touch()
        before = sorted(tmp_path.iterdir())
        assert remove_old_rings(tmp_path, life(3), 0) == 0
        assert sorted(tmp_path.iterdir()) == before

    def test_a_directory_that_is_not_there_yet(self, tmp_path: Path) -> None:
        assert remove_old_rings(tmp_path / "rings", life(1), 0) == 0


def test_process_ids_that_a_damaged_header_may_hold() -> None:
    assert is_alive(os.getpid())
    assert is_alive(1)
    assert [is_alive(pid) for pid in (0, -1, 1 << 22, 10**30)] == [False] * 4
