"""Files that hold users' data or secrets: who may open them, and what is refused because others could."""

import os
from pathlib import Path

import pytest
from house import House
from service_processes import wait_until
from service_records import append_steps, identity

from stagewatch.agents.credentials import read_key_file
from stagewatch.agents.errors import RingError, SettingsError
from stagewatch.agents.ring import RingReader, RingWriter, check_directory
from stagewatch.monitor.collector import lock_directory


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_what_is_made_is_private_whatever_the_umask(house: House) -> None:
    # GIVEN processes that would let everybody read and write what they make
    before = os.umask(0)
    try:
        collector = house.collector()
        house.ring_dir.mkdir(mode=0o700)
        rings = [RingWriter(house.ring_dir, identity(stage), 1 << 20) for stage in (0, 1)]
        for shift, ring in enumerate(rings):
            append_steps(ring, 10)
            append_steps(ring, 10, first_step=11, wrong_token=shift)
        sidecar = house.ship(collector.url, collector.token)
        wait_until(lambda: collector.get("/v1/incidents")["incidents"], "an incident is stored")
        # THEN every file is ours alone, and so is every directory
        found = [path for top in (house.data_dir, house.ring_dir) for path in (top, *top.rglob("*"))]
        kinds = {path.suffix or path.name for path in found}
        assert {".journal", ".sqlite3", ".sqlite3-wal", ".sqlite3-shm", ".ring", ".key", "token"} <= kinds
        assert {str(path): mode(path) for path in found if path.is_file() and mode(path) != 0o600} == {}
        assert {str(path): mode(path) for path in found if path.is_dir() and mode(path) != 0o700} == {}
        assert sidecar.end() == 0
        assert collector.end() == 0
        left = [path for path in house.data_dir.rglob("*") if path.is_file()]
        assert {str(path) for path in left if mode(path) != 0o600} == set()
    finally:
        os.umask(before)


class TestRingDirectory:
    def test_a_link_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir(mode=0o700)
        (tmp_path / "link").symlink_to(tmp_path / "real")
        with pytest.raises(RingError, match="is a symbolic link: name the directory it points to"):
            RingWriter(tmp_path / "link", identity(), 1 << 20)

    @pytest.mark.parametrize("wrong", [0o770, 0o702, 0o777])
    def test_one_that_others_can_write_is_refused(self, tmp_path: Path, wrong: int) -> None:
        tmp_path.chmod(wrong)
        with pytest.raises(RingError, match="can be written by others: chmod 700 it"):
            check_directory(tmp_path)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
    def test_somebody_else_s_is_refused(self, tmp_path: Path) -> None:
        directory = tmp_path / "rings"
        directory.mkdir(mode=0o700)
        os.chown(directory, 4711, 4711)
        with pytest.raises(RingError, match="belongs to uid 4711, not to this process"):
            RingWriter(directory, identity(), 1 << 20)

    def test_a_ring_that_is_a_link_or_that_others_can_write_is_not_read(self, tmp_path: Path) -> None:
        path = RingWriter(tmp_path, identity(), 1 << 20).path
        (tmp_path / "link.ring").symlink_to(path)
        with pytest.raises(RingError, match="cannot be opened"):
            RingReader(tmp_path / "link.ring")
        path.chmod(0o622)
        with pytest.raises(RingError, match="can be written by others: chmod 600 it"):
            RingReader(path)


class TestDataDirectory:
    @pytest.mark.parametrize("wrong", [0o702, 0o777, 0o1777])
    def test_one_that_everybody_can_write_is_refused(self, tmp_path: Path, wrong: int) -> None:
        tmp_path.chmod(wrong)
        with pytest.raises(SettingsError, match="can be written by everybody: chmod 700 it"):
            lock_directory(tmp_path)

    def test_a_volume_that_its_group_can_write_and_a_link_of_ours_are_taken(self, tmp_path: Path) -> None:
        (tmp_path / "volume").mkdir()
        (tmp_path / "volume").chmod(0o2775)
        (tmp_path / "link").symlink_to(tmp_path / "volume")
        os.close(lock_directory(tmp_path / "link"))

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
    def test_somebody_else_s_directory_or_link_is_refused(self, tmp_path: Path) -> None:
        ours, theirs, link = (tmp_path / name for name in ("ours", "theirs", "link"))
        ours.mkdir()
        theirs.mkdir()
        link.symlink_to(ours)
        for path in (theirs, link):
            os.chown(path, 4711, 4711, follow_symlinks=False)
        with pytest.raises(SettingsError, match="belongs to uid 4711, not to this process"):
            lock_directory(theirs)
        with pytest.raises(SettingsError, match="is a symbolic link of uid 4711: name the directory"):
            lock_directory(link)


@pytest.mark.parametrize("wrong", [0o644, 0o604, 0o660])
def test_a_digest_key_that_others_can_open_is_refused(tmp_path: Path, wrong: int) -> None:
    path = tmp_path / "key"
    path.write_text("00" * 16)
    path.chmod(wrong)
    with pytest.raises(SettingsError, match="by others: chmod 600 it"):
        read_key_file(path)
