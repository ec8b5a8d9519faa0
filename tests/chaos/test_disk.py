"""Disks that are full or cannot be written, as small file systems of memory. Mounting them needs root."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from chaos import Ring
from service_processes import BIN, CollectorProcess, Process, SidecarProcess, killed_at_exit, wait_until
from service_records import append_steps, identity, journalled_seqs

from stagewatch.agents.ring import RingWriter
from stagewatch.monitor.journal import read_journal

SMALL = "5m"
AnyDisk = TypeVar("AnyDisk", "Disk", "FailingDisk")


class Disk:
    """A file system of memory."""

    def __init__(self, path: Path, size: str) -> None:
        self.path = path
        path.mkdir()
        self._mount("-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs")

    def resize(self, size: str) -> None:
        self._mount("-o", f"remount,size={size}")

    def read_only(self) -> None:
        self._mount("-o", "remount,ro")

    def fill(self, leave_bytes: int = 0) -> Path:
        """Take all the room but ``leave_bytes``."""
        taken = self.path / "filler"
        free = os.statvfs(self.path)
        with taken.open("wb") as file:
            left = free.f_bavail * free.f_bsize - leave_bytes
            with contextlib.suppress(OSError):
                while left > 0:
                    left -= file.write(bytes(min(left, 1 << 16)))
                file.flush()
        return taken

    def _mount(self, *options: str) -> None:
        _run("mount", *options, self.path)

    def close(self) -> None:
        _run("umount", "--lazy", self.path)


def _run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


@contextlib.contextmanager
def mounted(make: Callable[[], AnyDisk], *, needed: bool) -> Iterator[AnyDisk]:
    """What ``make`` mounts, until the test is over. ``needed``: where root cannot mount it, the test fails in CI."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    try:
        made = make()
    except FileNotFoundError as error:
        if needed:
            raise
        pytest.skip(f"no such file system can be made here: {error}")
    except subprocess.CalledProcessError as error:
        why = f"no such file system can be mounted here: {error.stderr.decode().strip()}"
        if needed and os.environ.get("NEED_TOOLS"):
            pytest.fail(why)
        pytest.skip(why)
    with contextlib.closing(made):
        yield made


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with mounted(lambda: Disk(tmp_path / "disk", SMALL), needed=True) as made:
        yield made


@pytest.mark.slow
def test_a_disk_that_fills_up_stops_acknowledgements_and_goes_on_when_there_is_room(
    disk: Disk, tmp_path: Path
) -> None:
    # GIVEN a collector on a small disk, and an engine that records more than fits
    data_dir, ring_dir = disk.path / "data", tmp_path / "rings"
    ring_dir.mkdir(mode=0o700)
    collector = CollectorProcess(data_dir, "--segment-bytes", "1000000")
    sidecar = SidecarProcess(ring_dir, collector.url, token=collector.token)
    with killed_at_exit(collector, sidecar):
        writers = [RingWriter(ring_dir, identity(stage), 16 << 20) for stage in (0, 1)]
        steps = 0

        def full() -> bool:
            nonlocal steps
            for ring in writers:
                append_steps(ring, 200, first_step=steps + 1)
            steps += 200
            return collector.http.get("/readyz").status_code == 503

        wait_until(full, "the disk is full")
        assert "No space left on device" in collector.get("/v1/status")["reason"]
        # WHEN it is killed on the full disk, and started again there
        acknowledged = {key: len(seqs) for key, seqs in journalled_seqs(data_dir).items()}
        assert all(seqs == list(range(len(seqs))) for seqs in journalled_seqs(data_dir).values())
        # AND there is room again
        disk.resize("64m")
        wait_until(lambda: collector.http.get("/readyz").status_code == 200, "ready again")
        wait_until(
            lambda: all(len(seqs) == steps for seqs in journalled_seqs(data_dir).values()), "all is taken"
        )
        # THEN every record is there once, and what had been safe is still
        assert sidecar.end() == 0
        assert collector.end() == 0
        found = journalled_seqs(data_dir)
        assert list(found.values()) == [list(range(steps))] * 2
        assert all(len(found[key]) >= count for key, count in acknowledged.items())
        assert [ring.count for ring in map(Ring, sorted(ring_dir.glob("*.ring")))] == [steps] * 2


@pytest.mark.slow
def test_a_collector_killed_on_a_full_disk_starts_once_there_is_room(disk: Disk, tmp_path: Path) -> None:
    data_dir, ring_dir = disk.path / "data", tmp_path / "rings"
    ring_dir.mkdir(mode=0o700)
    collector = CollectorProcess(data_dir)
    sidecar = SidecarProcess(ring_dir, collector.url, token=collector.token)
    with killed_at_exit(collector, sidecar):
        ring = RingWriter(ring_dir, identity(stages=1), 8 << 20)
        append_steps(ring, 50)
        wait_until(lambda: collector.last_step("life-1.0") == 50, "50 steps are taken")
        before = list(read_journal(data_dir / "journal"))
        filler = disk.fill()
        append_steps(ring, 50, first_step=51)
        wait_until(lambda: collector.http.get("/readyz").status_code == 503, "the disk is full")
        # WHEN it is killed and started while nothing fits
        collector.kill()
        started = Process([*collector.arguments], tmp_path / "second.log")
        with killed_at_exit(started):
            # THEN it either says in one line why not, or lives and is not ready; nothing is harmed
            wait_until(lambda: "disk" in started.output or "space" in started.output, "it says why")
            assert "Traceback" not in started.output
        assert list(read_journal(data_dir / "journal"))[: len(before)] == before
        filler.unlink()
        collector = CollectorProcess(data_dir, port=collector.port)
        with killed_at_exit(collector):
            wait_until(lambda: collector.last_step("life-1.0") == 100, "100 steps are taken")
            assert sidecar.end() == 0
            assert collector.end() == 0
        assert list(journalled_seqs(data_dir).values()) == [list(range(100))]


def test_a_file_system_that_is_read_only_is_refused_in_one_line(disk: Disk, tmp_path: Path) -> None:
    (disk.path / "data").mkdir(mode=0o700)
    disk.read_only()
    process = Process(
        [BIN / "stagewatch", "collect", "--port", "0", "--data-dir", disk.path / "data"],
        tmp_path / "log",
        STAGEWATCH_TOKEN="t" * 43,
    )
    with killed_at_exit(process):
        assert process.status() == 2
    assert process.output.splitlines() == [
        f"stagewatch: data directory {disk.path / 'data'} cannot be written: Read-only file system"
    ]


class FailingDisk:
    """A real file system in a file, which its kernel turns read-only once it finds it broken."""

    def __init__(self, directory: Path) -> None:
        self._image, self.path = directory / "image", directory / "failing"
        self._image.touch()
        os.truncate(self._image, 32 << 20)
        self.path.mkdir()
        _run("mkfs.ext4", "-q", self._image)
        self._mount()

    def _mount(self) -> None:
        _run("mount", "-o", "loop,errors=remount-ro", self._image, self.path)
        self.path.chmod(0o700)

    def fail(self) -> None:
        """What a broken sector would bring about, whoever has files open for writing."""
        mounts = Path("/proc/mounts").read_text().splitlines()
        device = next(line for line in mounts if str(self.path) in line).split()[0]
        (Path("/sys/fs/ext4") / Path(device).name / "trigger_fs_error").write_text("1")

    def repair(self) -> None:
        _run("umount", self.path)
        subprocess.run(["e2fsck", "-fy", str(self._image)], capture_output=True, check=False)
        self._mount()

    def close(self) -> None:
        _run("umount", "--lazy", self.path)


@pytest.fixture
def failing_disk(tmp_path: Path) -> Iterator[FailingDisk]:
    with mounted(lambda: FailingDisk(tmp_path), needed=False) as made:
        yield made


@pytest.mark.slow
def test_a_file_system_that_turns_read_only_is_like_a_full_one(
    failing_disk: FailingDisk, tmp_path: Path
) -> None:
    # GIVEN a collector that takes evidence
    data_dir, ring_dir = failing_disk.path, tmp_path / "rings"
    ring_dir.mkdir(mode=0o700)
    collector = CollectorProcess(data_dir)
    sidecar = SidecarProcess(ring_dir, collector.url, token=collector.token)
    with killed_at_exit(collector, sidecar):
        ring = RingWriter(ring_dir, identity(stages=1), 8 << 20)
        append_steps(ring, 50)
        wait_until(lambda: collector.last_step("life-1.0") == 50, "50 steps are taken")
        before = list(read_journal(data_dir / "journal"))
        # WHEN its disk can be written no more
        failing_disk.fail()
        append_steps(ring, 50, first_step=51)
        # THEN it says so, acknowledges nothing, and answers on
        wait_until(lambda: collector.http.get("/readyz").status_code == 503, "it is not ready")
        wait_until(lambda: collector.metric("stagewatch_journal_failing") == 1, "the journal fails")
        assert "Read-only file system" in collector.get("/v1/status")["reason"]
        assert list(read_journal(data_dir / "journal"))[: len(before)] == before
        assert collector.last_step("life-1.0") == 50
        # AND once it was repaired, all is taken, once
        collector.kill()
        failing_disk.repair()
        collector = CollectorProcess(data_dir, port=collector.port)
        with killed_at_exit(collector):
            wait_until(lambda: collector.last_step("life-1.0") == 100, "100 steps are taken")
            assert sidecar.end() == 0
            assert collector.end() == 0
        assert list(journalled_seqs(data_dir).values()) == [list(range(100))]
    assert "Traceback" not in collector.output
