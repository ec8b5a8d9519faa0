"""The journal on a real disk: what is durable comes back, what is torn does not, and positions survive."""

import os
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from service_records import carried_in, identity

from stagewatch.monitor.journal import (
    VERSION,
    Carried,
    Entry,
    EntryKind,
    Header,
    JournalError,
    Position,
    SegmentReader,
    head_of,
    read_journal,
    segments_in,
)
from stagewatch.monitor.retention import Policy, Segment, Span, surplus
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


class TestDamage:
    """Damage costs what it hit. Whatever a sender put into its frames, none of it is taken for an entry."""

    def test_entries_behind_a_damaged_head_are_found_again(self, directory: Path) -> None:
        written(directory, b"one", b"two" * 50, b"three")
        written(directory, b"four")
        first, _ = segments_in(directory)
        content = bytearray(first.read_bytes())
        at = content.index(b"two") - len(head_of(EntryKind.BATCH, 7, b""))
        content[at : at + 4] = b"\xff" * 4  # the length: nothing says any more where the next entry begins
        first.write_bytes(content)
        journal = Opened(directory).journal
        assert [entry.payload for entry in journal.recover()] == [b"one", b"three", b"four"]
        assert journal.damaged_bytes == len(head_of(EntryKind.BATCH, 7, b"")) + 150
        assert journal.torn_bytes == 0

    def test_an_entry_planted_in_a_frame_is_never_read(self, directory: Path) -> None:
        # GIVEN a frame that holds what would be an entry without the salt, and damage to its own head
        planted = head_of(EntryKind.BATCH, 7, b"planted") + b"planted"
        written(directory, planted, b"after")
        written(directory, b"last")
        first, _ = segments_in(directory)
        content = bytearray(first.read_bytes())
        content[content.index(planted) - len(head_of(EntryKind.BATCH, 7, b""))] ^= 0xFF
        first.write_bytes(content)
        assert payloads_in(directory) == [b"after", b"last"]

    def test_a_segment_made_to_be_searched_for_ever_is_given_up(self, directory: Path) -> None:
        """Each of many heads announces nearly all of the file: checking them all would take hours."""
        written(directory, b"one")
        written(directory, b"last")
        first, _ = segments_in(directory)
        with first.open("ab") as file:
            for _ in range(100_000):
                file.write(struct.pack("<IIQBxxx", 1 << 20, 1, 1, 2))
        assert payloads_in(directory) == [b"one", b"last"]

    def test_a_damaged_header_costs_its_segment(self, directory: Path) -> None:
        written(directory, b"one")
        written(directory, b"two")
        first, _ = segments_in(directory)
        content = bytearray(first.read_bytes())
        content[10] ^= 1
        first.write_bytes(content)
        journal = Opened(directory).journal
        assert [entry.payload for entry in journal.recover()] == [b"two"]
        assert journal.damaged_bytes == len(content) - len(Header(VERSION, 0, 0).encode())


class TestVersions:
    def test_version_1_is_read_and_continued(self, directory: Path) -> None:
        directory.mkdir()
        old = b"STGWJRN1" + b"".join(
            head_of(EntryKind.BATCH, 7, each) + each for each in (b"one", b"hit", b"three")
        )
        (directory / "0000000000000001.journal").write_bytes(old.replace(b"hit", b"hut"))
        written(directory, b"four")
        assert payloads_in(directory) == [b"one", b"three", b"four"]

    def test_a_newer_one_is_refused_with_the_way_out(self, directory: Path) -> None:
        written(directory, b"one")
        (path,) = segments_in(directory)
        path.write_bytes(b"STGWJRN9" + path.read_bytes()[8:])
        with pytest.raises(JournalError, match="version 9, this build reads 1 to 2: upgrade stagewatch"):
            Opened(directory)


class TestAges:
    def test_a_segment_that_is_old_ends_though_nothing_comes(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("stagewatch.monitor.scribe.IDLE_S", 0.001)
        opened = Opened(directory, segment_s=60)
        opened.journal.start()
        opened.write(b"one")
        assert len(segments_in(directory)) == 1
        opened.now_ns += 61 * 10**9
        while len(segments_in(directory)) == 1:
            os.sched_yield()
        opened.now_ns += 1000 * 10**9  # nothing is in the new one, so it does not end
        opened.journal.close()
        assert len(segments_in(directory)) == 2

    def test_what_is_too_old_goes_though_there_is_room(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("stagewatch.monitor.scribe.IDLE_S", 0.001)
        opened = Opened(directory, segment_bytes=1, keep_s=100)
        opened.journal.start()
        opened.write(b"one")
        opened.now_ns += 60 * 10**9
        opened.write(b"two")
        opened.now_ns += 60 * 10**9
        while (directory / "0000000000000001.journal").exists():
            os.sched_yield()
        opened.journal.close()
        assert payloads_in(directory) == [b"two"]


SECOND = 10**9


def segment(number: int, began_s: int, ended_s: int, size: int = 10) -> Segment:
    return Segment(Path(f"{number:016d}.journal"), size, began_s * SECOND, ended_s * SECOND)


class TestPins:
    SHELF = tuple(segment(number, 100 * number, 100 * number + 99) for number in range(1, 7))

    def gone(
        self, policy: Policy, *spans: tuple[int, int], now_s: int = 700
    ) -> tuple[list[int], list[int], int]:
        pins = [Span(first * SECOND, last * SECOND) for first, last in spans]
        found = surplus(self.SHELF, policy, pins, now_s * SECOND)
        numbers = [[int(each.path.stem) for each in part] for part in (found.unpinned, found.pinned)]
        return numbers[0], numbers[1], found.pinned_bytes

    def policy(self, keep_bytes: int = 20, keep_s: float = 0, pin_bytes: int = 1000) -> Policy:
        return Policy(10, 100, keep_bytes, keep_s, pin_bytes)

    def test_the_newest_are_kept(self) -> None:
        assert self.gone(self.policy()) == ([1, 2, 3, 4], [], 0)

    def test_segments_around_an_incident_are_kept_beyond_that(self) -> None:
        assert self.gone(self.policy(), (290, 310)) == ([1, 4], [], 20)

    def test_pins_have_a_bound_and_the_newest_are_kept(self) -> None:
        assert self.gone(self.policy(pin_bytes=20), (100, 499)) == ([], [1, 2], 20)

    def test_pins_that_overlap_are_one(self) -> None:
        assert self.gone(self.policy(), (210, 220), (215, 310), (120, 130)) == ([4], [], 30)

    def test_age_and_pins(self) -> None:
        assert self.gone(self.policy(1000, keep_s=150), (110, 120), now_s=800) == ([2, 3, 4, 5], [], 10)

    def test_the_segment_being_written_stays_whatever_its_age_and_size(self) -> None:
        assert self.gone(self.policy(0, keep_s=1), now_s=10**6) == ([1, 2, 3, 4, 5], [], 0)

    def test_what_goes_in_spite_of_a_pin_is_counted_and_told(
        self, directory: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        opened = Opened(directory, segment_bytes=1, keep_bytes=1, pin_bytes=0)
        opened.pins = [Span(0, 2 * time.time_ns())]
        opened.journal.start()
        opened.write(b"one")
        opened.write(b"two")
        opened.journal.close()
        assert payloads_in(directory) == [b"two"]
        assert opened.journal.health.pinned_dropped == 1
        assert "incidents' evidence exceed --pin-bytes 0" in caplog.text

    def test_nothing_goes_while_the_pins_are_unknown(self, directory: Path) -> None:
        opened = Opened(directory, segment_bytes=1, keep_bytes=1)

        def unknown() -> list[Span]:
            raise JournalError("the store cannot be read")

        opened.journal._pins = unknown
        opened.journal.start()
        opened.write(b"one")
        opened.write(b"two")
        opened.journal.close()
        assert payloads_in(directory) == [b"one", b"two"]


class TestPositions:
    def test_reading_on_from_a_position_gives_what_came_after(self, directory: Path) -> None:
        opened = Opened(directory, segment_bytes=100)
        opened.journal.start()
        for number in range(20):
            opened.write(b"%02d" % number * 20)
        opened.journal.close()
        assert len(segments_in(directory)) > 3
        for place, position in enumerate(opened.positions_seen):
            left = [e.payload[:2] for e in Opened(directory).journal.recover(position)]
            assert left == [b"%02d" % number for number in range(place + 1, 20)]

    def test_a_disk_that_is_full_is_helped_by_what_is_beyond_what_is_kept(self, directory: Path) -> None:
        """Old segments go although no new one can be made: else one that filled the disk would keep it full."""
        opened = Opened(directory, segment_bytes=1, keep_bytes=1 << 20)
        opened.journal.start()
        opened.write(b"one")
        opened.write(b"two")
        opened.journal._policy = opened.journal._shelf._policy = Policy(1, 3600, 1, 0, 0)

        def full(header: object, parts: object) -> tuple[int, int]:
            raise OSError(28, "No space left on device")

        opened.journal._shelf.begin, begin = full, opened.journal._shelf.begin  # type: ignore[method-assign]
        opened.offer(b"three")
        while len(segments_in(directory)) > 1:
            os.sched_yield()
        opened.journal._shelf.begin = begin  # type: ignore[method-assign]
        opened.journal.close()
        assert payloads_in(directory)[0] == b"two"
