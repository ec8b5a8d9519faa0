"""The collector's door: frames in, in order and once; acknowledgements out, when the journal has them.

A stream's records are numbered without gaps, and each batch says how many before it were lost, so a batch either
continues its stream, or repeats what is known, or is wrong. A sidecar is welcomed at what is durable and may repeat
what lies between that and what was offered; only the latter decides what is new. Everything here runs on the event
loop, but for what says otherwise.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from stagewatch.agents import wire
from stagewatch.agents.errors import FrameError, FrameLimitError
from stagewatch.agents.evidence import Evidence
from stagewatch.agents.identity import Identity, Rank
from stagewatch.agents.wire import Batch, Frozen, Hello, Refusal, Welcome
from stagewatch.monitor.clock import Clock
from stagewatch.monitor.identities import fault_of
from stagewatch.monitor.journal import Carried, Entry, EntryKind, Position
from stagewatch.monitor.restoring import Restorer, known_margin_s
from stagewatch.monitor.retention import Span
from stagewatch.monitor.scribe import Scribe
from stagewatch.monitor.sessions import FrameRefusedError, Session, StreamKey
from stagewatch.monitor.settings import CollectorSettings
from stagewatch.monitor.streams import BatchTaken, HelloTaken, Stream, Streams, Taken

CONFLICT_RETRY_S: Final = 5.0
"""When a sidecar that another one keeps out may ask again; the other may be gone, and its connection not yet."""
FRAME_OVERHEAD_BYTES: Final = 4096
"""What the evidence of a frame takes beside its bytes, measured. A frame of one step is smaller than that."""
LOST_MAX: Final = 1 << 40
"""Records that one batch may declare lost: an engine writes so many in years. More would use up the numbers of its
stream, and its true records would never be new again."""


class Intake:
    """All streams, and the way of their frames into the journal and, once safe, to ``durable``."""

    def __init__(
        self,
        settings: CollectorSettings,
        durable: Callable[[Sequence[Taken], Position], None],
        on_sync: Callable[[float], None] = lambda seconds: None,
        clock: Clock | None = None,
        pins: Callable[[], Sequence[Span]] = tuple,
        greeted: Callable[[Stream, Session], None] = lambda stream, session: None,
        frozen: Callable[[Frozen, Stream], None] = lambda frozen, stream: None,
    ) -> None:
        self.clock: Final = clock or Clock()
        self.streams: Final = Streams(settings.ranks_max)
        self.duplicates = 0
        """Batches that were known already."""
        self._limits = settings.limits
        self._engines_max = settings.engines_max
        self._queue_bytes = settings.queue_bytes
        self._durable = durable
        self._greeted = greeted
        self._frozen = frozen
        self._room = asyncio.Event()
        self._room.set()
        self._loop: asyncio.AbstractEventLoop
        self._carried: dict[StreamKey, Carried] = {}
        self._restorer = Restorer(self.streams, settings.limits)
        self.journal: Final[Scribe[Taken]] = Scribe(
            settings.data_dir / "journal",
            settings.policy,
            durable=self._journalled,
            carried=lambda: list(self._carried.values()),
            pins=pins,
            on_sync=on_sync,
            now_ns=self.clock.now_ns,
        )

    def restore(self, entry: Entry) -> Taken | None:
        """Take an entry of the journal at start; None for one that is known. Raises FrameError."""
        return self._restorer.take(entry)

    def open(self) -> None:
        """Take frames from now on, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._carried = {
            key: Carried(stream.identity, stream.durable_seq) for key, stream in self.streams.by_key.items()
        }
        self.journal.start()

    async def room(self) -> None:
        """Wait until the journal's queue has room: the back-pressure on sidecars."""
        await self._room.wait()

    def take(self, message: bytes, session: Session) -> Evidence | None:
        """Take one frame of a session; return its evidence if it had any and is new. Raises FrameRefusedError."""
        try:
            frame = wire.decode_from_sidecar(message, self._limits)
        except FrameError as error:
            code = error.limit if isinstance(error, FrameLimitError) else "malformed"
            raise FrameRefusedError(code, str(error), Refusal(str(error), -1.0)) from None
        if isinstance(frame, Hello):
            self._hello(frame, message, session)
            return None
        if isinstance(frame, Frozen):
            self._take_frozen(frame, session)
            return None
        return self._batch(frame, message, session)

    def leave(self, session: Session) -> None:
        """A session is over."""
        for stream in self.streams.by_key.values():
            stream.sessions.discard(session)

    def _journalled(self, group: Sequence[Taken], position: Position) -> None:
        """A group is safe. Called on the journal's thread, which alone carries positions into new segments."""
        for taken in group:
            key = taken.stream.key
            carried = self._carried.get(key)
            if isinstance(taken, BatchTaken):
                identity = carried.identity if carried else taken.stream.identity
                self._carried[key] = Carried(identity, taken.next_seq)
            else:
                next_seq = max(taken.next_seq, carried.next_seq if carried else 0)
                self._carried[key] = Carried(taken.identity, next_seq)
        self._loop.call_soon_threadsafe(self._settle, group, position)

    def _hello(self, hello: Hello, message: bytes, session: Session) -> None:
        identity = hello.identity
        refuse = _refuser(identity.instance, identity.rank)
        if hello.protocol != wire.PROTOCOL:
            side = "the collector" if hello.protocol > wire.PROTOCOL else "the sidecar"
            raise refuse(
                "protocol",
                f"protocol {hello.protocol}, this collector speaks {wire.PROTOCOL}: upgrade {side}",
            )
        fault = fault_of(identity)
        if fault:
            raise refuse("identity", f"identity: {fault}")
        if session.deployments is not None and identity.deployment not in session.deployments:
            raise refuse("forbidden", f"this token is not good for deployment {identity.deployment}")
        key = (identity.instance, identity.rank)
        now = self.clock.now_ns()
        if not self.streams.agrees(identity):
            raise refuse("identity", "identity: deployment or sizes differ from what another rank of it said")
        if self.streams.started_ns(key) not in (None, identity.started_ns):
            raise refuse(
                "identity",
                "identity: another life of an engine of this instance is known: "
                "give each start an instance of its own",
            )
        stream = self.streams.by_key.get(key)
        if stream is None:
            stream = self._opened(identity, now, refuse)
            is_news = True
        else:
            _check_undisputed(stream, identity, session, refuse)
            is_news = stream.identity != identity
            stream.identity = identity
        if is_news:
            taken = HelloTaken(stream, identity, now, stream.durable_seq)
            self._offer(EntryKind.HELLO, now, message, taken)
        stream.heard_ns = now
        stream.sessions.add(session)
        session.answer(Welcome(identity.instance, identity.rank, stream.durable_seq))
        session.freezes |= hello.freezes
        self._greeted(stream, session)

    def _take_frozen(self, frozen: Frozen, session: Session) -> None:
        refuse = _refuser(frozen.instance, frozen.rank)
        stream = self.streams.by_key.get((frozen.instance, frozen.rank))
        if stream is None or session not in stream.sessions:
            raise refuse("no_hello", "a window of a rank that said no hello on this connection")
        if not (0 <= frozen.first_step < 2**63 and 0 <= frozen.last_step < 2**63):
            raise refuse("malformed", "a window of steps that cannot be")
        self._frozen(frozen, stream)

    def _opened(self, identity: Identity, now_ns: int, refuse: Callable[..., FrameRefusedError]) -> Stream:
        if len(self.streams.by_key) >= self.streams.most:
            parked = self.streams.make_room(now_ns)
            if parked is None:
                raise refuse(
                    "too_many",
                    f"{self.streams.most} ranks stream already: raise --ranks-max",
                    retry_s=60.0,
                )
            self._carried.pop(parked, None)
        while self.streams.is_crowded(identity, self._engines_max):
            parked = self.streams.make_room(now_ns, deployment=identity.deployment)
            if parked is None:
                raise refuse(
                    "too_many",
                    f"{self._engines_max} engines of {identity.deployment} are known already: raise --engines-max",
                    retry_s=60.0,
                )
            self._carried.pop(parked, None)
        return self.streams.open(identity, now_ns)

    def _batch(self, batch: Batch, message: bytes, session: Session) -> Evidence | None:
        key = (batch.instance, batch.rank)
        refuse = _refuser(*key)
        stream = self.streams.by_key.get(key)
        if stream is None or session not in stream.sessions:
            raise refuse("no_hello", "a batch of a rank that said no hello on this connection")
        if batch.next_seq <= stream.offered_seq:
            self.duplicates += 1
            session.ack(key, stream.durable_seq)
            return None
        if batch.first_seq - batch.lost != stream.offered_seq:
            raise refuse(
                "out_of_order",
                f"batch begins at {batch.first_seq - batch.lost}, expected {stream.offered_seq}",
                retry_s=0.0,
            )
        if batch.lost > LOST_MAX:
            raise refuse("out_of_order", f"{batch.lost} records lost at once are more than an engine writes")
        try:
            evidence = wire.evidence_of(batch, self._limits)
        except FrameError as error:
            code = error.limit if isinstance(error, FrameLimitError) else "evidence"
            raise refuse(code, str(error), next_seq=batch.next_seq) from None
        if stream.unheard:
            evidence = replace(evidence, lost=evidence.lost + stream.unheard)
            stream.unheard = 0
        now = self.clock.now_ns()
        stream.heard_ns = now
        stream.offered_seq = batch.next_seq
        self._offer(
            EntryKind.BATCH,
            now,
            message,
            BatchTaken(stream, now, known_margin_s(batch.margin_s), batch.next_seq, evidence),
        )
        return evidence

    def _offer(self, kind: EntryKind, now_ns: int, message: bytes, taken: Taken) -> None:
        self.journal.offer(Entry(kind, now_ns, message), taken)
        if self._memory_waiting() > self._queue_bytes:
            self._room.clear()

    def _settle(self, group: Sequence[Taken], position: Position) -> None:
        for taken in group:
            if isinstance(taken, BatchTaken):
                stream = taken.stream
                stream.durable_seq = taken.next_seq
                for session in stream.sessions:
                    session.ack(stream.key, taken.next_seq)
        if self._memory_waiting() <= self._queue_bytes:
            self._room.set()
        self._durable(group, position)

    def _memory_waiting(self) -> int:
        """About what frames that wait for the disk take: themselves, their parts, and the arrays over those."""
        return 2 * self.journal.bytes_waiting + FRAME_OVERHEAD_BYTES * self.journal.entries_waiting


def _check_undisputed(
    stream: Stream, identity: Identity, session: Session, refuse: Callable[..., FrameRefusedError]
) -> None:
    """A rank that is known says hello again: it must digest as whoever streams it now does."""
    if identity != stream.identity and stream.sessions - {session}:
        raise refuse(
            "identity",
            "identity: another sidecar streams this rank with another configuration: stop it, or compare their keys",
            retry_s=CONFLICT_RETRY_S,
        )


def _refuser(instance: str, rank: Rank) -> Callable[..., FrameRefusedError]:
    def refuse(code: str, message: str, *, retry_s: float = -1.0, next_seq: int = -1) -> FrameRefusedError:
        return FrameRefusedError(code, message, Refusal(message, retry_s, instance, rank, next_seq))

    return refuse
