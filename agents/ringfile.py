"""The file under a ring: its header, how it is made, and what of a file is believed before a byte of it is read."""

import contextlib
import fcntl
import mmap
import os
import stat
import struct
from pathlib import Path
from typing import Final

import msgspec

from stagewatch.agents import record
from stagewatch.agents.errors import RingError
from stagewatch.agents.identity import Identity

HEADER_SIZE: Final = 8192
CAPACITY_MIN: Final = 1 << 16
CAPACITY_MAX: Final = 1 << 32
MAGIC: Final = b"STGWATCH"
# magic, schema, header size, capacity, identity bytes
FIXED: Final = struct.Struct("<8sIIQI")
CURSORS: Final = slice(64, 96)
TAIL, HEAD, WRITTEN, CLOSED = range(4)
"""Words of the cursors: the oldest position present, the end, the records written, and 1 once complete."""
IDENTITY_AT: Final = 128


def checked_identity(name: str, buffer: memoryview) -> Identity:
    """Identity in the header of the ring called ``name``; RingError where the header is not a ring's."""
    if len(buffer) < HEADER_SIZE:
        raise RingError(f"ring {name}: {len(buffer)} bytes is shorter than a header: not a ring, or cut off")
    magic, schema, header_size, capacity, identity_size = FIXED.unpack_from(buffer)
    if magic != MAGIC:
        raise RingError(f"ring {name}: not a stagewatch ring, or its engine is still making it")
    if schema != record.SCHEMA:
        side = "the sidecar" if schema > record.SCHEMA else "the engine's stagewatch"
        raise RingError(f"ring {name}: schema {schema}, this build reads {record.SCHEMA}: upgrade {side}")
    if header_size != HEADER_SIZE or len(buffer) != HEADER_SIZE + capacity:
        raise RingError(f"ring {name}: {len(buffer)} bytes do not match its header: cut off")
    if not CAPACITY_MIN <= capacity <= CAPACITY_MAX or capacity % 8:
        raise RingError(f"ring {name}: capacity of {capacity} bytes: damaged header, remove the file")
    if identity_size > HEADER_SIZE - IDENTITY_AT:
        raise RingError(f"ring {name}: identity of {identity_size} bytes: damaged header, remove the file")
    try:
        encoded = bytes(buffer[IDENTITY_AT : IDENTITY_AT + identity_size])
        return msgspec.json.decode(encoded, type=Identity)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RingError(f"ring {name}: damaged identity, remove the file: {error}") from None


def is_held(path: Path) -> bool | None:
    """Whether the engine that writes the ring at ``path`` lives; None where the file system cannot tell.

    Raises RingError where the file cannot be opened.
    """
    fd = _open_read_only(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(fd)
    return False


def create(path: Path, size: int) -> int:
    """Make a file of ``size`` bytes that did not exist, locked as ours; its descriptor."""
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
    except OSError as error:
        raise _unmade(fd, path, size, error) from None
    with contextlib.suppress(OSError):  # a file system without locks: the process id has to do
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd


def map_new(fd: int, path: Path, size: int) -> mmap.mmap:
    """Map a file that `create` made, to be written; RingError, and no file left, where that fails."""
    try:
        # Populated, so that no step pays for the page faults of the first round.
        return mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as error:
        raise _unmade(fd, path, size, error) from None


def _unmade(fd: int, path: Path, size: int, error: OSError) -> RingError:
    path.unlink(missing_ok=True)
    os.close(fd)
    return RingError(f"ring {path.name}: {size} bytes cannot be had in {path.parent}: {error.strerror}")


def _open_read_only(path: Path) -> int:
    try:
        # Not blocking, for the case that somebody left a pipe there.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise RingError(f"ring {path.name} cannot be opened: {error.strerror}") from None


def open_map(path: Path) -> mmap.mmap:
    """Map an existing ring, to be read; RingError for a file that may not be one, or not ours."""
    fd = _open_read_only(path)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise RingError(f"ring {path.name}: not a regular file")
        if found.st_uid != os.geteuid() != 0:
            raise RingError(f"ring {path.name} belongs to uid {found.st_uid}: read it as that user")
        if found.st_mode & 0o022:
            raise RingError(f"ring {path.name} can be written by others: chmod 600 it")
        if found.st_size == 0:
            raise RingError(f"ring {path.name}: empty: not a ring, or its engine is still making it")
        if found.st_size > HEADER_SIZE + CAPACITY_MAX:
            raise RingError(f"ring {path.name}: {found.st_size} bytes is longer than any ring")
        return mmap.mmap(fd, found.st_size, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise RingError(f"ring {path.name} cannot be mapped: {error}") from None
    finally:
        os.close(fd)


def check_directory(directory: Path) -> None:
    """Make sure rings in ``directory`` are ours alone; create it, mode 0700, if it does not exist.

    Raises RingError if it belongs to somebody else, is a symbolic link, or can be written by others.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise RingError(f"ring directory {directory} is not a directory") from None
    except OSError as error:
        raise RingError(f"ring directory {directory} cannot be made: {error.strerror}") from None
    _check_existing(directory)


def check_room(directory: Path, size: int) -> None:
    """Make sure a ring of ``size`` bytes could be made in ``directory``, and make nothing.

    Raises RingError as `check_directory` would, and where the file system has less room than one ring takes.
    """
    place = directory.absolute()
    while not os.path.lexists(place):
        place = place.parent
    if place == directory.absolute():
        _check_existing(directory)
    elif not place.is_dir():
        raise RingError(f"ring directory {directory} cannot be made: {place} is not a directory")
    if not os.access(place, os.W_OK | os.X_OK):
        raise RingError(f"ring directory {directory} cannot be written: {place} is not ours to write to")
    found = os.statvfs(place)
    free = found.f_bavail * found.f_frsize
    if free < size:
        raise RingError(
            f"ring directory {directory} has {free >> 20} MiB left and each rank on the node takes "
            f"{-(-size >> 20)}: make room, or set STAGEWATCH_RING_BYTES"
        )


def _check_existing(directory: Path) -> None:
    try:
        found = directory.lstat()
    except OSError as error:
        raise RingError(f"ring directory {directory} cannot be read: {error.strerror}") from None
    if stat.S_ISLNK(found.st_mode):
        raise RingError(f"ring directory {directory} is a symbolic link: name the directory it points to")
    if not stat.S_ISDIR(found.st_mode):
        raise RingError(f"ring directory {directory} is not a directory")
    if found.st_uid != os.geteuid():
        raise RingError(
            f"ring directory {directory} belongs to uid {found.st_uid}, not to this process: choose another"
        )
    if found.st_mode & 0o022:
        raise RingError(f"ring directory {directory} can be written by others: chmod 700 it")
