"""The engine's end of a ring. How the two ends get along is told in `stagewatch.agents.ring`."""

import contextlib
import fcntl
import os
import weakref
from collections import deque
from pathlib import Path
from typing import Final

import msgspec

from stagewatch.agents import record
from stagewatch.agents.errors import RingError
from stagewatch.agents.identity import Identity
from stagewatch.agents.record import Body, Kind
from stagewatch.agents.ringfile import (
    CAPACITY_MAX,
    CAPACITY_MIN,
    CLOSED,
    CURSORS,
    FIXED,
    HEAD,
    HEADER_SIZE,
    IDENTITY_AT,
    MAGIC,
    TAIL,
    WRITTEN,
    create,
    map_new,
)

_LANDMARKS: Final = 1024


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
        self._cursors: Final = self._buffer[CURSORS].cast("Q")
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
        first, rest = record.encode_parts(kind, self._written, step, t_ns, body, self._record_max)
        size = len(first) + len(rest)
        start = self._head
        offset = start % self.capacity
        gap = self.capacity - offset if offset + size > self.capacity else 0
        if start + gap + size - self.capacity > self._tail:
            self._give_up_below(start + gap + size - self.capacity)
        if gap:
            self._buffer[HEADER_SIZE + offset : HEADER_SIZE + offset + 8] = bytes(8)
            start, offset = start + gap, 0
        at = HEADER_SIZE + offset
        self._buffer[at : at + len(first)] = first
        self._buffer[at + len(first) : at + size] = rest
        if not self._landmarks or start - self._landmarks[-1] >= self._landmark_distance:
            self._landmarks.append(start)
        self._head = self._cursors[HEAD] = start + size
        # After the head: a reader that loads the two in the other order never counts a record it cannot see.
        self._written = self._cursors[WRITTEN] = self._written + 1

    def close(self) -> None:
        """Mark the ring as complete, the engine having left of its own accord, and give up its lock."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._cursors[CLOSED] = 1
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _give_up_below(self, position: int) -> None:
        """Raise the tail to a record's start at or above ``position``."""
        while self._landmarks and self._landmarks[0] < position:
            self._landmarks.popleft()
        self._tail = self._cursors[TAIL] = self._landmarks[0] if self._landmarks else self._head
