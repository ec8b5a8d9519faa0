"""The shelf: the journal's segments as files, oldest first; the newest is the one being written."""

import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stagewatch.monitor.journal import Header, JournalError, Position, number_of, read_header, segments_in
from stagewatch.monitor.retention import Policy, Segment, Span, surplus

log = logging.getLogger("stagewatch.collector")

_IOV_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class Figures:
    """What lies on the shelf."""

    kept_bytes: int
    segments: int
    pinned_bytes: int
    pinned_dropped: int
    """Segments of pinned evidence that had to go."""


class Shelf:
    """Segments of one directory. Written by one thread; `figures` may be read by any. Raises JournalError."""

    def __init__(self, directory: Path, policy: Policy) -> None:
        self._directory = directory
        self._policy = policy
        self._lock = threading.Lock()
        self._pinned_bytes = 0
        self._pinned_dropped = 0
        self._salts: dict[int, int] = {}
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._segments = self._found(segments_in(directory))
        except OSError as error:
            raise JournalError(f"journal {directory} cannot be used: {error.strerror}") from None

    def _found(self, paths: Sequence[Path]) -> list[Segment]:
        found: list[Segment] = []
        for path in paths:
            header, status = read_header(path), path.stat()
            began = header.began_ns if header is not None else 0
            began = began or (found[-1].ended_ns if found else status.st_mtime_ns)
            if found:
                # A file's own time is another clock's; the next one's beginning is the collector's.
                found[-1].ended_ns = max(began, found[-1].began_ns)
            found.append(Segment(path, status.st_size, began, max(began, status.st_mtime_ns)))
            if header is not None:
                self._salts[number_of(path)] = header.salt
        return found

    @property
    def paths(self) -> list[Path]:
        """The files, oldest first."""
        return [segment.path for segment in self._segments]

    @property
    def end(self) -> Position | None:
        """The end of the newest segment; None where there is none."""
        return Position(self.newest_number, self._segments[-1].size) if self._segments else None

    @property
    def newest_number(self) -> int:
        """Number of the segment being written."""
        return number_of(self._segments[-1].path)

    @property
    def newest_began_ns(self) -> int:
        """When it began."""
        return self._segments[-1].began_ns

    @property
    def figures(self) -> Figures:
        """What lies here now."""
        with self._lock:
            return Figures(
                sum(segment.size for segment in self._segments),
                len(self._segments),
                self._pinned_bytes,
                self._pinned_dropped,
            )

    def salt_of(self, number: int) -> int | None:
        """The salt of a segment; None if there is none of that number, or it has no header."""
        return self._salts.get(number)

    def resize(self, path: Path, size: int) -> None:
        """A segment was cut."""
        for segment in self._segments:
            if segment.path == path:
                segment.size = size

    def grown(self, size: int, t_ns: int) -> None:
        """The newest segment is ``size`` bytes long, its last entry of time ``t_ns`` (0: none was added)."""
        newest = self._segments[-1]
        with self._lock:
            newest.size = size
        newest.ended_ns = max(newest.ended_ns, t_ns)

    def begin(self, header: Header, parts: Sequence[bytes]) -> tuple[int, int]:
        """Make a new segment that begins with ``parts``; return its descriptor and size. Raises OSError."""
        # Whatever has the name: even what is no segment would keep a file from being made.
        taken = self._directory.glob("*.journal")
        last = max((int(path.stem) for path in taken if path.stem.isdigit()), default=0)
        path = self._directory / f"{last + 1:016d}.journal"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_APPEND, 0o600)
        try:
            size = write_all(fd, parts)
            os.fdatasync(fd)
            sync_directory(self._directory)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        self._salts[last + 1] = header.salt
        with self._lock:
            self._segments.append(Segment(path, size, header.began_ns, header.began_ns))
        return fd, size

    def remove_newest(self) -> None:
        """Remove the segment being written. Raises OSError."""
        self._remove(self._segments[-1])

    def drop_surplus(self, pins: Sequence[Span], now_ns: int) -> None:
        """Remove what is beyond what is kept. Raises OSError."""
        found = surplus(self._segments, self._policy, pins, now_ns)
        for segment in found.unpinned:
            self._remove(segment)
        for segment in found.pinned:
            self._remove(segment)
            with self._lock:
                self._pinned_dropped += 1
        with self._lock:
            self._pinned_bytes = found.pinned_bytes
        if found.pinned:
            log.warning(
                "journal: %d bytes of incidents' evidence exceed --pin-bytes %d and were removed, oldest first",
                sum(segment.size for segment in found.pinned),
                self._policy.pin_bytes,
            )

    def _remove(self, segment: Segment) -> None:
        segment.path.unlink(missing_ok=True)
        with self._lock:
            self._segments.remove(segment)
        self._salts.pop(number_of(segment.path), None)


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


def sync_directory(directory: Path) -> None:
    """Make the names of a directory durable. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
