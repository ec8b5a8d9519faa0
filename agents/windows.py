"""Windows: what a ring held around an incident, kept as a dump on the node before the ring overwrites it.

The collector asks for it. The ring is read from its oldest record on by a reader of its own, so neither the engine nor
shipping waits; it goes faster than an engine writes, and pauses as long as it works. A step that a window kept before
holds is not kept twice. Number and bytes are bounded: the oldest incident's windows go first, and are counted.
"""

import contextlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from stagewatch.agents import wire
from stagewatch.agents.dumpfile import SUFFIX, DumpFile, DumpWriter, batch_entry, hello_entry
from stagewatch.agents.errors import RingError, StagewatchError, one_line
from stagewatch.agents.evidence import Evidence, digest_records
from stagewatch.agents.identity import Identity, Rank
from stagewatch.agents.record import Kind, Record
from stagewatch.agents.ring import RingReader, check_directory
from stagewatch.agents.tail import Privacy, pseudonymised
from stagewatch.agents.wire import Freeze, Frozen

log = logging.getLogger("stagewatch.sidecar")

STEPS_BEFORE: Final = 1024
"""Steps before the first bad one that are kept, if the ring still holds them and they fit."""
STEPS_AROUND: Final = 64
"""Steps before the first bad one and after the newest known then without which a window is not one."""
STEPS_AFTER: Final = 256
"""Steps after the newest known then beyond which nothing is read, should the engine be as fast as we."""
SETTLE_S: Final = 2.0
"""How long the steps after an incident are waited for."""
SHARE: Final = 8
"""One window takes at most this part of all the bytes."""
RECORDS_PER_FRAME: Final = 512
_POLL_S: Final = 0.05
_PAUSE_S_MAX: Final = 0.05
_INCIDENT: Final = re.compile(r"[0-9a-f]{16}")
_LASTING: Final = frozenset({Kind.BIND, Kind.FREE, Kind.HEARTBEAT})
"""Records kept of all steps: who holds which slot, and what the probe says of itself. They are few."""


class WindowError(StagewatchError):
    """A window that cannot be kept."""


class _TooLongError(Exception):
    """What was to be kept does not fit."""


@dataclass(frozen=True, slots=True)
class Window:
    """What was kept of one rank."""

    incident: str
    path: Path
    first_step: int
    last_step: int


class Freezer:
    """Keeps windows under ``directory``, one directory an incident. `freeze` may run on any one thread at a time."""

    def __init__(self, directory: Path, bytes_max: int, incidents_max: int) -> None:
        self.dropped = 0
        """Windows removed because newer ones needed their room."""
        self._directory = directory
        self._bytes_max = bytes_max
        self._incidents_max = incidents_max
        self._kept: dict[tuple[str, Rank], list[Window]] = {}
        self._ended = threading.Event()

    def end(self) -> None:
        """Give up what is being frozen."""
        self._ended.set()

    def freeze(self, ring: Path, privacy: Privacy, wanted: Freeze) -> Frozen:
        """Keep what ``ring`` holds around an incident; say where it lies, or why it does not. Raises nothing."""
        try:
            window = self._kept_before(wanted) or self._keep(ring, privacy, wanted)
        except Exception as error:  # noqa: BLE001  # whatever a ring holds, the sidecar must ship on
            told = isinstance(error, StagewatchError)
            why = str(error) if told else getattr(error, "strerror", None) or one_line(error)
            log.warning(
                "incident %s: no window of rank %s was kept: %s", wanted.incident[:16], wanted.rank, why
            )
            return Frozen(wanted.instance, wanted.rank, wanted.incident, "", 0, 0, str(why)[:200])
        return Frozen(
            wanted.instance,
            wanted.rank,
            wanted.incident,
            str(window.path.absolute()),
            window.first_step,
            window.last_step,
        )

    def _kept_before(self, wanted: Freeze) -> Window | None:
        """A window that holds the incident's steps already; its own or an earlier one's."""
        windows = self._kept.get((wanted.instance, wanted.rank), [])
        windows[:] = [window for window in windows if window.path.exists()]
        first = max(wanted.first_step - STEPS_AROUND, 1)
        for window in windows:
            if window.incident == wanted.incident or (
                window.first_step <= first and wanted.through_step <= window.last_step
            ):
                return window
        return None

    def _keep(self, ring: Path, privacy: Privacy, wanted: Freeze) -> Window:
        if not _INCIDENT.fullmatch(wanted.incident):
            raise WindowError("an incident whose id is none")
        directory = self._made(wanted.incident)
        path = directory / f"{ring.stem}{SUFFIX}"
        room = self._make_room(directory)
        if path.exists():  # of an earlier life of this sidecar
            window = Window(wanted.incident, path, *_steps_of(path))
        else:
            try:
                window = self._written(ring, path, privacy, wanted, room)
            except BaseException:
                with contextlib.suppress(OSError):  # unless another rank's window lies there
                    directory.rmdir()
                raise
            log.info("incident %s: %s was kept in %s", wanted.incident, ring.name, path)
        self._kept.setdefault((wanted.instance, wanted.rank), []).append(window)
        return window

    def _made(self, incident: str) -> Path:
        """The directory of an incident. Raises StagewatchError where others could put theirs in its place."""
        above = self._directory.parent.stat().st_uid
        if os.geteuid() == 0 and above != 0:
            raise WindowError(
                f"{self._directory.parent} belongs to uid {above}, where root writes nothing: give --freeze-dir"
            )
        self._directory.mkdir(mode=0o700, exist_ok=True)
        check_directory(self._directory)
        made = self._directory / incident
        made.mkdir(mode=0o700, exist_ok=True)
        return made

    def _make_room(self, own: Path) -> int:
        """Remove the oldest incidents' windows until one more fits; return the bytes that it may take."""
        most = max(self._bytes_max // SHARE, 1)
        others = sorted(_incidents_in(self._directory, own), key=lambda path: path.stat().st_mtime_ns)
        while others:
            free = self._bytes_max - _bytes_in(own) - sum(map(_bytes_in, others))
            if free >= most and len(others) < self._incidents_max:
                return most
            oldest = others.pop(0)
            self.dropped += sum(1 for path in oldest.iterdir() if path.suffix == SUFFIX)
            shutil.rmtree(oldest)
        return min(self._bytes_max - _bytes_in(own), most)

    def _written(self, ring: Path, path: Path, privacy: Privacy, wanted: Freeze, room: int) -> Window:
        before = STEPS_BEFORE
        while True:
            first = max(wanted.first_step - before, 1)
            try:
                return self._write(ring, path, privacy, wanted, first, room)
            except _TooLongError:
                if not before:
                    raise WindowError(f"it takes more than {room} bytes: raise --freeze-bytes") from None
                before = before // 4 if before > 4 else 0

    def _write(
        self, ring: Path, path: Path, privacy: Privacy, wanted: Freeze, first: int, room: int
    ) -> Window:
        with contextlib.closing(RingReader(ring)) as reader, DumpWriter(path, replace=True) as writer:
            identity = _shown(reader.identity, privacy)
            if (identity.instance, identity.rank) != (wanted.instance, wanted.rank):
                raise RingError(f"{ring.name} is another engine's by now")
            writer.write(hello_entry(0, identity))
            steps: list[int] = []
            for evidence in self._read(reader, identity, privacy, wanted, first):
                entry = batch_entry(0, wire.encode_frame(wire.batch_of(identity, evidence, -1.0)))
                if writer.bytes_written + len(entry) > room:
                    if steps and steps[-1] >= wanted.through_step:
                        break  # what came after it does not fit, and is not needed
                    raise _TooLongError
                writer.write(entry)
                if evidence.inputs is not None:
                    steps += [int(evidence.inputs.step[0]), int(evidence.inputs.step[-1])]
            if not steps or steps[-1] < wanted.first_step or steps[0] > wanted.first_step:
                raise RingError(
                    f"{ring.name} holds step {wanted.first_step} no more: raise STAGEWATCH_RING_BYTES"
                )
        return Window(wanted.incident, path, steps[0], steps[-1])

    def _read(
        self, reader: RingReader, identity: Identity, privacy: Privacy, wanted: Freeze, first: int
    ) -> Iterator[Evidence]:
        """The evidence that is kept, until some steps beyond the incident were read, or do not come."""
        newest, deadline = 0, time.monotonic() + SETTLE_S
        while not self._ended.is_set():
            began = time.monotonic()
            records = list(reader.read(RECORDS_PER_FRAME))
            for run in _runs([r for r in records if r.step >= first or r.kind in _LASTING]):
                newest = max(newest, run[-1].step)
                found = digest_records(run, identity, privacy.digester, raw=privacy.raw_tokens)
                yield pseudonymised(found, privacy.digester) if privacy.pseudonymise else found
            if newest >= wanted.through_step + STEPS_AFTER:
                return
            if records:
                time.sleep(min(time.monotonic() - began, _PAUSE_S_MAX))
            elif newest >= wanted.through_step + STEPS_AROUND or time.monotonic() > deadline or reader.closed:
                return
            else:
                time.sleep(_POLL_S)
        raise WindowError("the sidecar ends")


def _shown(identity: Identity, privacy: Privacy) -> Identity:
    """As the sidecar shows it, so that what was digested differently is never compared."""
    return msgspec.structs.replace(identity, config=(*identity.config, *privacy.fingerprints))


def _runs(records: list[Record]) -> Iterator[list[Record]]:
    """The records in runs whose numbers follow one another."""
    begin = 0
    for place in range(1, len(records) + 1):
        if place == len(records) or records[place].seq != records[place - 1].seq + 1:
            yield records[begin:place]
            begin = place


def _incidents_in(directory: Path, own: Path) -> Iterator[Path]:
    for path in directory.iterdir():
        if path != own and _INCIDENT.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            yield path


def _bytes_in(directory: Path) -> int:
    return sum(path.lstat().st_size for path in directory.iterdir())


def _steps_of(path: Path) -> tuple[int, int]:
    """First and last step of a dump of one rank. Raises DumpError."""
    opened = DumpFile.open(path)
    steps = [
        int(step)
        for key in opened.streams
        for found in opened.evidence(key)
        if found.inputs is not None
        for step in found.inputs.step[[0, -1]]
    ]
    return (min(steps), max(steps)) if steps else (0, 0)
