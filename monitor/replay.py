"""Replay: recorded evidence through the same watch as live evidence, with time passing as it did.

Sources are read side by side, always the one that is furthest behind, so that memory holds little more than one
batch per rank however long the recording is. Records say when they were made: the watch is told of it, and ticks
as the collector does, so that what only time can tell (stalls, silence) is found again. Recorded traces say nothing
of time; there only the order of steps counts.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import msgspec
import numpy as np

from stagewatch.agents.errors import FrameError
from stagewatch.agents.evidence import Evidence
from stagewatch.agents.identity import Identity, Rank
from stagewatch.agents.wire import Hello, Limits, decode_upward, evidence_of
from stagewatch.monitor.journal import Carried, Entry, EntryKind, SegmentReader, segments_in
from stagewatch.monitor.pieces import SECOND_NS, by_second, step_times
from stagewatch.monitor.redaction import without_tokens
from stagewatch.monitor.sources import Recordings, RingSource, Source, SourceError, open_recordings
from stagewatch.monitor.ticks import Ticks
from stagewatch.monitor.watch import Watch

__all__ = ["Missing", "Recordings", "RingSource", "SourceError", "Tap", "open_recordings", "replay"]

_LIMITS: Final = Limits()


class Tap(Protocol):
    """Something else that looks at what is replayed, rank by rank in the order recorded."""

    def see(self, identity: Identity, evidence: Evidence) -> None:
        """One batch of a rank."""
        ...


class Progress(Protocol):
    """Somebody who wants to know how far a replay has come."""

    def at(self, done_bytes: int, total_bytes: int) -> None:
        """So much of so much was read."""
        ...


class _Unwatched:
    """Nobody's progress."""

    def at(self, done_bytes: int, total_bytes: int) -> None:
        """Say nothing."""


@dataclass(frozen=True, slots=True)
class Missing:
    """What of a journal could not be replayed."""

    damaged_bytes: int
    unreadable_entries: int


def replay(
    recordings: Recordings,
    watch: Watch | None,
    *,
    taps: Sequence[Tap] = (),
    progress: Progress | None = None,
    tokens: bool = True,
) -> Missing:
    """Feed everything to ``watch``, where one is given, and to the taps; say that the evidence has ended.

    ``tokens``: with the token values that a recording holds; else digests alone, as if it held none.
    """
    told = progress or _Unwatched()
    sources = recordings.sources
    segments = [path for directory in recordings.journals for path in segments_in(directory)]
    total = sum(source.size_bytes for source in sources) + sum(path.stat().st_size for path in segments)
    stage = _Stage(watch, taps, tokens)
    for _ in _merged(sources, stage):
        told.at(sum(source.bytes_read for source in sources), total)
    missing, done = [], sum(source.size_bytes for source in sources)
    for directory in recordings.journals:
        journal = _JournalReplay(_Stage(watch, taps, tokens))
        for read in journal.run(directory):
            told.at(done + read, total)
        missing.append(journal.missing)
    if watch is not None:
        watch.finish()
    told.at(total, total)
    return Missing(sum(m.damaged_bytes for m in missing), sum(m.unreadable_entries for m in missing))


class _Stage:
    """Where evidence goes: the watch, told the time, and the taps."""

    def __init__(self, watch: Watch | None, taps: Sequence[Tap], tokens: bool) -> None:
        self._watch = watch
        self._tokens = tokens
        self._taps = taps
        self._ticks = Ticks()
        self._now_ns = 0

    def hello(self, identity: Identity, t_ns: int) -> None:
        if self._watch is not None:
            self._pass(t_ns)
            self._watch.hello(identity, self._now_ns)

    def take(self, identity: Identity, evidence: Evidence, t_ns: int) -> None:
        if not self._tokens:
            evidence = without_tokens(evidence)
        if self._watch is not None:
            self._pass(t_ns)
            self._watch.take(identity.instance, identity.rank, evidence, -1.0, self._now_ns)
        for tap in self._taps:
            tap.see(identity, evidence)

    def _pass(self, t_ns: int) -> None:
        """Let time pass; it never goes back, whatever a clock said."""
        self._now_ns = max(self._now_ns, t_ns)
        if self._watch is not None and self._ticks.is_due(self._now_ns):
            self._watch.tick(self._now_ns // SECOND_NS * SECOND_NS)


def _merged(sources: Sequence[Source], stage: _Stage) -> Iterator[None]:
    """Hand over all that the sources hold, the one furthest behind first; yields after each piece."""
    offsets = _clock_offsets(sources)
    streams = [_timed(source, offset) for source, offset in zip(sources, offsets, strict=True)]
    greeted = [False] * len(sources)
    ahead = [next(stream, None) for stream in streams]
    for place, source in enumerate(sources):
        if ahead[place] is None:
            stage.hello(source.identity, 0)  # it has nothing to say, and is missing all the same
    # (second, newest step delivered, place): heap order is the order of reading
    queue = [(found[0] // SECOND_NS, 0, place) for place, found in enumerate(ahead) if found is not None]
    heapq.heapify(queue)
    if queue and queue[0][0] == 0:
        _greet(sources, greeted, stage)
    while queue:
        _, newest, place = heapq.heappop(queue)
        found, source = ahead[place], sources[place]
        if found is None:
            continue
        t_ns, evidence = found
        if not greeted[place]:
            greeted[place] = True
            stage.hello(source.identity, t_ns)
        stage.take(source.identity, evidence, t_ns)
        if evidence.inputs is not None and len(evidence.inputs.step):
            newest = int(evidence.inputs.step[-1])
        ahead[place] = following = next(streams[place], None)
        if following is not None:
            heapq.heappush(queue, (following[0] // SECOND_NS, newest, place))
        yield


def _greet(sources: Sequence[Source], greeted: list[bool], stage: _Stage) -> None:
    """Recordings without times: nobody is late, so everybody is expected from the start."""
    for place, source in enumerate(sources):
        if not greeted[place]:
            greeted[place] = True
            stage.hello(source.identity, 0)


def _timed(source: Source, offset_ns: int) -> Iterator[tuple[int, Evidence]]:
    """The source's evidence second by second, by the clock of the first source's host."""
    newest = 0
    for evidence in source.evidence():
        for t_ns, piece in by_second(evidence):
            newest = max(newest, t_ns - offset_ns if t_ns else 0)
            yield newest, piece


def _clock_offsets(sources: Sequence[Source]) -> list[int]:
    """How far each source's host is ahead of its engine's first source, in nanoseconds.

    All ranks run a step at about the same time, so the steps that two of them share tell how far their clocks are
    apart. Ranks of one host share its clock.
    """
    offsets = [0] * len(sources)
    by_engine: dict[str, list[int]] = {}
    for place, source in enumerate(sources):
        by_engine.setdefault(source.identity.instance, []).append(place)
    for places in by_engine.values():
        by_host: dict[str, int] = {}
        for place in places:
            by_host.setdefault(sources[place].identity.host, place)
        if len(by_host) < 2:
            continue
        reference, *others = by_host.values()
        known = _first_steps(sources[reference])
        for other in others:
            steps, mine, theirs = np.intersect1d(
                known[0], (found := _first_steps(sources[other]))[0], return_indices=True
            )
            if not len(steps):
                continue
            apart = int(np.median(found[1][theirs] - known[1][mine]))
            for place in places:
                if sources[place].identity.host == sources[other].identity.host:
                    offsets[place] = apart
    return offsets


def _first_steps(source: Source) -> tuple[np.ndarray, np.ndarray]:
    for evidence in source.evidence():
        steps, times = step_times(evidence)
        if len(steps):
            return steps, times
    return np.zeros(0, np.int64), np.zeros(0, np.int64)


@dataclass(slots=True)
class _Position:
    """How far one rank's stream has come."""

    identity: Identity
    next_seq: int
    unheard: int = 0
    """Records that the journal once held: lost, as the next evidence will say."""


class _JournalReplay:
    """A journal in the order of arrival, as the collector itself took it."""

    def __init__(self, stage: _Stage) -> None:
        self.missing = Missing(0, 0)
        self._stage = stage
        self._known: dict[tuple[str, Rank], _Position] = {}

    def run(self, directory: Path) -> Iterator[int]:
        """Replay all that is sound; yields bytes read so far."""
        damaged = unreadable = before = 0
        for path in segments_in(directory):
            reader = SegmentReader(path)
            for entry in reader:
                try:
                    self._take(entry)
                except (FrameError, msgspec.MsgspecError):
                    unreadable += 1
                yield before + reader.sound_bytes
            damaged += reader.size - reader.sound_bytes
            before += reader.size
        self.missing = Missing(damaged, unreadable)

    def _take(self, entry: Entry) -> None:
        if entry.kind is EntryKind.CARRIED:
            carried = msgspec.msgpack.decode(entry.payload, type=Carried)
            self._hello(carried.identity, carried.next_seq, entry.t_ns)
            return
        frame = decode_upward(entry.payload, _LIMITS)
        if isinstance(frame, Hello):
            self._hello(frame.identity, 0, entry.t_ns)
            return
        position = self._known.get((frame.instance, frame.rank))
        if position is None:
            raise FrameError("a batch of a rank that never said hello")
        if frame.next_seq <= position.next_seq:
            return
        evidence = evidence_of(frame, _LIMITS)
        lost = max(frame.first_seq - position.next_seq, 0) + position.unheard
        position.next_seq, position.unheard = frame.next_seq, 0
        if lost != evidence.lost:
            evidence = replace(evidence, lost=lost)
        self._stage.take(position.identity, evidence, entry.t_ns)

    def _hello(self, identity: Identity, next_seq: int, t_ns: int) -> None:
        key = (identity.instance, identity.rank)
        position = self._known.get(key)
        # Each segment begins with who streams: that is news only where the segment before it is gone.
        is_news = position is None or position.identity != identity
        position = position or self._known.setdefault(key, _Position(identity, next_seq))
        position.identity = identity
        position.unheard += max(next_seq - position.next_seq, 0)
        position.next_seq = max(next_seq, position.next_seq)
        if is_news:
            self._stage.hello(identity, t_ns)
