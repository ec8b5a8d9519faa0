"""The ring: one file per rank in shared memory that keeps the newest records, whatever happens to the engine.

A header page, then a data area that is written round and round. Positions are counts of bytes ever
written, so they only grow; a position's place in the file is its remainder by the capacity. A record is
never split: where it does not fit before the end of the area, the writer skips to the start, leaving
a gap that begins with a zero word.

One writer, any number of readers, no locks. The writer first raises ``tail`` past what it is about to
overwrite, then writes, then raises ``head``. A reader copies a record and looks at ``tail`` again: if it
passed, the copy may be torn and the records are counted as lost. The checksum catches the rest, a
reader on another core that saw the stores in another order included. A writer killed between the two
raises leaves an unpublished record that nobody reads. Each cursor is stored and loaded as one aligned
word, so that none is ever seen half written.

Neither end believes the other: the writer never reads the area back, and the reader takes nothing from it
but records whose checksum and number fit. Whatever a ring holds, the numbers of the records read and of those
counted as lost add up without a gap.

The writer holds a shared lock on the file for as long as it lives, through SIGKILL and across PID
namespaces, so that a ring without one belongs to an engine that ended.
"""

import contextlib
import fcntl
import os
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from stagewatch.agents import record
from stagewatch.agents.errors import RecordError, RingError
from stagewatch.agents.identity import Identity
from stagewatch.agents.record import Body, Kind, Record
from stagewatch.agents.ringfile import (
    CAPACITY_MAX,
    CAPACITY_MIN,
    FIXED,
    HEADER_SIZE,
    IDENTITY_AT,
    MAGIC,
    check_directory,
    checked_identity,
    create,
    is_held,
    map_new,
    open_map,
)

__all__ = [
    "CAPACITY_MAX",
    "CAPACITY_MIN",
    "HEADER_SIZE",
    "Margin",
    "RecordTooLongError",
    "RingReader",
    "RingWriter",
    "check_directory",
    "is_held",
]

_CURSORS: Final = slice(64, 96)
_TAIL, _HEAD, _WRITTEN, _CLOSED = range(4)
"""Words of the cursors: the oldest position present, the end, the records written, and 1 once complete."""
_LANDMARKS: Final = 1024
_TRIES: Final = 1024
"""How often a reader starts over within one call before it leaves the rest for the next."""


class RecordTooLongError(RingError, ValueError):
    """A record that would push out everything worth keeping, or that no reader would believe."""


class RingWriter:
    """The engine's end. Not thread-safe: its owner serialises calls.

    Raises RingError where the file cannot be created. `append` raises RecordTooLongError for a record longer
    than a quarter of the ring, and RingError in a fork of the process that made the ring, or after `close`.
    """

    def __init__(self, directory: Path, identity: Identity, capacity: int) -> None:
        if not CAPACITY_MIN <= capacity <= CAPACITY_MAX:
            raise RingError(f"ring capacity {capacity} is outside {CAPACITY_MIN} to {CAPACITY_MAX} bytes")
        name = identity.ring_name
        if Path(name).name != name or not name.isprintable():
            raise RingError(
                f"engine instance {identity.instance!r} cannot name a ring: use letters and digits"
            )
        self.path: Final = directory / name
        self.capacity: Final = capacity & ~7
        encoded = msgspec.json.encode(identity)
        if IDENTITY_AT + len(encoded) > HEADER_SIZE:
            raise RingError(
                f"identity of {len(encoded)} bytes does not fit the ring's header of {HEADER_SIZE}"
            )
        self._pid: Final = os.getpid()
        self._fd: Final = create(self.path, HEADER_SIZE + self.capacity)
        weakref.finalize(self, os.close, self._fd)
        self._buffer: Final = memoryview(map_new(self._fd, self.path, HEADER_SIZE + self.capacity))
        self._cursors: Final = self._buffer[_CURSORS].cast("Q")
        self._record_max: Final = min(self.capacity // 4, record.SIZE_MAX)
        self._tail = 0
        self._head = 0
        self._written = 0
        self._closed = False
        # Starts of some records, from `tail` on, so that it can be raised without reading the area back.
        self._landmarks: Final[deque[int]] = deque()
        self._landmark_distance: Final = self.capacity // _LANDMARKS
        self._buffer[IDENTITY_AT : IDENTITY_AT + len(encoded)] = encoded
        # Last, so that a reader never takes a half-made header for a ring.
        FIXED.pack_into(self._buffer, 0, MAGIC, record.SCHEMA, HEADER_SIZE, self.capacity, len(encoded))

    @property
    def records_written(self) -> int:
        """Records appended so far."""
        return self._written

    def append(self, kind: Kind, step: int, t_ns: int, body: Body) -> None:
        """Store one record, overwriting the oldest where needed."""
        if self._closed or os.getpid() != self._pid:
            owner = "closed" if self._closed else f"of process {self._pid}, not of its fork"
            raise RingError(f"ring {self.path.name} is {owner}: nothing is written")
        data = record.encode(kind, self._written, step, t_ns, body)
        size = len(data)
        if size > self._record_max:
            raise RecordTooLongError(
                f"{kind.name.lower()} record of {size} bytes exceeds {self._record_max}, a quarter of the ring "
                f"or the longest a reader takes: enlarge the ring"
            )
        start = self._head
        offset = start % self.capacity
        gap = self.capacity - offset if offset + size > self.capacity else 0
        self._give_up_below(start + gap + size - self.capacity)
        if gap:
            self._buffer[HEADER_SIZE + offset : HEADER_SIZE + offset + 8] = bytes(8)
            start, offset = start + gap, 0
        self._buffer[HEADER_SIZE + offset : HEADER_SIZE + offset + size] = data
        if not self._landmarks or start - self._landmarks[-1] >= self._landmark_distance:
            self._landmarks.append(start)
        self._head = self._cursors[_HEAD] = start + size
        # After the head: a reader that loads the two in the other order never counts a record it cannot see.
        self._written = self._cursors[_WRITTEN] = self._written + 1

    def close(self) -> None:
        """Mark the ring as complete, the engine having left of its own accord, and give up its lock."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._cursors[_CLOSED] = 1
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _give_up_below(self, position: int) -> None:
        """Raise the tail to a record's start at or above ``position``."""
        if position <= self._tail:
            return
        while self._landmarks and self._landmarks[0] < position:
            self._landmarks.popleft()
        self._tail = self._cursors[_TAIL] = self._landmarks[0] if self._landmarks else self._head


@dataclass(frozen=True, slots=True)
class Margin:
    """How much room a reader has before the writer overtakes it."""

    bytes_free: int
    """Bytes the writer can still write before it overwrites the next record to be read."""
    bytes_behind: int
    """Bytes published and not yet read."""
    bytes_written: int
    """Bytes published since the ring was made; its growth over time is the writer's rate."""
    capacity: int


class RingReader:
    """A reader's end: starts at the oldest record present; RingError for a file that is no ring.

    Reading never raises, whatever the ring holds.
    """

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self._map = open_map(path)
        self._buffer = memoryview(self._map)
        try:
            self.identity: Final = checked_identity(path.name, self._buffer)
        except RingError:
            self._buffer.release()
            self._map.close()
            raise
        self._capacity: Final = len(self._buffer) - HEADER_SIZE
        self._cursors = self._buffer[_CURSORS].cast("Q")
        self._position = 0
        self._next_seq = 0
        self.lost = 0
        """Records that could not be read: overwritten before this reader came, overwritten before it got to
        them, or damaged. Records read and lost make up every number from 0 to the last one read."""

    @property
    def closed(self) -> bool:
        """Whether the writer has said that nothing more will come."""
        return self.is_whole and self._cursors[_CLOSED] != 0

    @property
    def is_whole(self) -> bool:
        """Whether the file is still as long as it was. Touching memory beyond a file's end kills the process."""
        return self._map.size() == HEADER_SIZE + self._capacity

    def margin(self) -> Margin:
        """Room left, now."""
        seen = self._snapshot()
        if seen is None:
            return Margin(0, 0, 0, self._capacity)
        tail, head, _ = seen
        behind = head - (self._position if tail <= self._position <= head else tail)
        return Margin(self._capacity - behind, behind, head, self._capacity)

    def read(self, limit: int = 4096) -> Iterator[Record]:
        """Yield up to ``limit`` records published since the last call, in order."""
        for _ in range(limit):
            found = self._next()
            if found is None:
                return
            yield found

    def rewind(self) -> None:
        """Start over at the oldest record present; `lost` starts over, too."""
        self._position = self._next_seq = self.lost = 0

    def close(self) -> None:
        """Release the mapping."""
        self._cursors.release()
        self._buffer.release()
        self._map.close()

    def _next(self) -> Record | None:
        for _ in range(_TRIES):
            seen = self._snapshot()
            if seen is None:
                return None
            tail, head, written = seen
            if not tail <= self._position <= head:
                # Overtaken; or this position came from cursors that were damaged for a while.
                self._position = tail
            start = self._position
            if start == head:
                return None
            copy = self._copy(start, head)
            if self._cursors[_TAIL] > start:
                continue
            room = self._capacity - start % self._capacity
            if copy[:8] == bytes(8) and room < head - start and room <= self._capacity // 4:
                self._position += room
                continue
            try:
                found = self._trusted(copy, start)
            except RecordError:
                self._skip_damage(start, head, written)
                continue
            self._position += len(copy)
            if found.seq < self._next_seq:
                continue  # read before the cursors were damaged
            self._count_lost_before(found.seq)
            self._next_seq = found.seq + 1
            return found
        return None

    def _count_lost_before(self, seq: int) -> None:
        if seq > self._next_seq:
            self.lost += seq - self._next_seq
            self._next_seq = seq

    def _snapshot(self) -> tuple[int, int, int] | None:
        """(tail, head, records written up to the head or a little less); None where they contradict each other."""
        if not self.is_whole:
            return None
        for _ in range(_TRIES):
            written, head, tail = self._cursors[_WRITTEN], self._cursors[_HEAD], self._cursors[_TAIL]
            if tail <= head:
                break  # else the writer went round between the loads
        sound = (
            tail <= head <= tail + self._capacity
            and not (tail | head) & 7
            and head < 1 << 63
            and written * record.HEAD_SIZE <= head
        )
        return (tail, head, written) if sound else None

    def _copy(self, start: int, head: int) -> bytes:
        """Bytes of the record that seems to begin at ``start``; at least eight, never beyond ``head``."""
        at = HEADER_SIZE + start % self._capacity
        size = int.from_bytes(self._buffer[at + 4 : at + 8], "little")
        room = min(self._capacity - start % self._capacity, head - start)
        return bytes(self._buffer[at : at + max(8, min(size, room, record.SIZE_MAX))])

    def _trusted(self, copy: bytes, start: int) -> Record:
        """Decode a record and check that its number is possible where it lies."""
        found = record.decode(copy)
        if found.seq * record.HEAD_SIZE > start:
            raise RecordError(f"record claims to be number {found.seq} after {start} bytes")
        return found

    def _skip_damage(self, start: int, head: int, written: int) -> None:
        """Move to the next sound record after the damage at ``start``, or to ``head`` if there is none."""
        work_bytes = 4 * self._capacity  # what may be copied in search, so that a hostile ring ends it
        for position in self._candidates(start, head):
            copy = self._copy(position, head)
            work_bytes -= len(copy)
            if work_bytes < 0:
                break
            try:
                found = self._trusted(copy, position)
            except RecordError:
                continue
            if found.seq >= self._next_seq:
                self._position = position
                return
        self._position = head
        self._count_lost_before(written)

    def _candidates(self, start: int, head: int) -> Iterator[int]:
        """Positions at which a record may begin, in order: first where the damaged one says it ends."""
        first = start + len(self._copy(start, head))
        if first % self._capacity > start % self._capacity and first < head:
            yield first
        position = start + 8
        while position < head:
            offset = position % self._capacity
            span = min(head - position, self._capacity - offset, 1 << 20)
            chunk = bytes(self._buffer[HEADER_SIZE + offset : HEADER_SIZE + offset + span])
            marks = np.frombuffer(chunk, "<u2")[::4]
            for index in np.flatnonzero(marks == record.MAGIC).tolist():
                yield position + 8 * index
            position += span
