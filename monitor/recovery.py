"""Coming back after a stop: the newest checkpoint, then what the journal has beyond it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from stagewatch.agents.errors import StagewatchError
from stagewatch.monitor.checkpoint import (
    CheckpointError,
    Closing,
    Opening,
    Reader,
    SavedEngine,
    SavedPark,
    SavedStream,
    Writer,
)
from stagewatch.monitor.engine import Engine
from stagewatch.monitor.freezing import FrozenError, build, freeze, thaw
from stagewatch.monitor.incidents import Incident, Severity
from stagewatch.monitor.ingest import Intake
from stagewatch.monitor.journal import Position
from stagewatch.monitor.states import Change
from stagewatch.monitor.streams import Parked, Stream

log = logging.getLogger("stagewatch.collector")

EVERY_S: Final = 60.0
EVERY_BYTES: Final = 64 << 20
"""So much of journal, or so much time with anything in it, makes a checkpoint due: a restart reads back no more."""
SHARE_MAX: Final = 0.02
"""Share of the event loop's time that saving may take; where it takes longer, it is done less often."""


class Saved(Protocol):
    """The part of `stagewatch.monitor.watch.Watch` that is saved."""

    def keys(self) -> list[tuple[str, int]]: ...  # noqa: D102
    def engine(self, key: tuple[str, int]) -> Engine | None: ...  # noqa: D102
    def put_back(self, engine: Engine) -> None: ...  # noqa: D102


class Checkpoints:
    """The checkpoint file of one collector. `save` runs on the event loop, `load` before it takes frames."""

    def __init__(self, path: Path, watch: Saved, intake: Intake) -> None:
        self._path = path
        self._watch = watch
        self._intake = intake
        self._saved: Position | None = None
        self._next_s = 0.0
        self._failure = ""

    def load(self) -> tuple[Position | None, list[Incident]]:
        """Bring watch and streams to the checkpoint; return from where to read on, and what was not yet stored."""
        if not self._path.exists():
            return None, []
        try:
            opening, engines, closing = self._read()
        except (CheckpointError, FrozenError) as error:
            log.warning("%s: the whole journal is read back instead", error)
            return None, []
        for streams, engine in engines:
            self._watch.put_back(engine)
            self._open(streams)
        self._open(closing.streams)
        for each in closing.parked:
            self._intake.streams.park((each.instance, each.rank), Parked(each.started_ns, each.next_seq))
        self._intake.clock.not_before(closing.now_ns)
        self._saved = opening.position
        return opening.position, closing.unstored

    def _read(self) -> tuple[Opening, list[tuple[list[SavedStream], Engine]], Closing]:
        """All of the checkpoint, before any of it is believed. Raises CheckpointError or FrozenError."""
        with contextlib.closing(Reader(self._path)) as reader:
            opening = reader.opening()
            if opening.build != build():
                raise CheckpointError(f"checkpoint {self._path.name} is of another build")
            if self._intake.journal.salt_at(opening.position) != opening.salt:
                raise CheckpointError(f"checkpoint {self._path.name} is of another journal")
            engines: list[tuple[list[SavedStream], Engine]] = []
            for saved in reader.engines():
                engine = thaw(saved.frozen)
                if not isinstance(engine, Engine):
                    raise CheckpointError(f"checkpoint {self._path.name} is none")
                engines.append((saved.streams, engine))
            return opening, engines, reader.closing()

    def _open(self, streams: Sequence[SavedStream]) -> None:
        for saved in streams:
            stream = self._intake.streams.open(saved.identity, saved.heard_ns)
            stream.offered_seq = stream.durable_seq = saved.next_seq
            stream.unheard = saved.unheard

    def is_due(self, position: Position | None) -> bool:
        """Whether to save, now that everything before ``position`` was judged."""
        if position is None or position == self._saved or time.monotonic() < self._next_s:
            return False
        before = self._saved
        if before is None or before.segment != position.segment:
            return True
        is_late = time.monotonic() - self._next_s > EVERY_S
        return is_late or position.offset - before.offset >= EVERY_BYTES

    async def save(self, position: Position, unstored: Callable[[], list[Incident]]) -> None:
        """Save where everything stands, which is ``position`` or later. Never raises for a disk that is full."""
        salt = self._intake.journal.salt_at(position)
        if salt is None:
            return
        busy_s, failure = 0.0, ""
        try:
            writer = await asyncio.to_thread(Writer, self._path)
            try:
                writer.add(Opening(build(), position, salt))
                saved = set(self._watch.keys())
                for key in saved.copy():
                    began = time.thread_time()
                    engine = self._watch.engine(key)
                    if engine is None:
                        saved.discard(key)
                        continue
                    piece = SavedEngine(*key, self._streams_of(key), freeze(engine))
                    busy_s += time.thread_time() - began
                    await asyncio.to_thread(writer.add, piece)
                writer.add(self._closing(saved, unstored()))
                await asyncio.to_thread(writer.finish)
            except BaseException:
                writer.give_up()
                raise
            self._saved = position
        except OSError as error:
            failure = error.strerror or "the disk failed"
        except StagewatchError as error:
            failure = str(error)
        if failure and failure != self._failure:
            log.warning("no checkpoint could be saved: %s; a restart will read back more", failure)
        self._failure = failure
        self._next_s = time.monotonic() + busy_s / SHARE_MAX

    def _closing(self, saved: set[tuple[str, int]], unstored: list[Incident]) -> Closing:
        streams = self._intake.streams
        return Closing(
            self._intake.clock.now_ns(),
            [
                _saved(stream)
                for (instance, rank), stream in streams.by_key.items()
                if (instance, rank.dp) not in saved
            ],
            [SavedPark(*key, parked.started_ns, parked.next_seq) for key, parked in streams.parked.items()],
            unstored,
        )

    def _streams_of(self, key: tuple[str, int]) -> list[SavedStream]:
        return [
            _saved(stream)
            for (instance, rank), stream in self._intake.streams.by_key.items()
            if (instance, rank.dp) == key
        ]


def _saved(stream: Stream) -> SavedStream:
    return SavedStream(stream.identity, stream.durable_seq, stream.heard_ns, stream.unheard)


class Hindsight:
    """Incidents that reading the journal back finds, of evidence that was judged and whose findings were stored before.

    Those that are not in the store were removed from it since, or go by another name there because the segment that
    told their request's id is gone. They are no news, unless they become worse than they were.
    """

    def __init__(self, judged_ns: int) -> None:
        self._judged_ns = judged_ns
        self._old: dict[str, Severity] = {}

    def note(self, changes: Sequence[Change], t_ns: int) -> None:
        """Changes found in evidence that arrived at ``t_ns``, as the journal is read back."""
        if t_ns < self._judged_ns:
            self._old.update({change.incident.id: change.incident.severity for change in changes})

    def settle(self, known: Callable[[str], bool]) -> None:
        """The journal was read back: what the store knows may go on growing."""
        self._old = {found: severity for found, severity in self._old.items() if not known(found)}

    def is_news(self, incident: Incident) -> bool:
        """Whether the store should be told; once `settle` was called."""
        return incident.severity > self._old.get(incident.id, 0)

    def only_news(self, incidents: Mapping[str, Incident]) -> dict[str, Incident]:
        """Those of ``incidents`` that are news."""
        return {found: incident for found, incident in incidents.items() if self.is_news(incident)}
