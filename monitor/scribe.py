"""The scribe: writes the journal, on a thread of its own, and says what is safe.

It takes every entry that waits, writes them together and syncs once: the group commit. Entries become durable in
the order they were offered. Where the disk fails, nothing is reported durable; the segment is cut back to its last
durable byte, and the same entries go to a fresh segment until one takes them (a failed sync says nothing about what
a second sync of the same file would mean). While nothing comes it ends segments that are old, and drops those beyond
what is kept.
"""

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec

from stagewatch.agents.errors import StagewatchError, one_line
from stagewatch.monitor.journal import (
    VERSION,
    Carried,
    Entry,
    EntryKind,
    Header,
    Position,
    SegmentReader,
    head_of,
    number_of,
)
from stagewatch.monitor.retention import Policy, Span
from stagewatch.monitor.shelf import Shelf, write_all

log = logging.getLogger("stagewatch.collector")

RETRY_S: Final = 1.0
IDLE_S: Final = 5.0
"""How often ages are looked at while nothing comes."""


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
    """Bytes found unreadable at the last recovery, the torn tail included."""
    torn_bytes: int = 0
    """Bytes that the last recovery cut off at the end."""
    pinned_bytes: int = 0
    """Bytes of segments kept only because they hold an incident's evidence."""
    pinned_dropped: int = 0
    """Such segments that had to go all the same."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[T]):
    entry: Entry
    ticket: T


class Scribe(Generic[T]):
    """Writes the journal of one directory. Raises JournalError where that cannot be used.

    On its thread, ``durable`` is given the tickets of each group that became safe, in the order offered, and the
    position behind them; ``carried`` is asked for the streams to carry into a new segment, and ``pins`` for the times
    whose evidence is to be kept. ``now_ns`` may be asked from any thread.
    """

    def __init__(
        self,
        directory: Path,
        policy: Policy,
        *,
        durable: Callable[[Sequence[T], Position], None],
        carried: Callable[[], Sequence[Carried]],
        pins: Callable[[], Sequence[Span]] = tuple,
        on_sync: Callable[[float], None] = lambda seconds: None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.directory: Final = directory
        self._policy = policy
        self._durable = durable
        self._carried = carried
        self._pins = pins
        self._on_sync = on_sync
        self._now_ns = now_ns
        self._condition = threading.Condition()
        self._waiting: deque[_Waiting[T]] = deque()
        self._waiting_bytes = 0
        self._waiting_entries = 0
        self._closing = False
        self._failure = ""
        self._syncs = 0
        self._sync_s_total = 0.0
        self.damaged_bytes = 0
        self.torn_bytes = 0
        self._shelf = Shelf(directory, policy)
        self._fd = -1
        self._seed = 0
        self._size = 0
        self._fresh_size = 0
        """Bytes with which the present segment began."""
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    def recover(self, start: Position | None = None) -> Iterator[Entry]:
        """Every sound entry from ``start`` on, oldest first, before the thread starts. Cuts off a torn tail.

        Damage elsewhere costs the entries it hit. `damaged_bytes` and `torn_bytes` say how much.
        """
        paths = self._shelf.paths
        for path in paths:
            if start is not None and number_of(path) < start.segment:
                continue
            is_first = start is not None and number_of(path) == start.segment
            reader = SegmentReader(path, start.offset if start is not None and is_first else 0)
            yield from reader
            self.damaged_bytes += reader.damaged_bytes
            if path == paths[-1] and reader.end < reader.size:
                self.torn_bytes = reader.size - reader.end
                os.truncate(path, reader.end)
                self._shelf.resize(path, reader.end)

    def salt_at(self, position: Position) -> int | None:
        """The salt of the segment a position lies in, which tells it from another journal's; None if it is gone."""
        return self._shelf.salt_of(position.segment)

    @property
    def end(self) -> Position | None:
        """Where the journal ends before the thread starts; None where there is none."""
        return self._shelf.end

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
        shelf = self._shelf.figures
        with self._condition:
            return Health(
                shelf.kept_bytes,
                shelf.segments,
                self._waiting_bytes,
                self._failure,
                self._syncs,
                self._sync_s_total,
                self.damaged_bytes,
                self.torn_bytes,
                shelf.pinned_bytes,
                shelf.pinned_dropped,
            )

    def close(self) -> None:
        """Make durable what waits, if the disk lets us, and stop."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._close_file()

    # ---- on the thread

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
                self._durable([waiting.ticket for waiting in group], self._position)

    @property
    def _position(self) -> Position:
        return Position(self._shelf.newest_number, self._size)

    def _next_group(self) -> list[_Waiting[T]] | None:
        """Everything that waits, once something does; empty at first and once in a while, so that ages are seen."""
        with self._condition:
            if self._fd < 0:
                return []
            self._condition.wait_for(lambda: self._waiting or self._closing, IDLE_S)
            group = list(self._waiting)
            self._waiting.clear()
            return None if self._closing and not group else group

    def _commit(self, group: Sequence[_Waiting[T]]) -> bool:
        try:
            if self._fd < 0 or self._is_complete():
                self._open_segment()
            if not group and self._syncs and not self._failure:
                self._drop_surplus()
                return True
            written = self._write(group) if group else 0
            began = time.monotonic()
            os.fdatasync(self._fd)
            took = time.monotonic() - began
        except OSError as error:
            self._give_up_segment(error)
            return False
        self._size += written
        self._shelf.grown(self._size, group[-1].entry.t_ns if group else 0)
        with self._condition:
            self._syncs += 1
            self._sync_s_total += took
            self._failure = ""
        self._on_sync(took)
        return True

    def _is_complete(self) -> bool:
        # What was carried over does not count: it may be more than a small segment holds.
        if self._size <= self._fresh_size:
            return False
        if self._size - self._fresh_size >= self._policy.segment_bytes:
            return True
        return self._now_ns() - self._shelf.newest_began_ns > self._policy.segment_s * 1e9

    def _write(self, group: Sequence[_Waiting[T]]) -> int:
        parts: list[bytes] = []
        for waiting in group:
            entry = waiting.entry
            parts += (head_of(entry.kind, entry.t_ns, entry.payload, self._seed), entry.payload)
        return write_all(self._fd, parts)

    def _give_up_segment(self, error: OSError) -> None:
        with self._condition:
            self._failure = f"journal {self.directory}: {error.strerror}"
        if self._fd >= 0:
            try:
                if self._size == self._fresh_size:
                    # Nothing was taken into it, and a disk that stays full must not fill up with such.
                    self._shelf.remove_newest()
                else:
                    os.ftruncate(self._fd, self._size)
            except OSError:
                pass  # recovery cuts a torn tail, and what it finds whole it takes once
            self._close_file()
        self._drop_surplus()

    def _open_segment(self) -> None:
        """Begin a new segment, durable with its name, and drop what is beyond what is kept."""
        self._close_file()
        now = self._now_ns()
        header = Header(VERSION, secrets.randbits(64), now)
        parts = [header.encode()]
        for stream in self._carried():
            payload = msgspec.msgpack.encode(stream)
            parts += (head_of(EntryKind.CARRIED, now, payload, header.seed), payload)
        self._fd, self._size = self._shelf.begin(header, parts)
        self._seed, self._fresh_size = header.seed, self._size
        self._drop_surplus()

    def _drop_surplus(self) -> None:
        try:
            self._shelf.drop_surplus(self._pins(), self._now_ns())
        except (OSError, StagewatchError) as error:
            log.warning("journal %s: old segments cannot be removed: %s", self.directory, one_line(error))

    def _close_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
