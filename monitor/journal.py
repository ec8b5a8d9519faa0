"""The journal's files: segments of entries, how they are written and how they are read back.

A segment begins with a magic that names its version, a salt and the time it began. An entry is a head (length,
checksum, time of arrival, kind), then the frame's bytes as they came. The checksum begins with the salt, so what a
sender put into a frame never looks like an entry of its own, and entries can be looked for behind damage. Segments
begin with what was carried over from the one before them: who streams, and how far each stream has come.
So any segment can be the oldest, and dropping old ones never makes the collector take a record twice.

Version 1, without salt and time, is read, too; there damage that hides where the next entry begins costs the rest
of its segment.
"""

import mmap
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from stagewatch.agents.errors import StagewatchError
from stagewatch.agents.identity import Identity

VERSION: Final = 2
_MAGIC: Final = b"STGWJRN"
_V1_SIZE: Final = 8
_HEADER: Final = struct.Struct("<8sQQ")
"""Magic and version, salt, nanoseconds since the epoch when it began."""
_HEAD: Final = struct.Struct("<IIQBxxx")
"""Length of the payload, CRC-32 of the salt and of what follows it, nanoseconds since the epoch, kind."""
_CRC_FROM: Final = 8
_KIND_AT: Final = 16
_KIND_AND_PADDING: Final = re.compile(rb"[\x01-\x03]\x00\x00\x00")
ENTRY_MAX: Final = 1 << 28
SEARCH_MAX: Final = 4
"""Times the segment's size that may be read to find the next entry behind damage, however hostile it is."""


class JournalError(StagewatchError):
    """A journal that cannot be opened, read or written."""


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


class Position(msgspec.Struct, frozen=True, order=True):
    """A place between two entries."""

    segment: int
    offset: int
    """Bytes from the segment's beginning."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry read back."""

    kind: EntryKind
    t_ns: int
    """The collector's clock at arrival, nanoseconds since the epoch."""
    payload: bytes


@dataclass(frozen=True, slots=True)
class Header:
    """How a segment begins."""

    version: int
    salt: int
    began_ns: int
    """0 in version 1, which does not say."""

    @property
    def size(self) -> int:
        """Bytes it takes."""
        return _V1_SIZE if self.version == 1 else _HEADER.size

    @property
    def seed(self) -> int:
        """Where the checksums of the segment's entries begin."""
        return 0 if self.version == 1 else zlib.crc32(self.salt.to_bytes(8, "little"))

    def encode(self) -> bytes:
        """The bytes of a header of this build's version."""
        return _HEADER.pack(_MAGIC + b"%d" % VERSION, self.salt, self.began_ns)


def read_header(path: Path) -> Header | None:
    """A segment's header; None where it has none. Raises JournalError for a version this build does not know."""
    with path.open("rb") as file:
        return _header_of(path, file.read(_HEADER.size))


def _header_of(path: Path, data: bytes) -> Header | None:
    if data[:7] != _MAGIC or not data[7:8].isdigit():
        return None
    version = int(data[7:8])
    if version > VERSION:
        raise JournalError(
            f"journal segment {path.name}: version {version}, this build reads 1 to {VERSION}: upgrade stagewatch"
        )
    if version == 1:
        return Header(1, 0, 0)
    return Header(*(version, *_HEADER.unpack(data)[1:])) if len(data) == _HEADER.size else None


class SegmentReader:
    """Iterates the sound entries of one segment from ``start`` on. Raises JournalError for a newer version.

    What cannot be read is stepped over: `damaged_bytes` counts it, a torn tail included, and `end` is where the last
    sound entry ends.
    """

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path: Final = path
        self.size = path.stat().st_size
        self.end = min(start, self.size)
        self.sound_bytes = self.end
        """Bytes of what was read, of the header, and of what lies before ``start``."""
        self._start = self.end
        self._search_bytes = SEARCH_MAX * self.size

    @property
    def damaged_bytes(self) -> int:
        """Bytes that hold nothing readable; once iterated."""
        return self.size - self.sound_bytes

    def __iter__(self) -> Iterator[Entry]:
        with self.path.open("rb", buffering=1 << 20) as file:
            header = _header_of(self.path, file.read(_HEADER.size))
            if header is None:
                return
            if not self._start:
                self.sound_bytes = self.end = header.size
            at = self.end
            file.seek(at)
            while at < self.size:
                found = self._entry_at(file, header.seed)
                if found is None:
                    following = self._behind_damage(file, at, header)
                    if following is None:
                        return
                    at = following
                    file.seek(at)
                    continue
                at += _HEAD.size + len(found.payload)
                self.sound_bytes += _HEAD.size + len(found.payload)
                self.end = at
                yield found

    def _entry_at(self, file: BinaryIO, seed: int) -> Entry | None:
        """The entry that begins where the file stands; None if none does."""
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        length, crc, t_ns, kind = _HEAD.unpack(head)
        if length > min(ENTRY_MAX, self.size - file.tell()):
            return None
        payload = file.read(length)
        if len(payload) < length or zlib.crc32(payload, zlib.crc32(head[_CRC_FROM:], seed)) != crc:
            return None
        try:
            return Entry(EntryKind(kind), t_ns, payload)
        except ValueError:
            return None

    def _behind_damage(self, file: BinaryIO, at: int, header: Header) -> int | None:
        """Where the next sound entry begins behind the damaged one at ``at``."""
        for candidate in self._candidates(file, at, header):
            file.seek(candidate)
            self._search_bytes -= min(_length_at(file, candidate), self.size - candidate)
            if self._search_bytes < 0:
                return None
            if self._entry_at(file, header.seed) is not None:
                return candidate
        return None

    def _candidates(self, file: BinaryIO, at: int, header: Header) -> Iterator[int]:
        """Where an entry may begin: first where the damaged one says it ends."""
        announced = at + _HEAD.size + _length_at(file, at)
        if announced < self.size:
            yield announced
        if header.version == 1:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for found in _KIND_AND_PADDING.finditer(data, at + 1 + _KIND_AT):
                place = found.start() - _KIND_AT
                if int.from_bytes(data[place : place + 4], "little") <= self.size - place - _HEAD.size:
                    yield place


def _length_at(file: BinaryIO, at: int) -> int:
    """The length that an entry at ``at`` would announce; leaves the file standing there."""
    file.seek(at)
    length = int.from_bytes(file.read(4), "little")
    file.seek(at)
    return length


def number_of(path: Path) -> int:
    """A segment's number."""
    return int(path.stem)


def segments_in(directory: Path) -> list[Path]:
    """The segments of a journal, oldest first; a file stands for itself."""
    if directory.is_file():
        return [directory]
    return sorted(path for path in directory.glob("*.journal") if path.stem.isdigit() and path.is_file())


def read_journal(directory: Path) -> Iterator[Entry]:
    """Every sound entry of a journal that nobody needs to be writing, oldest first; changes nothing."""
    for path in segments_in(directory):
        yield from SegmentReader(path)


def head_of(kind: EntryKind, t_ns: int, payload: bytes, seed: int = 0) -> bytes:
    """The head that goes before ``payload`` in a segment whose checksums begin with ``seed``."""
    unchecked = _HEAD.pack(len(payload), 0, t_ns, kind)
    crc = zlib.crc32(payload, zlib.crc32(unchecked[_CRC_FROM:], seed))
    return _HEAD.pack(len(payload), crc, t_ns, kind)
