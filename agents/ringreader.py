"""A reader's end of a ring. How the two ends get along is told in `stagewatch.agents.ring`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from stagewatch.agents import record
from stagewatch.agents.errors import RecordError, RingError
from stagewatch.agents.record import Record
from stagewatch.agents.ringfile import (
    CLOSED,
    CURSORS,
    HEAD,
    HEADER_SIZE,
    TAIL,
    WRITTEN,
    checked_identity,
    open_map,
)

_TRIES: Final = 1024
"""How often a reader starts over within one call before it leaves the rest for the next."""


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
        self._cursors = self._buffer[CURSORS].cast("Q")
        self._position = 0
        self._next_seq = 0
        self.lost = 0
        """Records that could not be read: overwritten before this reader came, overwritten before it got to
        them, or damaged. Records read and lost make up every number from 0 to the last one read."""

    @property
    def closed(self) -> bool:
        """Whether the writer has said that nothing more will come."""
        return self.is_whole and self._cursors[CLOSED] != 0

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

    @property
    def records_written(self) -> int:
        """Records published since the ring was made; 0 while its cursors contradict each other."""
        seen = self._snapshot()
        return 0 if seen is None else seen[2]

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
            if self._cursors[TAIL] > start:
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
            written, head, tail = self._cursors[WRITTEN], self._cursors[HEAD], self._cursors[TAIL]
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
