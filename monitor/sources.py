"""What can be replayed, and how it is found: traces, rings, dumps, bundles, and a collector's journal."""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final, Protocol

from stagewatch.agents import dumpfile
from stagewatch.agents.digest import KEY_SIZE, Digester
from stagewatch.agents.dumpfile import DumpFile, StreamKey
from stagewatch.agents.dumping import key_beside, privacy_of
from stagewatch.agents.errors import RingError, StagewatchError
from stagewatch.agents.evidence import Evidence, digest_records
from stagewatch.agents.identity import Identity, Rank
from stagewatch.agents.record import Record
from stagewatch.agents.ring import RingReader
from stagewatch.agents.tail import Privacy
from stagewatch.monitor.bundlefile import Bundle, is_bundle
from stagewatch.monitor.journal import segments_in
from stagewatch.monitor.traces import TraceFile, TraceReader, identities, trace_file

_BATCH_RECORDS: Final = 4096
_COMPRESSED: Final = (".gz", ".xz", ".bz2", ".zst")
_KINDS: Final = (
    "a trace (NAME.rankN.jsonl), a ring (NAME.ring), a dump, a bundle, or a collector's data directory"
)


class SourceError(StagewatchError):
    """Nothing usable where the user pointed."""


class Source(Protocol):
    """One rank's recording."""

    size_bytes: int
    """About how much there is to read."""
    bytes_read: int
    """How much of it was read since `evidence` was last called."""

    @property
    def identity(self) -> Identity:
        """Whose it is."""
        ...

    def evidence(self) -> Iterator[Evidence]:
        """What it holds, in the order it was recorded; from the beginning at each call."""
        ...

    def left_out(self) -> list[str]:
        """What of it could not be used, once it was read."""
        ...


class RingSource:
    """A ring, live or left by a dead engine. ``raw``: show token values, not only their digests."""

    def __init__(self, path: Path, privacy: Privacy | Digester, *, raw: bool = False) -> None:
        self._reader = RingReader(path)
        self._digester = privacy.digester if isinstance(privacy, Privacy) else privacy
        self._raw = raw
        self.size_bytes = self._reader.margin().bytes_behind
        self.bytes_read = 0
        found = self._reader.identity
        # As the sidecar shows them: what was digested with another key is not compared with this.
        shown = privacy.fingerprints if isinstance(privacy, Privacy) else ()
        self._identity: Final = Identity(
            **{name: getattr(found, name) for name in Identity.__struct_fields__ if name != "config"},
            config=(*found.config, *shown),
        )

    @property
    def identity(self) -> Identity:
        """The ring's rank."""
        return self._identity

    def evidence(self) -> Iterator[Evidence]:
        """All that the ring holds now; what is missing lies before the evidence that says so."""
        self._reader.rewind()
        next_seq = 0
        while records := list(self._reader.read(_BATCH_RECORDS)):
            self.bytes_read = self.size_bytes - self._reader.margin().bytes_behind
            for run in _without_gaps(records):
                lost = run[0].seq - next_seq
                next_seq = run[-1].seq + 1
                yield digest_records(run, self.identity, self._digester, lost=lost, raw=self._raw)

    def left_out(self) -> list[str]:
        """Nothing that is not told as lost."""
        return []


def _without_gaps(records: Sequence[Record]) -> Iterator[list[Record]]:
    """The records in runs whose numbers follow one another."""
    begin = 0
    for place in range(1, len(records)):
        if records[place].seq != records[place - 1].seq + 1:
            yield list(records[begin:place])
            begin = place
    yield list(records[begin:])


class DumpSource:
    """One rank of a dump."""

    def __init__(self, dump: DumpFile, key: StreamKey) -> None:
        self._dump = dump
        self._key = key
        self.size_bytes = sum(entry[1] for entry in dump.streams[key].entries)
        self.bytes_read = 0
        self._unreadable = 0

    @property
    def identity(self) -> Identity:
        """The rank."""
        return self._dump.streams[self._key].identity

    def evidence(self) -> Iterator[Evidence]:
        """The rank's evidence."""
        self.bytes_read, before = 0, self._dump.unreadable
        sizes = iter(self._dump.streams[self._key].entries)
        for found in self._dump.evidence(self._key):
            self.bytes_read += next(sizes, (0, 0))[1]
            yield found
        self._unreadable = self._dump.unreadable - before

    def left_out(self) -> list[str]:
        """Entries that could not be read."""
        if not self._unreadable:
            return []
        return [
            f"{self._dump.name}: {self._unreadable} damaged entries of {self.identity.rank} were left out"
        ]


@dataclass(frozen=True, slots=True)
class Recordings:
    """What is to be replayed."""

    sources: tuple[Source, ...]
    left_out: tuple[str, ...]
    """Files of a directory that this build cannot read, each with the reason."""
    journals: tuple[Path, ...]
    """Directories of a collector's journal, which holds all ranks in the order of arrival; or segments of one."""
    bundles: tuple[Bundle, ...] = ()
    """Bundles whose evidence is among the journals, kept open."""


def open_recordings(paths: Sequence[Path], *, raw: bool = False) -> Recordings:
    """Everything that can be replayed under the given files and directories.

    ``raw``: show what rings hold as token values, not only as digests. Raises SourceError where a path is
    nothing that can be replayed, and what the readers raise.
    """
    try:
        journals = tuple(found for path in paths if (found := _journal_in(path)) is not None)
        rest = [path for path in paths if _journal_in(path) is None]
        bundles = tuple(Bundle.open(path) for path in rest if path.is_file() and is_bundle(path))
        rest = [path for path in rest if not (path.is_file() and is_bundle(path))]
        journals += tuple(bundle.evidence for bundle in bundles)
        if not rest:
            return Recordings((), (), journals, bundles)
        return replace(_Opening(rest, raw).recordings(), journals=journals, bundles=bundles)
    except OSError as error:
        raise SourceError(f"{error.filename}: cannot be read: {error.strerror}") from None


def _journal_in(path: Path) -> Path | None:
    """The journal that a directory is, or that a collector's data directory holds."""
    for directory in (path, path / "journal"):
        if directory.is_dir() and segments_in(directory):
            return directory
    return None


class _Opening:
    """Sorts files by what they are."""

    def __init__(self, paths: Sequence[Path], raw: bool) -> None:
        self._paths = paths
        self._raw = raw
        self._left_out: list[str] = []
        self._sources: list[Source] = []
        self._traces: list[TraceFile] = []
        self._known: dict[tuple[str, Rank], str] = {}
        self._key: bytes | None = None
        self._digester: Digester | None = None

    def recordings(self) -> Recordings:
        for path in _files(self._paths):
            self._open(path)
        if self._traces:
            digester = Digester(secrets.token_bytes(KEY_SIZE))
            found = identities(self._traces)
            self._sources += [TraceReader(file, identity, digester) for file, identity in found.items()]
        if not self._sources:
            raise SourceError(
                f"{', '.join(map(str, self._paths))}: holds no trace (NAME.rankN.jsonl), no ring (NAME.ring), no dump "
                f"(NAME{dumpfile.SUFFIX}) and no journal" + "".join(f"; {why}" for why in self._left_out)
            )
        return Recordings(tuple(self._sources), tuple(self._left_out), ())

    def _open(self, path: Path) -> None:
        trace = trace_file(path)
        if trace is not None:
            self._traces.append(trace)
        elif path.suffix == ".ring":
            self._ring(path)
        elif path.suffix in _COMPRESSED:
            raise SourceError(f"{path}: compressed: unpack it first")
        elif path.suffix == dumpfile.SUFFIX or _begins_with(path, dumpfile.MAGIC):
            self._dump(DumpFile.open(path), str(path))
        else:
            raise SourceError(f"{path}: neither {_KINDS}")

    def _dump(self, dump: DumpFile, name: str) -> None:
        for key, stream in dump.streams.items():
            self._claim(stream.identity, name)
            self._sources.append(DumpSource(dump, key))
        if not dump.complete:
            self._left_out.append(f"{name}: cut off: what follows its last whole entry is missing")
        if dump.unreadable:
            self._left_out.append(f"{name}: {dump.unreadable} entries are damaged or of another build")
        if not dump.streams:
            raise SourceError(f"{name}: holds no rank that can be read")

    def _ring(self, path: Path) -> None:
        try:
            ring = RingSource(path, self._privacy(path), raw=self._raw)
        except RingError as error:
            if path in self._paths:
                raise
            self._left_out.append(str(error))  # one of many in a directory: the others can still be compared
            return
        self._claim(ring.identity, str(path))
        self._sources.append(ring)

    def _privacy(self, path: Path) -> Privacy:
        """The key of the ring's directory, so that digests are those which the sidecars sent; else one of our own."""
        self._key = self._key or secrets.token_bytes(KEY_SIZE)
        return privacy_of(key_beside([path]) or self._key, raw_tokens=self._raw, pseudonymise=False)

    def _claim(self, identity: Identity, name: str) -> None:
        other = self._known.setdefault((identity.instance, identity.rank), name)
        if other != name:
            raise SourceError(f"{name} holds the same rank as {other}: give one of them")


def _begins_with(path: Path, magic: bytes) -> bool:
    file: IO[bytes]
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    seen: set[Path] = set()
    for path in paths:
        if path.is_dir():
            found = sorted(
                p
                for p in path.iterdir()
                if p.suffix in (".ring", dumpfile.SUFFIX) or trace_file(p) is not None
            )
        elif path.exists():
            found = [path]
        else:
            raise SourceError(f"{path}: no such file or directory")
        for each in found:
            if each.resolve() not in seen:
                seen.add(each.resolve())
                yield each
