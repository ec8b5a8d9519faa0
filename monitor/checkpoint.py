"""Checkpoints: where the watch stood, in a file beside the journal, so that a restart reads back only what came since.

A checkpoint is never needed, only faster: where it is missing, damaged, of another build or of another journal, the
whole journal is read back instead. Every engine is saved with the positions its own streams had at that moment, and
what the journal repeats of them is known and left out; so engines may be saved one by one, with time for others in
between, and a checkpoint and the journal behind it never count anything twice.
"""

import os
import struct
import zlib
from pathlib import Path
from typing import Final

import msgspec

from stagewatch.agents.errors import StagewatchError
from stagewatch.agents.identity import Identity, Rank
from stagewatch.monitor.incidents import Incident
from stagewatch.monitor.journal import Position
from stagewatch.monitor.shelf import sync_directory

_MAGIC: Final = b"STGWCHK1"
_HEAD: Final = struct.Struct("<8sIxxxx")
"""Magic, CRC-32 of the rest."""


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


class Checkpoint(msgspec.Struct, frozen=True):
    """Everything that reading the journal back up to ``position`` would have made."""

    build: str
    position: Position
    salt: int
    """Of the position's segment: tells this journal from another."""
    now_ns: int
    engines: list[SavedEngine]
    streams: list[SavedStream]
    """Those of engines that are no longer watched."""
    parked: list[SavedPark]
    unstored: list[Incident]
    """Found, and not yet in the store."""


def write(path: Path, checkpoint: Checkpoint) -> int:
    """Write a checkpoint in place of the one before, durably and all or nothing; return its size. Raises OSError."""
    payload = msgspec.msgpack.encode(checkpoint)
    fresh = path.with_name(path.name + ".new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(_HEAD.pack(_MAGIC, zlib.crc32(payload)))
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        # A disk that is full needs the room more than half a checkpoint.
        fresh.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return _HEAD.size + len(payload)


def read(path: Path, build: str) -> Checkpoint | None:
    """The checkpoint at ``path``; None if there is none. Raises CheckpointError for what cannot be used."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"checkpoint {path.name} cannot be read: {error.strerror}") from None
    if len(data) < _HEAD.size or data[:8] != _MAGIC:
        raise CheckpointError(f"checkpoint {path.name} is none")
    payload = memoryview(data)[_HEAD.size :]
    if zlib.crc32(payload) != _HEAD.unpack_from(data)[1]:
        raise CheckpointError(f"checkpoint {path.name} is damaged")
    try:
        found = msgspec.msgpack.decode(payload, type=Checkpoint)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise CheckpointError(f"checkpoint {path.name} is of another build") from None
    if found.build != build:
        raise CheckpointError(f"checkpoint {path.name} is of another build")
    return found
