"""Replay: recorded evidence through the same watch as live evidence.

Sources are read side by side, always the one that is furthest behind, so that memory holds little more
than one batch per rank however long the recording is.
"""

import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

from stagewatch.agents.digest import Digester
from stagewatch.agents.errors import StagewatchError
from stagewatch.agents.evidence import Evidence, digest_records
from stagewatch.agents.identity import Identity
from stagewatch.agents.record import Record
from stagewatch.agents.ring import RingReader
from stagewatch.monitor.traces import TraceFile, TraceReader, identities, new_digester, trace_file
from stagewatch.monitor.watch import Watch

_BATCH_RECORDS: Final = 4096


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


def open_sources(paths: Sequence[Path]) -> list[Source]:
    """Everything that can be replayed under the given files and directories.

    Raises SourceError where a path is nothing that can be replayed, and what the readers raise.
    """
    digester = new_digester()
    traces: dict[tuple[Path, str], list[TraceFile]] = {}
    sources: list[Source] = []
    for path in _files(paths):
        trace = trace_file(path)
        if trace is not None:
            traces.setdefault((path.parent, trace.name), []).append(trace)
        elif path.suffix == ".ring":
            sources.append(RingSource(path, digester))
        else:
            raise SourceError(f"{path}: neither a trace (NAME.rankN.jsonl) nor a ring (NAME.ring)")
    for files in traces.values():
        sources += [TraceReader(file, identity, digester) for file, identity in identities(files).items()]
    if not sources:
        raise SourceError(
            f"{', '.join(map(str, paths))}: holds no trace (NAME.rankN.jsonl) and no ring (NAME.ring)"
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


def replay(sources: Sequence[Source], watch: Watch) -> None:
    """Feed every source to ``watch``, the one furthest behind first."""
    for source in sources:
        watch.hello(source.identity)
    # (newest step delivered, place): heap order is the order of reading
    queue = [(0, place) for place in range(len(sources))]
    heapq.heapify(queue)
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
    watch.finish()
