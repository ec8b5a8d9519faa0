"""Replay: recorded evidence through the same watch as live evidence.

Sources are read side by side, always the one that is furthest behind, so that memory holds little more
than one batch per rank however long the recording is.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import msgspec

from stagewatch.agents.digest import Digester
from stagewatch.agents.errors import FrameError, RingError, StagewatchError
from stagewatch.agents.evidence import Evidence, digest_records
from stagewatch.agents.identity import Identity, Rank
from stagewatch.agents.record import Record
from stagewatch.agents.ring import RingReader
from stagewatch.agents.wire import Hello, Limits, decode_upward, evidence_of
from stagewatch.monitor.journal import Carried, Entry, EntryKind, SegmentReader, segments_in
from stagewatch.monitor.restoring import known_margin_s
from stagewatch.monitor.traces import TraceFile, TraceReader, identities, new_digester, trace_file
from stagewatch.monitor.watch import Watch

_BATCH_RECORDS: Final = 4096
_LIMITS: Final = Limits()
_COMPRESSED: Final = (".gz", ".xz", ".bz2", ".zst", ".zip")


class SourceError(StagewatchError):
    """Nothing usable where the user pointed."""


class Source(Protocol):
    """One rank's recording."""

    @property
    def identity(self) -> Identity:
        """Whose it is."""
        ...

    def evidence(self) -> Iterator[Evidence]:
        """What it holds, in the order it was recorded."""
        ...


class RingSource:
    """A ring, live or left by a dead engine."""

    def __init__(self, path: Path, digester: Digester) -> None:
        self._reader = RingReader(path)
        self._digester = digester

    @property
    def identity(self) -> Identity:
        """The ring's rank."""
        return self._reader.identity

    def evidence(self) -> Iterator[Evidence]:
        """All that the ring holds now; what is missing lies before the evidence that says so."""
        next_seq = 0
        while records := list(self._reader.read(_BATCH_RECORDS)):
            for run in _without_gaps(records):
                lost = run[0].seq - next_seq
                next_seq = run[-1].seq + 1
                yield digest_records(run, self.identity, self._digester, lost=lost, raw=True)


def _without_gaps(records: Sequence[Record]) -> Iterator[list[Record]]:
    """The records in runs whose numbers follow one another."""
    begin = 0
    for place in range(1, len(records)):
        if records[place].seq != records[place - 1].seq + 1:
            yield list(records[begin:place])
            begin = place
    yield list(records[begin:])


@dataclass(frozen=True, slots=True)
class Recordings:
    """What is to be replayed."""

    sources: tuple[Source, ...]
    left_out: tuple[str, ...]
    """Files of a directory that this build cannot read, each with the reason."""
    journals: tuple[Path, ...]
    """Directories of a collector's journal, which holds all ranks in the order of arrival."""


def open_recordings(paths: Sequence[Path]) -> Recordings:
    """Everything that can be replayed under the given files and directories.

    Raises SourceError where a path is nothing that can be replayed, and what the readers raise.
    """
    try:
        journals = tuple(found for path in paths if (found := _journal_in(path)) is not None)
        rest = [path for path in paths if _journal_in(path) is None]
        left_out: list[str] = []
        sources = tuple(_open_sources(rest, left_out)) if rest else ()
        return Recordings(sources, tuple(left_out), journals)
    except OSError as error:
        raise SourceError(f"{error.filename}: cannot be read: {error.strerror}") from None


def _journal_in(path: Path) -> Path | None:
    """The journal that a directory is, or that a collector's data directory holds."""
    for directory in (path, path / "journal"):
        if directory.is_dir() and segments_in(directory):
            return directory
    return None


def _open_sources(paths: Sequence[Path], left_out: list[str]) -> list[Source]:
    digester = new_digester()
    traces: dict[tuple[Path, str], list[TraceFile]] = {}
    sources: list[Source] = []
    rings: dict[tuple[str, Rank], Path] = {}
    for path in _files(paths):
        trace = trace_file(path)
        if trace is not None:
            traces.setdefault((path.parent, trace.name), []).append(trace)
        elif path.suffix == ".ring":
            try:
                ring = RingSource(path, digester)
            except RingError as error:
                if path in paths:
                    raise
                left_out.append(str(error))  # one of many in a directory: the others can still be compared
                continue
            other = rings.setdefault((ring.identity.instance, ring.identity.rank), path)
            if other != path:
                raise SourceError(f"{path} holds the same rank as {other}: give one of them")
            sources.append(ring)
        elif path.suffix in _COMPRESSED:
            raise SourceError(f"{path}: compressed: unpack it first")
        else:
            raise SourceError(
                f"{path}: neither a trace (NAME.rankN.jsonl), a ring (NAME.ring), nor a data directory"
            )
    for files in traces.values():
        sources += [TraceReader(file, identity, digester) for file, identity in identities(files).items()]
    if not sources:
        raise SourceError(
            f"{', '.join(map(str, paths))}: holds no trace (NAME.rankN.jsonl), no ring (NAME.ring) and no journal"
            + "".join(f"; {why}" for why in left_out)
        )
    return sources


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    seen: set[Path] = set()
    for path in paths:
        if path.is_dir():
            found = sorted(p for p in path.iterdir() if p.suffix == ".ring" or trace_file(p) is not None)
        elif path.exists():
            found = [path]
        else:
            raise SourceError(f"{path}: no such file or directory")
        for each in found:
            if each.resolve() not in seen:
                seen.add(each.resolve())
                yield each


@dataclass(frozen=True, slots=True)
class Missing:
    """What of a journal could not be replayed."""

    damaged_bytes: int
    unreadable_entries: int


def replay(recordings: Recordings, watch: Watch) -> Missing:
    """Feed everything to ``watch``; say that the evidence has ended."""
    _replay_sources(recordings.sources, watch)
    missing = [_JournalReplay(watch).run(directory) for directory in recordings.journals]
    watch.finish()
    return Missing(sum(m.damaged_bytes for m in missing), sum(m.unreadable_entries for m in missing))


def _replay_sources(sources: Sequence[Source], watch: Watch) -> None:
    """The source furthest behind first."""
    for source in sources:
        watch.hello(source.identity)
    # (newest step delivered, place): heap order is the order of reading
    queue = [(0, place) for place in range(len(sources))]
    streams = [source.evidence() for source in sources]
    while queue:
        newest, place = heapq.heappop(queue)
        found = next(streams[place], None)
        if found is None:
            continue
        identity = sources[place].identity
        watch.take(identity.instance, identity.rank, found, -1.0, 0)
        if found.inputs is not None and len(found.inputs.step):
            newest = int(found.inputs.step[-1])
        heapq.heappush(queue, (newest, place))


@dataclass(slots=True)
class _Position:
    """How far one rank's stream has come."""

    next_seq: int
    unheard: int = 0
    """Records that the journal once held: lost, as the next evidence will say."""


class _JournalReplay:
    """A journal in the order of arrival, as the collector itself took it."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._known: dict[tuple[str, Rank], _Position] = {}

    def run(self, directory: Path) -> Missing:
        """Replay all that is sound."""
        damaged = unreadable = 0
        for path in segments_in(directory):
            reader = SegmentReader(path)
            for entry in reader:
                try:
                    self._take(entry)
                except (FrameError, msgspec.MsgspecError):
                    unreadable += 1
            damaged += reader.size - reader.sound_bytes
        return Missing(damaged, unreadable)

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
        evidence = replace(evidence, lost=lost)
        margin_s = known_margin_s(frame.margin_s)
        self._watch.take(frame.instance, frame.rank, evidence, margin_s, entry.t_ns)

    def _hello(self, identity: Identity, next_seq: int, t_ns: int) -> None:
        position = self._known.setdefault((identity.instance, identity.rank), _Position(next_seq))
        position.unheard += max(next_seq - position.next_seq, 0)
        position.next_seq = max(next_seq, position.next_seq)
        self._watch.hello(identity, t_ns)
