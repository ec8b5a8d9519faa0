"""The collector: door, journal, watch, store and outputs, joined.

Frames become durable on the journal's thread, incidents on a worker thread; everything else, the watch
above all, runs on the event loop. At start the journal is replayed through the watch with the times of
arrival it recorded, so the watch stands where it stood; until that is done nobody is let in.
"""

import asyncio
import fcntl
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, ParamSpec, Protocol

from stagewatch.agents.errors import FrameError, SettingsError, StagewatchError, one_line
from stagewatch.agents.evidence import Evidence
from stagewatch.agents.identity import Identity, Rank
from stagewatch.monitor.auth import Authenticator
from stagewatch.monitor.clock import Clock
from stagewatch.monitor.directories import check_data_directory
from stagewatch.monitor.engine import Engine
from stagewatch.monitor.events import Hub
from stagewatch.monitor.incidentlog import log_incidents
from stagewatch.monitor.incidents import Incident
from stagewatch.monitor.ingest import Intake
from stagewatch.monitor.journal import Position
from stagewatch.monitor.metrics import Metrics
from stagewatch.monitor.nodes import Nodes
from stagewatch.monitor.observers import Snapshot
from stagewatch.monitor.otlp.push import Push
from stagewatch.monitor.otlp.telling import Telling
from stagewatch.monitor.preserving import RECENT_NS, Preserver
from stagewatch.monitor.recovery import Checkpoints, Hindsight, Saved
from stagewatch.monitor.schema import StoreError
from stagewatch.monitor.sessions import Session
from stagewatch.monitor.settings import CollectorSettings
from stagewatch.monitor.states import Change, EngineState
from stagewatch.monitor.store import Event, Store
from stagewatch.monitor.streams import BatchTaken, Taken
from stagewatch.monitor.ticks import Ticks

log = logging.getLogger("stagewatch.collector")

P = ParamSpec("P")

TICK_S: Final = 1.0
STORE_RETRY_S: Final = 1.0
PRUNE_S: Final = 60.0
"""How often incidents beyond what is kept are looked for."""


class Judge(Saved, Protocol):
    """The part of `stagewatch.monitor.watch.Watch` that the collector needs."""

    def hello(self, identity: Identity, now_ns: int = 0) -> None: ...  # noqa: D102
    def take(  # noqa: D102
        self, instance: str, rank: Rank, evidence: Evidence, margin_s: float, now_ns: int
    ) -> list[Change]: ...
    def tick(self, now_ns: int) -> list[Change]: ...  # noqa: D102
    def states(self) -> list[EngineState]: ...  # noqa: D102


class Collector:
    """One collector over one data directory. Raises StagewatchError where that cannot be used."""

    def __init__(self, settings: CollectorSettings, watch: Judge, push: Push | None = None) -> None:
        self.settings: Final = settings
        self.authenticator: Final = Authenticator(settings.token)
        self._lock_fd = lock_directory(settings.data_dir)
        self.store: Final = Store(settings.data_dir / "incidents.sqlite3")
        self.hub: Final = Hub()
        self.sessions: Final[set[Session]] = set()
        self._watch = watch
        self.nodes: Final = Nodes()
        self.metrics: Final = Metrics(self.snapshot, push)
        self._telling = Telling(push, self.engine) if push is not None else None
        self.clock: Final = Clock()
        self.intake: Final = Intake(
            settings,
            self._judge,
            self.metrics.journal_synced,
            self.clock,
            self.store.pins,
            lambda stream, session: self._preserver.greeted(stream, session),
            lambda frozen, stream: self._preserver.took(frozen, stream),
        )
        self._preserver = Preserver(
            self.intake.streams, self.store, lambda: self.metrics.drop("windows", "not_frozen")
        )
        self._journal = self.intake.journal
        self._checkpoints = Checkpoints(settings.data_dir / "checkpoint", watch, self.intake)
        self._hindsight = Hindsight(self.store.judged_ns())
        self._judged: Position | None = None
        self._judged_ns = 0
        """Where the newest judged entry ends, and when it arrived."""
        self._unstored: dict[str, Incident] = {}
        self._storing: dict[str, Incident] = {}
        """On its way into the store."""
        self._unstored_wake = asyncio.Event()
        self._states: list[EngineState] = []
        self._states_ns = self.clock.now_ns()
        self._store_failure = ""
        self._failures_told: set[str] = set()
        """Places in our own source whose errors were logged."""
        self._ready = False
        self._progress = "starting"
        self._tasks: list[asyncio.Task[None]] = []
        self.crash: BaseException | None = None
        """Why the collector ended by itself."""
        self.on_crash: Callable[[], None] = lambda: None
        """Called when it did."""

    @property
    def not_ready(self) -> str:
        """Empty, or why nothing can be taken at present."""
        if not self._ready:
            return self._progress
        return self._journal.health.failure or self._store_failure

    @property
    def admits(self) -> bool:
        """Whether sidecars may connect: the journal has been read back."""
        return self._ready

    def engine(self, instance: str, dp: int) -> Engine | None:
        """One replica under watch; None before the journal was read back, or if it is not known."""
        return self._watch.engine((instance, dp)) if self._ready else None

    def engines(self) -> list[EngineState]:
        """Every engine, now. On the event loop only."""
        self._states = self._watch.states() if self._ready else []
        self._states_ns = self.clock.now_ns()
        return self._states

    def snapshot(self) -> Snapshot:
        """What metrics show: the engines as they were last asked for; any thread."""
        return Snapshot(
            self._states,
            self._journal.health,
            len(self.sessions),
            self.intake.duplicates,
            self.hub.readers,
            self._states_ns,
            rings_refused=self.nodes.rings_refused(self._states_ns),
            drops={
                ("events", "slow_reader"): self.hub.dropped_readers,
                ("journal", "pinned"): self._journal.health.pinned_dropped,
                ("streams", "forgotten"): self.intake.streams.forgotten,
                **self.nodes.drops,
            },
        )

    def take(self, message: bytes, session: Session) -> None:
        """Take one frame of a session. Raises FrameRefusedError."""
        evidence = self.intake.take(message, session)
        self.metrics.count("stagewatch.ingest.frames")
        self.metrics.count("stagewatch.ingest.size", len(message))
        if evidence is not None and evidence.inputs is not None:
            self.metrics.count("stagewatch.ingest.rows", len(evidence.inputs.slot))

    async def start(self) -> None:
        """Begin: replay the journal in the background, then take frames."""
        if self._telling is not None:
            self._telling.start(self.metrics.now, self.metrics.drop)
        task = asyncio.create_task(self._run(), name="collector")
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """`_run` ends only by being cancelled. Otherwise nothing is watched any more, and that must be seen."""
        if task.cancelled():
            return
        error = task.exception()
        self._ready = False
        self._progress = f"stopped: {one_line(error)}" if error else "stopped"
        self.crash = error
        expected = isinstance(error, StagewatchError | OSError)
        log.error("the collector cannot go on: %s", error, exc_info=None if expected else error)
        self.on_crash()

    async def stop(self) -> None:
        """End in order: what was taken is made durable, what was found is stored."""
        self.hub.close()
        was_ready = self._ready
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._journal.close)
        await asyncio.sleep(0)  # let what the journal settled last be judged
        await self._store_once()
        if was_ready and self._judged is not None:
            await self._checkpoints.save(self._judged, self._found)
        self.store.close()
        if self._telling is not None:
            await asyncio.to_thread(self._telling.close)
        await asyncio.to_thread(self.metrics.close)
        os.close(self._lock_fd)

    async def _run(self) -> None:
        await asyncio.to_thread(self._recover)
        self.intake.open()
        self._preserver.recall(
            await asyncio.to_thread(self.store.critical_since, self.clock.now_ns() - RECENT_NS)
        )
        self._ready = True
        self._note_changes([])
        await asyncio.gather(self._tick_forever(), self._store_forever(), self._keep_forever())

    def _recover(self) -> None:
        began, frames, unreadable = time.monotonic(), 0, 0
        ticks = Ticks()
        start, unstored = self._checkpoints.load()
        self.nodes.know(self._watch.states())
        self._unstored = {incident.id: incident for incident in unstored}
        for entry in self._journal.recover(start):
            try:
                taken = self.intake.restore(entry)
            except FrameError as error:
                unreadable += 1
                self.metrics.drop("journal", "unreadable")
                if unreadable == 1:
                    log.warning("%s", error)
                continue
            if taken is None:
                continue
            self.clock.not_before(entry.t_ns)
            if ticks.is_due(entry.t_ns):
                second_ns = entry.t_ns // 10**9 * 10**9
                self._note_old(self._guarded(self._watch.tick, second_ns), entry.t_ns)
            self._note_old(self._judge_one(taken), entry.t_ns)
            self._judged_ns = entry.t_ns
            frames += 1
            self._progress = f"reading the journal back: {frames} frames so far"
        self._hindsight.settle(self.store.knows)
        self._unstored = self._hindsight.only_news(self._unstored)
        self._judged = self._journal.end
        torn, damaged = self._journal.torn_bytes, self._journal.damaged_bytes
        if torn:
            log.warning("journal: its last %d bytes were torn: cut off; senders still have them", torn)
        if damaged > torn:
            log.warning("journal: %d bytes are damaged: what they held is left out", damaged - torn)
        if frames or start is not None:
            since = "" if start is None else " since the checkpoint"
            log.info("journal: %d frames read back%s in %.1f s", frames, since, time.monotonic() - began)

    def _judge(self, group: Sequence[Taken], position: Position) -> None:
        for taken in group:
            self._note_changes(self._judge_one(taken))
            self._judged_ns = taken.t_ns
        self._judged = position

    def _judge_one(self, taken: Taken) -> list[Change]:
        identity = taken.stream.identity
        if not isinstance(taken, BatchTaken):
            return self._guarded(self._hello, taken.identity, taken.t_ns)
        self.nodes.note(taken.evidence.node, taken.t_ns)
        return self._guarded(
            self._watch.take, identity.instance, identity.rank, taken.evidence, taken.margin_s, taken.t_ns
        )

    def _hello(self, identity: Identity, now_ns: int) -> list[Change]:
        self._watch.hello(identity, now_ns)
        return []

    def _tick(self, now_ns: int) -> None:
        self._note_changes(self._guarded(self._watch.tick, now_ns))

    def _guarded(self, call: Callable[P, list[Change]], *args: P.args, **kwargs: P.kwargs) -> list[Change]:
        try:
            return call(*args, **kwargs)
        except Exception:  # noqa: BLE001  # a fault of one engine's evidence must not blind us to the others
            self._failed("watch", "the watch failed")
            return []

    def _failed(self, place: str, what: str) -> None:
        """Count the error being handled, and tell it where it is the first at this line."""
        self.metrics.count("stagewatch.internal.errors", place=place)
        error = sys.exception()
        trace = error.__traceback__ if error else None
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""
        if where not in self._failures_told:
            # Once: evidence that upsets the watch may come a thousand times a second.
            self._failures_told.add(where)
            log.exception("%s: please report this; it is counted from now on, not told", what)

    def _note_old(self, changes: Sequence[Change], t_ns: int) -> None:
        """Take changes found in the journal, in an entry that arrived at ``t_ns``."""
        self._hindsight.note(changes, t_ns)
        self._unstored.update({change.incident.id: change.incident for change in changes})

    def _note_changes(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if self._hindsight.is_news(change.incident):
                self._unstored[change.incident.id] = change.incident
                if self._ready:
                    self._preserver.note(change.incident)
        if self._ready and self._unstored:
            self._unstored_wake.set()

    def _found(self) -> list[Incident]:
        """What was found and is not known to be stored."""
        return [*self._storing.values(), *self._unstored.values()]

    async def _keep_forever(self) -> None:
        """Save where we stand, and remove what is beyond what is kept."""
        prune_s = 0.0
        while True:
            if self._judged is not None and self._checkpoints.is_due(self._judged):
                await self._checkpoints.save(self._judged, self._found)
            if time.monotonic() > prune_s:
                prune_s = time.monotonic() + PRUNE_S
                await self._prune()
            await asyncio.sleep(TICK_S)

    async def _prune(self) -> None:
        settings = self.settings
        try:
            removed = await asyncio.to_thread(
                self.store.prune, settings.keep_incidents, settings.keep_incidents_s, self.clock.now_ns()
            )
        except StoreError as error:
            log.warning("%s", error)
            return
        if removed:
            self.metrics.drop("store", "pruned", removed)
            log.info("%d incidents beyond what is kept were removed", removed)

    async def _tick_forever(self) -> None:
        ticks = Ticks()
        while True:
            now_ns = self.clock.now_ns()
            if ticks.is_due(now_ns):
                self._tick(now_ns)
            if self._telling is not None:
                self.engines()  # the push reads them on a thread of its own
                self._telling.tick(now_ns)
            await asyncio.sleep(TICK_S)

    async def _store_forever(self) -> None:
        while True:
            await self._unstored_wake.wait()
            self._unstored_wake.clear()
            if not await self._store_once():
                await asyncio.sleep(STORE_RETRY_S)
                self._unstored_wake.set()

    def _store_one_by_one(self, pending: Mapping[str, Incident]) -> tuple[list[Event], dict[str, Incident]]:
        """The events of what could be stored, and what the disk did not take. Called on a worker thread."""
        events: list[Event] = []
        left = dict(pending)
        for incident in pending.values():
            try:
                events += self.store.apply([incident])
            except StoreError:
                break
            except Exception:  # noqa: BLE001  # see the caller
                self._failed("store", f"incident {incident.id} cannot be stored")
            del left[incident.id]
        return events, left

    async def _store_once(self) -> bool:
        pending, self._unstored = self._unstored, {}
        if not pending:
            return True
        self._storing = pending
        try:
            events = await asyncio.to_thread(self.store.apply, pending.values(), self._judged_ns)
        except StoreError as error:
            self._unstored = {**pending, **self._unstored}
            if not self._store_failure:
                log.warning("%s", error)
            self._store_failure = str(error)
            return False
        except Exception:  # noqa: BLE001  # one incident that cannot be stored must not keep the others out
            events, left = await asyncio.to_thread(self._store_one_by_one, pending)
            self._unstored = {**left, **self._unstored}
            if left:
                self._unstored_wake.set()
        self._storing = {}
        self._store_failure = ""
        self.hub.publish(events)
        log_incidents(events)
        for event in events:
            if event.kind != "updated":
                self.metrics.incident(event.incident)
        if self._telling is not None:
            self._telling.tell(events, self._states, self.clock.now_ns())
        return True


def lock_directory(directory: Path) -> int:
    """Make ``directory`` and lock it for this process; return the lock's descriptor. Raises SettingsError."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_data_directory(directory)
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise SettingsError(f"data directory {directory} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise SettingsError(
            f"data directory {directory} is used by another collector: stop it, or choose another --data-dir"
        ) from None
    return fd
