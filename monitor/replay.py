"""Replay: recorded evidence through the same watch as live evidence.

Sources are read side by side, always the one that is furthest behind, so that memory holds little more
than one batch per rank however long the recording is.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec

from stagewatch.agents.digest import Digester
from stagewatch.agents.errors import FrameError, StagewatchError
from stagewatch.agents.evidence import Evidence, digest_records
from stagewatch.agents.identity import Identity, Rank
from stagewatch.agents.record import Record
from stagewatch.agents.ring import RingReader
from stagewatch.agents.wire import Hello, Limits, decode_upward, evidence_of
from stagewatch.monitor.journal import Carried, EntryKind, read_journal, segments_in
from stagewatch.monitor.traces import TraceFile, TraceReader, identities, new_digester, trace_file
from stagewatch.monitor.watch import Watch

_BATCH_RECORDS: Final = 4096
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
        """All that the ring holds now."""
        lost = 0
        while True:
            records: list[Record] = list(self._reader.read(_BATCH_RECORDS))
            if not records:
                return
            fresh, lost = self._reader.lost - lost, self._reader.lost
            yield digest_records(records, self.identity, self._digester, lost=fresh, raw=True)


@dataclass(frozen=True, slots=True)
class Recordings:
    """What is to be replayed."""

    sources: tuple[Source, ...]
    journals: tuple[Path, ...]
    """Directories of a collector's journal, which holds all ranks in the order of arrival."""


def open_recordings(paths: Sequence[Path]) -> Recordings:
    """Everything that can be replayed under the given files and directories.

    Raises SourceError where a path is nothing that can be replayed, and what the readers raise.
    """
    try:
        journals = tuple(found for path in paths if (found := _journal_in(path)) is not None)
        rest = [path for path in paths if _journal_in(path) is None]
        return Recordings(tuple(_open_sources(rest)) if rest else (), journals)
    except OSError as error:
        raise SourceError(f"{error.filename}: cannot be read: {error.strerror}") from None


def _journal_in(path: Path) -> Path | None:
    """The journal that a directory is, or that a collector's data directory holds."""
    for directory in (path, path / "journal"):
        if directory.is_dir() and segments_in(directory):
            return directory
    return None


def _open_sources(paths: Sequence[Path]) -> list[Source]:
    digester = new_digester()
    traces: dict[tuple[Path, str], list[TraceFile]] = {}
    sources: list[Source] = []
    for path in _files(paths):
        trace = trace_file(path)
        if trace is not None:
            traces.setdefault((path.parent, trace.name), []).append(trace)
        elif path.suffix == ".ring":
            sources.append(RingSource(path, digester))
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


def replay(recordings: Recordings, watch: Watch) -> None:
    """Feed everything to ``watch``; say that the evidence has ended."""
    _replay_sources(recordings.sources, watch)
    for directory in recordings.journals:
        _replay_journal(directory, watch)
    watch.finish()


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


def _replay_journal(directory: Path, watch: Watch) -> None:
    """In the order of arrival, as the collector itself took it."""
    known: dict[tuple[str, Rank], int] = {}
    limits = Limits()
    try:
        for entry in read_journal(directory):
            if entry.kind is EntryKind.CARRIED:
                carried = msgspec.msgpack.decode(entry.payload, type=Carried)
                known.setdefault((carried.identity.instance, carried.identity.rank), carried.next_seq)
                watch.hello(carried.identity, entry.t_ns)
                continue
            frame = decode_upward(entry.payload, limits)
            if isinstance(frame, Hello):
                known.setdefault((frame.identity.instance, frame.identity.rank), 0)
                watch.hello(frame.identity, entry.t_ns)
            elif frame.next_seq > known.get((frame.instance, frame.rank), -1):
                known[frame.instance, frame.rank] = frame.next_seq
                watch.take(frame.instance, frame.rank, evidence_of(frame, limits), frame.margin_s, entry.t_ns)
    except (FrameError, msgspec.MsgspecError) as error:
        raise SourceError(f"{directory}: an entry cannot be read: {error}") from None
