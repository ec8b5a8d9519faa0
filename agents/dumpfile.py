"""The dump: what rings held, as one file that can be carried away and replayed anywhere.

A dump is a sequence of entries after eight magic bytes. An entry is a head (bytes stored, bytes unpacked, checksum,
kind, stream) and a frame of `stagewatch.agents.wire` packed by zlib, so a dump tells no more than a collector would
have been told. A stream is one rank: its hello comes before its batches. An end entry says that nothing was cut off.
Reading trusts nothing: sizes are limited before memory is taken, and a damaged entry costs what it held.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Final, Self

from stagewatch.agents import wire
from stagewatch.agents.errors import FrameError, StagewatchError
from stagewatch.agents.evidence import Evidence
from stagewatch.agents.identity import Identity, Rank
from stagewatch.agents.wire import Batch, Hello, Limits

MAGIC: Final = b"STGWDMP1"
SUFFIX: Final = ".swdump"
_HEAD: Final = struct.Struct("<IIIBxH")
"""Bytes stored, bytes unpacked, CRC-32 of what is stored, kind, stream."""
_HELLO, _BATCH, _END = 1, 2, 3
_LIMITS: Final = Limits()
_LEVEL: Final = 1
"""zlib's fastest: most of what is left after it are digests, which no level makes smaller."""
STREAMS_MAX: Final = 4096
"""Ranks in one dump."""

StreamKey = tuple[str, Rank]
_Entry = tuple[int, int, int, int]
"""Position, bytes stored, bytes unpacked, checksum."""


class DumpError(StagewatchError):
    """A dump that cannot be written, or a file that is none."""


class DumpWriter:
    """Writes one dump; it gets its name only once it is complete. Raises DumpError."""

    def __init__(self, path: Path, *, replace: bool = False) -> None:
        self.path: Final = path
        self.bytes_written = len(MAGIC)
        self._part: Final = path.with_name(f".{path.name}.{os.getpid()}.part")
        if path.exists() and not replace:
            raise DumpError(f"{path} exists: choose another --output, or give --force")
        try:
            fd = os.open(
                self._part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            self._file: Final[IO[bytes]] = os.fdopen(fd, "wb", 1 << 20)
            self._file.write(MAGIC)
        except OSError as error:
            raise DumpError(f"{path}: cannot be written: {error.strerror}") from None

    def write(self, entry: bytes) -> None:
        """Add an entry that `hello_entry` or `batch_entry` made."""
        try:
            self._file.write(entry)
        except OSError as error:
            raise DumpError(f"{self.path}: cannot be written: {error.strerror}") from None
        self.bytes_written += len(entry)

    def close(self) -> None:
        """Say that it is complete, and give it its name."""
        self.write(END_ENTRY)
        try:
            self._file.close()
            self._part.replace(self.path)
        except OSError as error:
            raise DumpError(f"{self.path}: cannot be written: {error.strerror}") from None

    def abandon(self) -> None:
        """Leave nothing behind. Does nothing once `close` was called."""
        self._file.close()
        self._part.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def _packed(kind: int, stream: int, frame: bytes) -> bytes:
    stored = zlib.compress(frame, _LEVEL)
    return _HEAD.pack(len(stored), len(frame), zlib.crc32(stored), kind, stream) + stored


def hello_entry(stream: int, identity: Identity) -> bytes:
    """The entry that begins a rank's stream; streams are numbered by whoever writes, below `STREAMS_MAX`."""
    return _packed(_HELLO, stream, wire.encode_frame(Hello(wire.PROTOCOL, identity)))


def batch_entry(stream: int, frame: bytes) -> bytes:
    """The entry of an encoded batch frame."""
    return _packed(_BATCH, stream, frame)


END_ENTRY: Final = _packed(_END, 0, b"")
"""The last entry of a dump that is complete."""


@dataclass(slots=True)
class Stream:
    """One rank's part of a dump."""

    identity: Identity
    entries: list[_Entry] = field(default_factory=list)
    """Its batches."""


class DumpFile:
    """A dump opened for reading. ``name`` is what errors call it; ``file`` is at any position and can seek.

    Raises DumpError where it is no dump of this build.
    """

    def __init__(self, file: IO[bytes], name: str) -> None:
        self.name: Final = name
        self.streams: Final[dict[StreamKey, Stream]] = {}
        self.cut_off_bytes = 0
        """Bytes at the end that hold no whole entry; of a complete dump, 0."""
        self.complete = False
        """Whether the dump says that it ends where it ends."""
        self.unreadable = 0
        """Entries of which nothing can be made: of another build, or damaged and whole."""
        self._file = file
        self.size_bytes: Final = file.seek(0, os.SEEK_END)
        self._index()

    @classmethod
    def open(cls, path: Path) -> "DumpFile":
        """The dump at ``path``."""
        try:
            return cls(path.open("rb"), str(path))
        except OSError as error:
            raise DumpError(f"{path}: cannot be read: {error.strerror}") from None

    def evidence(self, key: StreamKey) -> Iterator[Evidence]:
        """A rank's evidence in the order recorded. An entry that cannot be read is counted, and lost to it."""
        next_seq = 0
        for entry in self.streams[key].entries:
            try:
                frame = wire.decode_upward(self._unpacked(*entry), _LIMITS)
                if not isinstance(frame, Batch) or (frame.instance, frame.rank) != key:
                    raise FrameError("an entry of another stream")
                if frame.next_seq <= next_seq:
                    continue
                found = wire.evidence_of(frame, _LIMITS)
            except FrameError:
                self.unreadable += 1
                continue
            lost = max(frame.first_seq - next_seq, 0)
            next_seq = frame.next_seq
            yield found if found.lost == lost else replace(found, lost=lost)

    def _index(self) -> None:
        self._file.seek(0)
        if self._file.read(len(MAGIC)) != MAGIC:
            raise DumpError(f"{self.name}: not a dump of stagewatch-agent")
        position = len(MAGIC)
        known: dict[int, Stream] = {}
        while not self.complete:
            head = self._file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                break
            stored, size, crc, kind, number = _HEAD.unpack(head)
            if stored > self.size_bytes - position - _HEAD.size:
                break
            entry = (position + _HEAD.size, stored, size, crc)
            if kind == _END:
                self.complete = True
            elif kind == _BATCH and number in known:
                known[number].entries.append(entry)
            elif kind != _HELLO or number in known or not self._begin(known, number, entry):
                self.unreadable += 1
            position += _HEAD.size + stored
            self._file.seek(position)
        self.cut_off_bytes = self.size_bytes - position

    def _begin(self, known: dict[int, Stream], number: int, entry: _Entry) -> bool:
        """Begin a stream; whether its hello can be read and is of a rank that has none yet."""
        try:
            frame = wire.decode_upward(self._unpacked(*entry), _LIMITS)
        except FrameError:
            return False
        if not isinstance(frame, Hello) or len(known) >= STREAMS_MAX:
            return False
        key = (frame.identity.instance, frame.identity.rank)
        if key in self.streams:
            return False
        known[number] = self.streams[key] = Stream(frame.identity)
        return True

    def _unpacked(self, position: int, stored: int, size: int, crc: int) -> bytes:
        if size > _LIMITS.frame_bytes or stored > _LIMITS.frame_bytes + 4096:
            raise FrameError("an entry longer than any frame")
        self._file.seek(position)
        content = self._file.read(stored)
        if zlib.crc32(content) != crc:
            raise FrameError("an entry whose checksum does not match")
        unpacker = zlib.decompressobj()
        try:
            frame = unpacker.decompress(content, size + 1)
        except zlib.error as error:
            raise FrameError(f"an entry that cannot be unpacked: {error}") from None
        if len(frame) != size:
            raise FrameError("an entry that is not as long as it says")
        return frame
