"""The journal on a real disk: what is durable comes back, what is torn does not, and positions survive."""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from service_records import carried_in, identity

from stagewatch.monitor.journal import (
    Carried,
    Entry,
    EntryKind,
    Position,
    SegmentReader,
    head_of,
    read_journal,
    segments_in,
)
from stagewatch.monitor.retention import Policy, Span
from stagewatch.monitor.scribe import Scribe


class Opened:
    """A journal whose durable tickets can be waited for."""

    def __init__(
        self,
        directory: Path,
        carried: Sequence[Carried] = (),
        segment_bytes: int = 1 << 20,
        keep_bytes: int = 1 << 30,
        segment_s: float = 3600,
        keep_s: float = 0,
        pin_bytes: int = 0,
    ) -> None:
        self.pins: list[Span] = []
        self.now_ns = time.time_ns()
        self.positions_seen: list[Position] = []
        self.tickets: list[bytes] = []
        self.offered = 0
        self.positions = list(carried)
        self._arrived = threading.Condition()
        self.journal: Scribe[bytes] = Scribe(
            directory,
            Policy(segment_bytes, segment_s, keep_bytes, keep_s, pin_bytes),
            durable=self._durable,
            carried=lambda: self.positions,
            pins=lambda: self.pins,
            now_ns=lambda: self.now_ns,
        )

    def write(self, *payloads: bytes) -> None:
        """Offer, and wait until everything offered is durable."""
        self.offer(*payloads)
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.tickets) == self.offered, 30)

    def offer(self, *payloads: bytes) -> None:
        for payload in payloads:
            self.offered += 1
            self.journal.offer(Entry(EntryKind.BATCH, 7, payload), payload)

    def _durable(self, group: Sequence[bytes], position: Position) -> None:
        with self._arrived:
            self.positions_seen.append(position)
            self.tickets += group
            self._arrived.notify_all()


def payloads_in(directory: Path) -> list[bytes]:
    return [entry.payload for entry in read_journal(directory) if entry.kind is EntryKind.BATCH]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def written(directory: Path, *payloads: bytes, **keywords: Any) -> Opened:
    opened = Opened(directory, **keywords)
    opened.journal.start()
    opened.write(*payloads)
    opened.journal.close()
    return opened


def test_entries_come_back_in_order_with_their_times(directory: Path) -> None:
    opened = written(directory, b"one", b"two" * 1000, b"")
    assert opened.tickets == [b"one", b"two" * 1000, b""]
    assert list(Opened(directory).journal.recover()) == [
        Entry(EntryKind.BATCH, 7, b"one"),
        Entry(EntryKind.BATCH, 7, b"two" * 1000),
        Entry(EntryKind.BATCH, 7, b""),
    ]


def test_files_are_private(directory: Path) -> None:
    written(directory, b"one")
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in segments_in(directory)} == {0o600}


def test_everything_that_waits_is_synced_together(directory: Path) -> None:
    # GIVEN a journal whose first group is on its way
    opened = Opened(directory)
    opened.journal.start()
    opened.write(b"first")
    syncs = opened.journal.health.syncs
    # WHEN many entries are offered while the thread is held up
    with opened._arrived:
        opened.offer(b"holds the thread in durable")
        while opened.journal.health.syncs == syncs:
            os.sched_yield()
        numbers = [b"%d" % number for number in range(50)]
        opened.offer(*numbers)
        assert opened.journal.bytes_waiting > 0
    opened.journal.close()
    # THEN one sync covers them all
    assert opened.journal.health.syncs == syncs + 2
    assert opened.tickets[2:] == numbers
    assert opened.journal.bytes_waiting == 0


def test_a_torn_tail_is_cut_off_wherever_it_tore(directory: Path, tmp_path: Path) -> None:
    written(directory, b"whole", b"torn entry")
    (path,) = segments_in(directory)
    content = path.read_bytes()
    sound = len(content) - len(head_of(EntryKind.BATCH, 7, b"")) - len(b"torn entry")
    for size in range(sound, len(content)):
        path.write_bytes(content[:size])
        journal = Opened(directory).journal
        assert [entry.payload for entry in journal.recover()] == [b"whole"]
        assert journal.damaged_bytes == size - sound
        assert path.stat().st_size == sound


def test_a_torn_tail_of_rubbish_is_cut_off(directory: Path) -> None:
    written(directory, b"whole")
    (path,) = segments_in(directory)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"\xff" * 100)
    journal = Opened(directory).journal
    assert [entry.payload for entry in journal.recover()] == [b"whole"]
    assert (journal.damaged_bytes, path.stat().st_size) == (100, size)


def test_damage_costs_the_rest_of_its_segment_and_no_other(directory: Path) -> None:
    # GIVEN two segments of two entries
    written(directory, b"a1", b"a2")
    written(directory, b"b1", b"b2")
    first, _ = segments_in(directory)
    # WHEN a bit of the second entry of the first flips
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    # THEN that one is left out, and the file is not touched: it may be read by hand
    journal = Opened(directory).journal
    assert [entry.payload for entry in journal.recover()] == [b"a1", b"b1", b"b2"]
    assert journal.damaged_bytes > 0
    assert first.read_bytes() == bytes(content)


def test_each_segment_begins_with_the_positions_so_old_ones_can_go(directory: Path) -> None:
    # GIVEN small segments and little to keep
    opened = Opened(directory, segment_bytes=1000, keep_bytes=3000)
    opened.journal.start()
    # WHEN much is written
    for number in range(40):
        opened.positions = [Carried(identity(), number)]
        opened.write(b"%03d" % number + b"x" * 400)
    opened.journal.close()
    # THEN the oldest are gone, the newest are there, and the oldest left says where its streams stood
    paths = segments_in(directory)
    assert sum(path.stat().st_size for path in paths) <= 3000 + 2000
    left = payloads_in(directory)
    assert left[-1].startswith(b"039")
    assert not any(payload.startswith(b"000") for payload in left)
    (position,) = carried_in(list(SegmentReader(paths[0])))
    assert position == Carried(identity(), int(left[0][:3]))


def test_a_start_never_writes_into_an_old_segment(directory: Path) -> None:
    written(directory, b"one")
    (first,) = segments_in(directory)
    content = first.read_bytes()
    written(directory, b"two")
    assert first.read_bytes() == content
    assert payloads_in(directory) == [b"one", b"two"]


def test_a_disk_that_comes_back_gets_everything_once(tmp_path: Path) -> None:
    # GIVEN a journal whose directory vanishes
    directory = tmp_path / "journal"
    opened = Opened(directory, segment_bytes=1)
    opened.journal.start()
    opened.write(b"one")
    hidden = tmp_path / "hidden"
    directory.rename(hidden)
    # WHEN something is offered, nothing is safe
    opened.offer(b"two")
    while not opened.journal.health.failure:
        os.sched_yield()
    assert opened.tickets == [b"one"]
    # THEN once it is back, it is
    hidden.rename(directory)
    opened.write(b"three")
    assert opened.tickets == [b"one", b"two", b"three"]
    assert opened.journal.health.failure == ""
    opened.journal.close()
    assert payloads_in(directory) == [b"one", b"two", b"three"]


def test_a_disk_that_stays_full_does_not_gather_segments(directory: Path) -> None:
    """A segment may begin, and then have no room for what waits: each try makes one anew."""
    opened = Opened(directory)
    opened.journal.start()
    opened.write(b"one")
    tries = 0

    def no_room(group: Any) -> int:
        nonlocal tries
        tries += 1
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stagewatch.monitor.scribe.RETRY_S", 0.001)
        patch.setattr(opened.journal, "_write", no_room)
        opened.offer(b"two")
        while tries < 10:
            os.sched_yield()
    opened.write(b"three")
    opened.journal.close()
    assert payloads_in(directory) == [b"one", b"two", b"three"]
    assert len(segments_in(directory)) == 2
    assert opened.journal.health.segments == 2


def test_positions_longer_than_a_segment_do_not_make_one_of_each_entry(directory: Path) -> None:
    positions = [Carried(identity(0, f"life-{number}"), 1) for number in range(100)]
    opened = Opened(directory, segment_bytes=1000, carried=positions)
    opened.journal.start()
    for _ in range(20):
        opened.write(b"x" * 100)
    opened.journal.close()
    assert len(segments_in(directory)) == 3


def test_an_error_of_our_own_on_its_thread_is_a_failure_that_shows(directory: Path) -> None:
    """GIVEN a thread that dies THEN readiness tells, instead of nothing ever being acknowledged again."""
    opened = Opened(directory)

    def fails(tickets: Sequence[bytes], position: Position) -> None:
        raise ZeroDivisionError

    opened.journal._durable = fails
    opened.journal.start()
    opened.offer(b"one")
    opened.journal._thread.join(30)
    assert "ZeroDivisionError" in opened.journal.health.failure


def test_a_directory_named_like_a_segment_is_none(directory: Path) -> None:
    written(directory, b"one")
    (directory / "0000000000000002.journal").mkdir()
    written(directory, b"two")
    assert payloads_in(directory) == [b"one", b"two"]
