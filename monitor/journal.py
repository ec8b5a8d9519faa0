"""The journal: what the collector has taken, on disk before it says so.

Append-only segments of entries. An entry is a head (length, checksum, time of arrival, kind), then the
frame's bytes as they came. Each segment begins with what was carried over from the one before it: who
streams, and how far each stream has come. So any segment can be the oldest, and dropping old ones never
makes the collector take a record twice.

One thread writes. It takes every entry that waits, writes them together and syncs once: the group commit.
Entries become durable in the order they were offered. Where the disk fails, nothing is reported durable;
the segment is cut back to its last durable byte, and the same entries go to a fresh segment until one takes
them (a failed sync says nothing about what a second sync of the same file would mean).
"""

import logging
import os
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec

from stagewatch.agents.errors import StagewatchError, one_line
from stagewatch.agents.identity import Identity

log = logging.getLogger("stagewatch.collector")

_MAGIC: Final = b"STGWJRN1"
_HEAD: Final = struct.Struct("<IIQBxxx")
"""Length of the payload, CRC-32 of what follows it, nanoseconds since the epoch, kind."""
_CRC_FROM: Final = 8
ENTRY_MAX: Final = 1 << 28
RETRY_S: Final = 1.0
_IOV_MAX: Final = 1024


class JournalError(StagewatchError):
    """A journal that cannot be opened or written."""


class EntryKind(IntEnum):
    """What an entry holds."""

    HELLO = 1
    """A hello frame."""
    BATCH = 2
    """A batch frame."""
    CARRIED = 3
    """A `Carried`, where a segment begins."""


class Carried(msgspec.Struct, frozen=True):
    """A stream known when a segment began."""

    identity: Identity
    next_seq: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry read back."""

    kind: EntryKind
    t_ns: int
    """Wall clock of arrival, nanoseconds since the epoch."""
    payload: bytes


@dataclass(frozen=True, slots=True)
class Health:
    """How the journal is doing. Figures are for metrics and `/readyz`."""

    bytes_kept: int
    segments: int
    bytes_waiting: int
    failure: str
    """Empty, or why nothing is made durable at present."""
    syncs: int
    sync_s_total: float
    damaged_bytes: int
    """Bytes of entries found unreadable at the last recovery, a torn tail included."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[T]):
    entry: Entry
    ticket: T


class Journal(Generic[T]):
    """Segments in one directory, written by one thread of its own.

    On that thread, ``durable`` is given the tickets of each group that became safe, in the order offered, and
    ``carried`` is asked for the streams to carry into a new segment. Raises JournalError where the directory
    cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        *,
        durable: Callable[[Sequence[T]], None],
        carried: Callable[[], Sequence[Carried]],
        segment_bytes: int,
        keep_bytes: int,
        on_sync: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.directory: Final = directory
        self._durable = durable
        self._carried = carried
        self._segment_bytes = segment_bytes
        self._keep_bytes = keep_bytes
        self._on_sync = on_sync
        self._condition = threading.Condition()
        self._waiting: deque[_Waiting[T]] = deque()
        self._waiting_bytes = 0
        self._waiting_entries = 0
        self._closing = False
        self._failure = ""
        self._syncs = 0
        self._sync_s_total = 0.0
        self.damaged_bytes = 0
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._sizes = {path: path.stat().st_size for path in segments_in(directory)}
        except OSError as error:
            raise JournalError(f"journal {directory} cannot be used: {error.strerror}") from None
        self._fd = -1
        self._path = directory
        self._size = 0
        self._carried_size = 0
        """Bytes with which the present segment began."""
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    def recover(self) -> Iterator[Entry]:
        """Every sound entry, oldest first, before `start`. Cuts off a torn tail.

        Damage elsewhere costs the rest of its segment. `damaged_bytes` and the log say how much.
        """
        paths = sorted(self._sizes)
        for path in paths:
            reader = SegmentReader(path)
            yield from reader
            bad = reader.size - reader.sound_bytes
            if not bad:
                continue
            self.damaged_bytes += bad
            if path == paths[-1]:
                os.truncate(path, reader.sound_bytes)
                self._sizes[path] = reader.sound_bytes

    def start(self) -> None:
        """Begin to take entries. `health` says if the disk does not let us."""
        self._thread.start()

    def offer(self, entry: Entry, ticket: T) -> None:
        """Queue an entry; ``ticket`` comes back through ``durable`` once it is safe. Never blocks on the disk.

        Whoever offers keeps an eye on `bytes_waiting`: the queue is theirs to bound.
        """
        with self._condition:
            self._waiting.append(_Waiting(entry, ticket))
            self._waiting_bytes += len(entry.payload)
            self._waiting_entries += 1
            self._condition.notify()

    @property
    def bytes_waiting(self) -> int:
        """Bytes offered and not yet durable."""
        return self._waiting_bytes

    @property
    def entries_waiting(self) -> int:
        """Entries offered and not yet durable."""
        return self._waiting_entries

    @property
    def health(self) -> Health:
        """How it is doing, now."""
        with self._condition:
            return Health(
                sum(self._sizes.values()),
                len(self._sizes),
                self._waiting_bytes,
                self._failure,
                self._syncs,
                self._sync_s_total,
                self.damaged_bytes,
            )

    def close(self) -> None:
        """Make durable what waits, if the disk lets us, and stop."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        if self._thread.is_alive():
            self._thread.join()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _run(self) -> None:
        try:
            self._write_until_closed()
        except (
            Exception
        ) as error:  # nobody waits for this thread: without a word, nothing would be safe ever again
            log.exception("the journal's thread failed: please report this")
            with self._condition:
                self._failure = f"journal {self.directory}: {one_line(error)}: restart the collector"

    def _write_until_closed(self) -> None:
        while True:
            group = self._next_group()
            if group is None:
                return
            while not self._commit(group):
                with self._condition:
                    self._condition.wait_for(lambda: self._closing, RETRY_S)
                    if self._closing:
                        return  # unacknowledged, so their senders still have them
            if group:
                with self._condition:
                    self._waiting_bytes -= sum(len(waiting.entry.payload) for waiting in group)
                    self._waiting_entries -= len(group)
                self._durable([waiting.ticket for waiting in group])

    def _next_group(self) -> list[_Waiting[T]] | None:
        """Everything that waits, once something does; empty at first, so that the disk is tried at once."""
        with self._condition:
            if self._fd < 0:
                return []
            self._condition.wait_for(lambda: self._waiting or self._closing)
            group = list(self._waiting)
            self._waiting.clear()
            return group or None

    def _commit(self, group: Sequence[_Waiting[T]]) -> bool:
        try:
            # What was carried over does not count: it may be more than a small segment holds.
            if self._fd < 0 or self._size - self._carried_size >= self._segment_bytes:
                self._open_segment()
            written = self._write(group) if group else 0
            began = time.monotonic()
            os.fdatasync(self._fd)
            took = time.monotonic() - began
        except OSError as error:
            self._give_up_segment(error)
            return False
        with self._condition:
            self._size += written
            self._sizes[self._path] = self._size
            self._syncs += 1
            self._sync_s_total += took
            self._failure = ""
        self._on_sync(took)
        return True

    def _write(self, group: Sequence[_Waiting[T]]) -> int:
        parts: list[bytes] = []
        for waiting in group:
            entry = waiting.entry
            parts += (head_of(entry.kind, entry.t_ns, entry.payload), entry.payload)
        return write_all(self._fd, parts)

    def _give_up_segment(self, error: OSError) -> None:
        with self._condition:
            self._failure = f"journal {self.directory}: {error.strerror}"
        if self._fd < 0:
            return
        try:
            if self._size == self._carried_size:
                # Nothing was taken into it, and a disk that stays full must not fill up with such.
                self._path.unlink()
                with self._condition:
                    del self._sizes[self._path]
            else:
                os.ftruncate(self._fd, self._size)
        except OSError:
            pass  # recovery cuts a torn tail, and what it finds whole it takes once
        finally:
            os.close(self._fd)
            self._fd = -1

    def _open_segment(self) -> None:
        """Make a new segment, durable with its name, and drop the oldest beyond what is kept."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        # Whatever has the name: even what is no segment would keep a file from being made.
        taken = self.directory.glob("*.journal")
        last = max((int(path.stem) for path in taken if path.stem.isdigit()), default=0)
        path = self.directory / f"{last + 1:016d}.journal"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_APPEND, 0o600)
        try:
            now = time.time_ns()
            parts = [_MAGIC]
            for stream in self._carried():
                payload = msgspec.msgpack.encode(stream)
                parts += (head_of(EntryKind.CARRIED, now, payload), payload)
            size = write_all(fd, parts)
            os.fdatasync(fd)
            _sync_directory(self.directory)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        with self._condition:
            self._fd, self._path, self._size, self._carried_size = fd, path, size, size
            self._sizes[path] = size
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        for path in sorted(self._sizes)[:-1]:
            if sum(self._sizes.values()) <= self._keep_bytes:
                return
            path.unlink(missing_ok=True)
            with self._condition:
                del self._sizes[path]


class SegmentReader:
    """Iterates the sound entries of one segment; `sound_bytes` is where they end."""

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self.size = path.stat().st_size
        self.sound_bytes = 0

    def __iter__(self) -> Iterator[Entry]:
        with self.path.open("rb", buffering=1 << 20) as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return
            self.sound_bytes = len(_MAGIC)
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                length, crc, t_ns, kind = _HEAD.unpack(head)
                if length > min(ENTRY_MAX, self.size - self.sound_bytes):
                    return
                payload = file.read(length)
                if len(payload) < length or zlib.crc32(payload, zlib.crc32(head[_CRC_FROM:])) != crc:
                    return
                try:
                    entry = Entry(EntryKind(kind), t_ns, payload)
                except ValueError:
                    return
                self.sound_bytes += _HEAD.size + length
                yield entry


def segments_in(directory: Path) -> list[Path]:
    """The segments of a journal, oldest first."""
    return sorted(path for path in directory.glob("*.journal") if path.stem.isdigit() and path.is_file())


def read_journal(directory: Path) -> Iterator[Entry]:
    """Every sound entry of a journal that nobody needs to be writing, oldest first; changes nothing."""
    for path in segments_in(directory):
        yield from SegmentReader(path)


def head_of(kind: EntryKind, t_ns: int, payload: bytes) -> bytes:
    """The head that goes before ``payload``."""
    unchecked = _HEAD.pack(len(payload), 0, t_ns, kind)
    crc = zlib.crc32(payload, zlib.crc32(unchecked[_CRC_FROM:]))
    return _HEAD.pack(len(payload), crc, t_ns, kind)


def write_all(fd: int, parts: Sequence[bytes]) -> int:
    """Write every byte of ``parts``; return how many. Raises OSError."""
    total = 0
    pending = deque(memoryview(part) for part in parts if part)
    while pending:
        batch = [pending[i] for i in range(min(len(pending), _IOV_MAX))]
        done = os.writev(fd, batch)
        total += done
        while pending and done >= len(pending[0]):
            done -= len(pending.popleft())
        if done:
            pending[0] = pending[0][done:]
    return total


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
