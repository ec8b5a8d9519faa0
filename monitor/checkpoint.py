"""Checkpoints: where the watch stood, in a file beside the journal, so that a restart reads back only what came since.

A checkpoint is never needed, only faster: where it is missing, damaged, of another build or of another journal, the
whole journal is read back instead. Every engine is saved with the positions its own streams had at that moment, and
what the journal repeats of them is known and left out; so engines may be saved one by one, with time for others in
between, and a checkpoint and the journal behind it never count anything twice.
"""

import contextlib
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from stagewatch.agents.errors import StagewatchError
from stagewatch.agents.identity import Identity, Rank
from stagewatch.monitor.incidents import Incident
from stagewatch.monitor.journal import Position
from stagewatch.monitor.shelf import sync_directory

_MAGIC: Final = b"STGWCHK2"
_HEAD: Final = struct.Struct("<QIxxxx")
"""Before each piece: its length and its CRC-32."""


class CheckpointError(StagewatchError):
    """A checkpoint that is none of this build."""


class SavedStream(msgspec.Struct, frozen=True):
    """One rank's stream."""

    identity: Identity
    next_seq: int
    heard_ns: int
    unheard: int


class SavedEngine(msgspec.Struct, frozen=True):
    """One engine of the watch, and its ranks' streams at the same moment."""

    instance: str
    dp: int
    streams: list[SavedStream]
    frozen: bytes


class SavedPark(msgspec.Struct, frozen=True):
    """A stream that made room."""

    instance: str
    rank: Rank
    started_ns: int
    next_seq: int


class Opening(msgspec.Struct, frozen=True):
    """How a checkpoint begins."""

    build: str
    position: Position
    """Everything that the journal holds before it is in the checkpoint."""
    salt: int
    """Of the position's segment: tells this journal from another."""


class Closing(msgspec.Struct, frozen=True):
    """How it ends, after its engines."""

    now_ns: int
    streams: list[SavedStream]
    """Those of engines that are no longer watched."""
    parked: list[SavedPark]
    unstored: list[Incident]
    """Found, and not yet in the store."""


class Writer:
    """Writes a checkpoint piece by piece beside the one before, and takes its place at last. Raises OSError.

    Only one piece need be in memory at a time: an engine may take a hundred megabytes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fresh = path.with_name(path.name + ".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file: Final = os.fdopen(os.open(self._fresh, flags, 0o600), "wb")
        self._file.write(_MAGIC)

    def add(self, piece: Opening | SavedEngine | Closing) -> None:
        """Write the next piece."""
        payload = msgspec.msgpack.encode(piece)
        self._file.write(_HEAD.pack(len(payload), zlib.crc32(payload)))
        self._file.write(payload)

    def finish(self) -> None:
        """Make it durable, and the checkpoint."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._fresh.replace(self._path)
        sync_directory(self._path.parent)

    def give_up(self) -> None:
        """Leave the checkpoint before in place; a disk that is full needs the room more than half a new one."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._fresh.unlink(missing_ok=True)


P = TypeVar("P", Opening, SavedEngine, Closing)


class Reader:
    """Reads a checkpoint piece by piece. Raises CheckpointError for what cannot be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: Final = path.open("rb")
            self._left = os.fstat(self._file.fileno()).st_size - len(_MAGIC)
            if self._file.read(len(_MAGIC)) != _MAGIC:
                raise CheckpointError(f"checkpoint {path.name} is none")
        except OSError as error:
            raise CheckpointError(f"checkpoint {path.name} cannot be read: {error.strerror}") from None

    def opening(self) -> Opening:
        """The first piece."""
        return self._decode(self._next(), Opening)

    def engines(self) -> Iterator[SavedEngine]:
        """Each engine; once."""
        while (payload := self._next()) and self._left:
            yield self._decode(payload, SavedEngine)
        self._last = payload

    def closing(self) -> Closing:
        """The last piece, after the engines."""
        return self._decode(self._last, Closing)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _next(self) -> bytes:
        head = self._file.read(_HEAD.size)
        length, crc = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
        self._left -= _HEAD.size + length
        if self._left < 0 or not length:
            raise CheckpointError(f"checkpoint {self._path.name} is cut off")
        payload = self._file.read(length)
        if zlib.crc32(payload) != crc:
            raise CheckpointError(f"checkpoint {self._path.name} is damaged")
        return payload

    def _decode(self, payload: bytes, kind: type[P]) -> P:
        try:
            return msgspec.msgpack.decode(payload, type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise CheckpointError(f"checkpoint {self._path.name} is of another build") from None
