"""The ring: one file per rank in shared memory that keeps the newest records, whatever happens to the engine.

A header page, then a data area that is written round and round. Positions are counts of bytes ever
written, so they only grow; a position's place in the file is its remainder by the capacity. A record is
never split: where it does not fit before the end of the area, the writer skips to the start, leaving
a gap that begins with a zero word.

One writer, any number of readers, no locks. The writer first raises ``tail`` past what it is about to
overwrite, then writes, then raises ``head``. A reader copies a record and looks at ``tail`` again: if it
passed, the copy may be torn and the records are counted as lost. The checksum catches the rest, a
reader on another core that saw the stores in another order included. A writer killed between the two
raises leaves an unpublished record that nobody reads.
"""

import mmap
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from stagewatch.agents import record
from stagewatch.agents.errors import RecordError, RingError
from stagewatch.agents.identity import Identity
from stagewatch.agents.record import Body, Kind, Record, Views

HEADER_SIZE: Final = 8192
CAPACITY_MIN: Final = 1 << 16
CAPACITY_MAX: Final = 1 << 32
_MAGIC: Final = b"STGWATCH"
# magic, schema, header size, capacity, identity bytes
_FIXED: Final = struct.Struct("<8sIIQI")
# tail, head, next seq, closed
_CURSORS: Final = struct.Struct("<QQQQ")
_CURSORS_AT: Final = 64
_IDENTITY_AT: Final = 128


class RingWriter:
    """The engine's end. Not thread-safe: its owner serialises calls.

    Raises RingError where the file cannot be created. `append` raises ValueError for a record longer
    than a quarter of the ring, which would push out everything worth keeping.
    """

    def __init__(self, directory: Path, identity: Identity, capacity: int) -> None:
        if not CAPACITY_MIN <= capacity <= CAPACITY_MAX:
            raise RingError(f"ring capacity {capacity} is outside {CAPACITY_MIN} to {CAPACITY_MAX} bytes")
        self.path: Final = directory / identity.ring_name
        self.capacity: Final = capacity & ~7
        encoded = msgspec.json.encode(identity)
        if _IDENTITY_AT + len(encoded) > HEADER_SIZE:
            raise RingError(
                f"identity of {len(encoded)} bytes does not fit the ring's header of {HEADER_SIZE}"
            )
        self._map = _create(self.path, HEADER_SIZE + self.capacity)
        self._buffer = memoryview(self._map)
        self._views = Views.over(self._buffer)
        self._tail = 0
        self._head = 0
        self._seq = 0
        self._buffer[_IDENTITY_AT : _IDENTITY_AT + len(encoded)] = encoded
        self._publish()
        # Last, so that a reader never takes a half-made header for a ring.
        _FIXED.pack_into(self._buffer, 0, _MAGIC, record.SCHEMA, HEADER_SIZE, self.capacity, len(encoded))

    @property
    def records_written(self) -> int:
        """Records appended so far."""
        return self._seq

    def append(self, kind: Kind, step: int, t_ns: int, body: Body) -> None:
        """Store one record, overwriting the oldest where needed."""
        size = record.size_of(body)
        if size * 4 > self.capacity:
            raise ValueError(f"{kind.name.lower()} record of {size} bytes exceeds a quarter of the ring")
        offset = self._head % self.capacity
        gap = 0 if offset + size <= self.capacity else self.capacity - offset
        self._give_up_below(self._head + gap + size - self.capacity)
        if gap:
            self._buffer[HEADER_SIZE + offset : HEADER_SIZE + offset + 8] = bytes(8)
            self._head += gap
            offset = 0
        record.encode(self._views, self._buffer, HEADER_SIZE + offset, kind, self._seq, step, t_ns, body)
        self._head += size
        self._seq += 1
        self._publish()

    def close(self) -> None:
        """Mark the ring as complete: the engine left of its own accord."""
        _CURSORS.pack_into(self._buffer, _CURSORS_AT, self._tail, self._head, self._seq, 1)
        # The mapping itself goes with the process: numpy views still point into it.

    def _give_up_below(self, position: int) -> None:
        if position <= self._tail:
            return
        while self._tail < position:
            self._tail += _extent_at(self._buffer, self._tail, self.capacity)
        self._publish()

    def _publish(self) -> None:
        _CURSORS.pack_into(self._buffer, _CURSORS_AT, self._tail, self._head, self._seq, 0)


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
    """A reader's end: starts at the oldest record present; RingError for a file that is no ring."""

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self._map = _open(path)
        self._buffer = memoryview(self._map)
        self.identity: Final = self._check_header()
        self._position, _, _, _ = self._cursors()
        self._next_seq = -1
        self.lost = 0
        """Records overwritten, or found damaged, before they could be read."""

    @property
    def closed(self) -> bool:
        """Whether the writer has said that nothing more will come."""
        return self._cursors()[3] != 0

    def margin(self) -> Margin:
        """Room left, now."""
        _, head, _, _ = self._cursors()
        behind = head - self._position
        return Margin(max(self._capacity - behind, 0), max(behind, 0), head, self._capacity)

    def read(self, limit: int = 4096) -> Iterator[Record]:
        """Yield up to ``limit`` records published since the last call, in order."""
        for _ in range(limit):
            found = self._next()
            if found is None:
                return
            if self._next_seq >= 0:
                self.lost += found.seq - self._next_seq
            elif found.seq:
                self.lost += found.seq
            self._next_seq = found.seq + 1
            yield found

    def rewind(self) -> None:
        """Start over at the oldest record present."""
        self._position = 0
        self._next_seq = -1
        self.lost = 0

    def close(self) -> None:
        """Release the mapping."""
        self._buffer.release()
        self._map.close()

    def _next(self) -> Record | None:
        while True:
            tail, head, _, _ = self._cursors()
            if self._position < tail:
                self._position = tail
            if self._position >= head:
                return None
            offset = self._position % self._capacity
            try:
                extent = _extent_at(self._buffer, self._position, self._capacity)
            except RecordError:
                extent = 0
            is_gap = extent == self._capacity - offset and not any(
                self._buffer[HEADER_SIZE + offset : HEADER_SIZE + offset + 8]
            )
            copy = bytes(self._buffer[HEADER_SIZE + offset : HEADER_SIZE + offset + extent])
            if self._cursors()[0] > self._position:
                continue  # overwritten while copying: start again at the new tail
            if is_gap:
                self._position += extent
                continue
            try:
                found = record.decode(copy)
            except RecordError:
                # Damage that is not an overrun: no later record can be found from here. The writer is
                # gone or has not got further; what follows the damage is counted when seq resumes.
                if not self._skip_damage(head):
                    return None
                continue
            self._position += extent
            return found

    def _skip_damage(self, head: int) -> bool:
        """Move to the next sound record before ``head``; False if there is none."""
        position = self._position + 8
        while position < head:
            offset = position % self._capacity
            word = bytes(self._buffer[HEADER_SIZE + offset : HEADER_SIZE + offset + 8])
            if word[:2] == _RECORD_START:
                size = min(int.from_bytes(word[4:8], "little"), self._capacity - offset)
                try:
                    record.decode(bytes(self._buffer[HEADER_SIZE + offset : HEADER_SIZE + offset + size]))
                except RecordError:
                    pass
                else:
                    self._position = position
                    return True
            position += 8
        self._position = head
        return False

    def _cursors(self) -> tuple[int, int, int, int]:
        return _CURSORS.unpack_from(self._buffer, _CURSORS_AT)

    def _check_header(self) -> Identity:
        name = self.path.name
        if len(self._buffer) < HEADER_SIZE:
            raise RingError(
                f"ring {name}: {len(self._buffer)} bytes is shorter than a header: not a ring, or cut off"
            )
        magic, schema, header_size, capacity, identity_size = _FIXED.unpack_from(self._buffer)
        if magic != _MAGIC:
            raise RingError(f"ring {name}: not a stagewatch ring, or its engine is still making it")
        if schema != record.SCHEMA:
            side = "the sidecar" if schema > record.SCHEMA else "the engine's stagewatch"
            raise RingError(f"ring {name}: schema {schema}, this build reads {record.SCHEMA}: upgrade {side}")
        if header_size != HEADER_SIZE or len(self._buffer) != HEADER_SIZE + capacity:
            raise RingError(f"ring {name}: {len(self._buffer)} bytes do not match its header: cut off")
        self._capacity = capacity
        try:
            encoded = self._buffer[_IDENTITY_AT : _IDENTITY_AT + identity_size]
            return msgspec.json.decode(encoded, type=Identity)
        except msgspec.MsgspecError as error:
            raise RingError(f"ring {name}: damaged identity: {error}") from None


_RECORD_START: Final = record.MAGIC.to_bytes(2, "little")


def _extent_at(buffer: memoryview, position: int, capacity: int) -> int:
    """Bytes from ``position`` to the next record: a record's size, or the rest of the area for a gap."""
    offset = position % capacity
    word = buffer[HEADER_SIZE + offset : HEADER_SIZE + offset + 8]
    size = int.from_bytes(word[4:8], "little")
    if size == 0:
        return capacity - offset
    if size > capacity - offset or size % 8:
        raise RecordError(f"record claims {size} bytes of {capacity - offset} to the end of the ring")
    return size


def _create(path: Path, size: int) -> mmap.mmap:
    check_directory(path.parent)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise RingError(
            f"ring {path.name} exists already: another worker of this engine claims the same rank"
        ) from None
    except OSError as error:
        raise RingError(f"ring {path.name} cannot be created in {path.parent}: {error.strerror}") from None
    try:
        # Allocated now: a full tmpfs must refuse here, not kill the engine with SIGBUS at a later store.
        os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise RingError(
            f"ring {path.name}: {size} bytes cannot be had in {path.parent}: {error.strerror}"
        ) from None
    finally:
        os.close(fd)


def _open(path: Path) -> mmap.mmap:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise RingError(f"ring {path.name} cannot be opened: {error.strerror}") from None
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            raise RingError(f"ring {path.name}: empty: not a ring, or its engine is still making it")
        return mmap.mmap(fd, size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def check_directory(directory: Path) -> None:
    """Make sure rings in ``directory`` are ours alone; create it, mode 0700, if it does not exist.

    Raises RingError if it belongs to somebody else, is a symbolic link, or can be written by others.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except FileExistsError:
        raise RingError(f"ring directory {directory} is not a directory") from None
    except OSError as error:
        raise RingError(f"ring directory {directory} cannot be made: {error.strerror}") from None
    if stat.S_ISLNK(found.st_mode):
        raise RingError(f"ring directory {directory} is a symbolic link: name the directory it points to")
    if found.st_uid != os.geteuid():
        raise RingError(
            f"ring directory {directory} belongs to uid {found.st_uid}, not to this process: choose another"
        )
    if found.st_mode & 0o022:
        raise RingError(f"ring directory {directory} can be written by others: chmod 700 it")
