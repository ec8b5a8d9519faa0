"""The collector's door: frames in, in order and once; acknowledgements out, when the journal has them.

A stream is one rank of one life of one engine. Its records are numbered without gaps, and each batch says
how many before it were lost, so a batch either continues its stream, or repeats what is known, or is wrong.
Two positions matter: `offered_seq`, up to which batches were taken, and `durable_seq`, up to which they are
safe. A sidecar is welcomed at the second and may repeat what lies between; only the first decides what is
new. Everything here runs on the event loop, but for what says otherwise.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from stagewatch.agents import wire
from stagewatch.agents.errors import FrameError
from stagewatch.agents.evidence import Evidence
from stagewatch.agents.identity import Identity, Rank, Sizes
from stagewatch.agents.wire import Ack, Batch, Downward, Hello, Refusal, Welcome
from stagewatch.monitor.clock import Clock
from stagewatch.monitor.journal import Carried, Entry, EntryKind, Journal
from stagewatch.monitor.settings import CollectorSettings

StreamKey = tuple[str, Rank]

IDLE_FORGET_NS: Final = 3600 * 10**9
"""A stream unheard of for so long makes room for a new one, if there are too many."""
CONFLICT_RETRY_S: Final = 5.0
"""When a sidecar that another one keeps out may ask again; the other may be gone, and its connection not yet."""
FRAME_OVERHEAD_BYTES: Final = 4096
"""What the evidence of a frame takes beside its bytes, measured. A frame of one step is smaller than that."""
BAD_FRAMES_MAX: Final = 3
"""Refused frames after which a connection is closed. Refused hellos do not count: the other ranks go on."""


class FrameRefusedError(FrameError):
    """A frame that is not taken; ``code`` is the reason as a label, one of `REFUSAL_CODES`."""

    def __init__(self, code: str, message: str, answer: Refusal) -> None:
        super().__init__(message)
        self.code: Final = code
        self.answer: Final = answer


HELLO_CODES: Final = ("protocol", "identity", "too_many")
"""Reasons for which a hello is refused."""
REFUSAL_CODES: Final = (
    "malformed",
    "no_hello",
    "out_of_order",
    "evidence",
    *HELLO_CODES,
)


@dataclass(slots=True)
class Stream:
    """One rank of one life of one engine."""

    identity: Identity
    offered_seq: int
    durable_seq: int
    heard_ns: int
    sessions: "set[Session]" = field(default_factory=set)
    unheard: int = 0
    """Records that were taken once and that the journal no longer has: lost, as the next evidence will say."""


@dataclass(frozen=True, slots=True)
class HelloTaken:
    """A hello on its way through the journal."""

    stream: Stream
    identity: Identity
    """What this hello said; the stream's may be newer by the time it is judged."""
    t_ns: int


@dataclass(frozen=True, slots=True)
class BatchTaken:
    """A batch on its way through the journal."""

    stream: Stream
    t_ns: int
    margin_s: float
    next_seq: int
    evidence: Evidence


Taken = HelloTaken | BatchTaken


class Session:
    """One connection of a sidecar: what is still to be said to it."""

    def __init__(self) -> None:
        self.bad_frames = 0
        """Frames refused on this connection that no sound sidecar sends."""
        self.refused_hellos = 0
        self._acks: dict[StreamKey, int] = {}
        self._welcomes: dict[StreamKey, Welcome] = {}
        self._refusals: list[Refusal] = []
        self._wake = asyncio.Event()

    def ack(self, key: StreamKey, next_seq: int) -> None:
        """Acknowledge a stream; a newer acknowledgement replaces one not yet sent."""
        self._acks[key] = next_seq
        self._wake.set()

    def answer(self, frame: Welcome | Refusal) -> None:
        """Send a frame.

        One welcome a stream, however often it says hello, and refusals are limited: a peer that does not read
        costs no more than that.
        """
        if isinstance(frame, Welcome):
            self._welcomes[frame.instance, frame.rank] = frame
        else:
            self._refusals.append(frame)
        self._wake.set()

    def refuse(self, refused: FrameRefusedError, hellos_max: int) -> bool:
        """Answer a refused frame; whether the peer has sent so many that it is given up."""
        self.answer(refused.answer)
        if refused.code in HELLO_CODES:
            self.refused_hellos += 1
        else:
            self.bad_frames += 1
        return self.bad_frames >= BAD_FRAMES_MAX or self.refused_hellos > hellos_max

    async def outgoing(self) -> list[bytes]:
        """What to send next; waits until there is something."""
        await self._wake.wait()
        return self.pending()

    def pending(self) -> list[bytes]:
        """What to send now."""
        self._wake.clear()
        frames: list[Downward] = [*self._welcomes.values(), *self._refusals]
        frames += [Ack(instance, rank, seq) for (instance, rank), seq in self._acks.items()]
        self._welcomes, self._refusals, self._acks = {}, [], {}
        return [wire.encode_frame(frame) for frame in frames]


class Intake:
    """All streams, and the way of their frames into the journal and, once safe, to ``durable``."""

    def __init__(
        self,
        settings: CollectorSettings,
        durable: Callable[[Sequence[Taken]], None],
        on_sync: Callable[[float], None] = lambda seconds: None,
        clock: Clock | None = None,
    ) -> None:
        self.clock: Final = clock or Clock()
        self.streams: Final[dict[StreamKey, Stream]] = {}
        self.duplicates = 0
        """Batches that were known already."""
        self._limits = settings.limits
        self._streams_max = settings.ranks_max
        self._queue_bytes = settings.queue_bytes
        self._durable = durable
        self._room = asyncio.Event()
        self._room.set()
        self._loop: asyncio.AbstractEventLoop
        self._carried: dict[StreamKey, Carried] = {}
        self._engines: dict[str, tuple[str, Sizes]] = {}
        self.journal: Final[Journal[Taken]] = Journal(
            settings.data_dir / "journal",
            durable=self._journalled,
            carried=lambda: list(self._carried.values()),
            segment_bytes=settings.segment_bytes,
            keep_bytes=settings.keep_bytes,
            on_sync=on_sync,
        )

    def open(self) -> None:
        """Take frames from now on, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.journal.start()

    async def room(self) -> None:
        """Wait until the journal's queue has room: the back-pressure on sidecars."""
        await self._room.wait()

    def take(self, message: bytes, session: Session) -> Evidence | None:
        """Take one frame of a session; return its evidence if it had any and is new. Raises FrameRefusedError."""
        try:
            frame = wire.decode_upward(message, self._limits)
        except FrameError as error:
            raise FrameRefusedError("malformed", str(error), Refusal(str(error), -1.0)) from None
        if isinstance(frame, Hello):
            self._hello(frame, message, session)
            return None
        return self._batch(frame, message, session)

    def leave(self, session: Session) -> None:
        """A session is over."""
        for stream in self.streams.values():
            stream.sessions.discard(session)

    def _journalled(self, group: Sequence[Taken]) -> None:
        """A group is safe. Called on the journal's thread, which alone carries positions into new segments."""
        for taken in group:
            identity = taken.stream.identity
            key = (identity.instance, identity.rank)
            carried = self._carried.get(key)
            if isinstance(taken, BatchTaken):
                self._carried[key] = Carried(carried.identity if carried else identity, taken.next_seq)
            else:
                self._carried[key] = Carried(taken.identity, carried.next_seq if carried else 0)
        self._loop.call_soon_threadsafe(self._settle, group)

    def restore(self, entry: Entry) -> Taken | None:
        """Take an entry of the journal at start; None for one that is known or unreadable.

        Raises FrameError for an entry that this build cannot read.
        """
        if entry.kind is EntryKind.CARRIED:
            carried = _decode_carried(entry.payload)
            return self._restore_hello(carried.identity, carried.next_seq, entry.t_ns)
        frame = wire.decode_upward(entry.payload, self._limits)
        if isinstance(frame, Hello):
            return self._restore_hello(frame.identity, 0, entry.t_ns)
        stream = self.streams.get((frame.instance, frame.rank))
        if stream is None:
            raise FrameError(f"journal: a batch of {frame.instance[:40]!r}, which never said hello")
        if frame.next_seq <= stream.durable_seq:
            return None
        evidence = wire.evidence_of(frame, self._limits)
        # More than the frame says where damage lies between.
        lost = max(frame.first_seq - stream.durable_seq, 0) + stream.unheard
        stream.unheard = 0
        if lost != evidence.lost:
            evidence = replace(evidence, lost=lost)
        self._advance(stream, frame.next_seq, entry.t_ns)
        return BatchTaken(stream, entry.t_ns, known_margin_s(frame.margin_s), frame.next_seq, evidence)

    def _restore_hello(self, identity: Identity, next_seq: int, t_ns: int) -> Taken:
        key = (identity.instance, identity.rank)
        self._engines.setdefault(identity.instance, (identity.deployment, identity.sizes))
        stream = self.streams.get(key)
        if stream is None:
            stream = self.streams[key] = Stream(identity, 0, next_seq, t_ns)
        stream.identity = identity
        stream.unheard += max(next_seq - stream.durable_seq, 0)
        self._advance(stream, max(next_seq, stream.durable_seq), t_ns)
        return HelloTaken(stream, identity, t_ns)

    def _advance(self, stream: Stream, next_seq: int, t_ns: int) -> None:
        stream.offered_seq = stream.durable_seq = next_seq
        stream.heard_ns = t_ns
        self._carried[stream.identity.instance, stream.identity.rank] = Carried(stream.identity, next_seq)

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
        key = (identity.instance, identity.rank)
        now = self.clock.now_ns()
        said = (identity.deployment, identity.sizes)
        if self._engines.get(identity.instance, said) != said:
            raise refuse("identity", "identity: deployment or sizes differ from what another rank of it said")
        stream = self.streams.get(key)
        if stream is not None:
            _check_same(stream, identity, session, refuse)
        if stream is None:
            if len(self.streams) >= self._streams_max and not self._forget_idle(now):
                raise refuse(
                    "too_many",
                    f"{self._streams_max} ranks stream already: raise --ranks-max",
                    retry_s=60.0,
                )
            self._engines[identity.instance] = said
            stream = self.streams[key] = Stream(identity, 0, 0, now)
            self._offer(EntryKind.HELLO, now, message, HelloTaken(stream, identity, now))
        elif stream.identity != identity:
            stream.identity = identity
            self._offer(EntryKind.HELLO, now, message, HelloTaken(stream, identity, now))
        stream.heard_ns = now
        stream.sessions.add(session)
        session.answer(Welcome(identity.instance, identity.rank, stream.durable_seq))

    def _batch(self, batch: Batch, message: bytes, session: Session) -> Evidence | None:
        key = (batch.instance, batch.rank)
        refuse = _refuser(*key)
        stream = self.streams.get(key)
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
        try:
            evidence = wire.evidence_of(batch, self._limits)
        except FrameError as error:
            raise refuse("evidence", str(error), next_seq=batch.next_seq) from None
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

    def _settle(self, group: Sequence[Taken]) -> None:
        for taken in group:
            if isinstance(taken, BatchTaken):
                stream = taken.stream
                stream.durable_seq = taken.next_seq
                for session in stream.sessions:
                    session.ack((stream.identity.instance, stream.identity.rank), taken.next_seq)
        if self._memory_waiting() <= self._queue_bytes:
            self._room.set()
        self._durable(group)

    def _memory_waiting(self) -> int:
        """About what frames that wait for the disk take: themselves, their parts, and the arrays over those."""
        return 2 * self.journal.bytes_waiting + FRAME_OVERHEAD_BYTES * self.journal.entries_waiting

    def _forget_idle(self, now_ns: int) -> bool:
        idle = [
            (stream.heard_ns, key)
            for key, stream in self.streams.items()
            if not stream.sessions
            and stream.durable_seq == stream.offered_seq
            and now_ns - stream.heard_ns > IDLE_FORGET_NS
        ]
        if not idle:
            return False
        key = min(idle)[1]
        del self.streams[key]
        self._carried.pop(key, None)
        if not any(instance == key[0] for instance, _ in self.streams):
            self._engines.pop(key[0], None)
        return True


def known_margin_s(margin_s: float) -> float:
    """A margin as a frame tells it, negative where that is no number of seconds."""
    return margin_s if math.isfinite(margin_s) else -1.0


def _check_same(
    stream: Stream, identity: Identity, session: Session, refuse: Callable[..., FrameRefusedError]
) -> None:
    """A rank that is known says hello again: it must be the same one, and digest as whoever streams it now does."""
    if identity.started_ns != stream.identity.started_ns:
        raise refuse(
            "identity",
            "identity: another life of an engine of this instance is known: give each start an instance of its own",
        )
    if identity != stream.identity and stream.sessions - {session}:
        raise refuse(
            "identity",
            "identity: another sidecar streams this rank with another configuration: stop it, or compare their keys",
            retry_s=CONFLICT_RETRY_S,
        )


def fault_of(identity: Identity) -> str:
    """What makes an identity unacceptable; empty if nothing does."""
    rank, sizes = identity.rank, identity.sizes
    if not all(1 <= size <= 4096 for size in (sizes.dp, sizes.pp, sizes.tp)):
        return "a parallel size outside 1 to 4096"
    if sizes.pp * sizes.tp > 4096:
        return f"{sizes.pp} stages of {sizes.tp} ranks exceed 4096 ranks to compare"
    if not (0 <= rank.dp < sizes.dp and 0 <= rank.pp < sizes.pp and 0 <= rank.tp < sizes.tp):
        return f"rank {rank} is outside its own sizes"
    if not _is_name(identity.deployment, 64) or not _is_name(identity.instance, 128):
        return "deployment or instance is not 1 to 64 (128) letters, digits, dots, dashes or underscores"
    texts = (identity.host, identity.engine, identity.engine_version, identity.variant)
    if any(len(text) > 256 or not text.isprintable() for text in texts):
        return "host, engine, version or variant is longer than 256 characters or not printable"
    if len(identity.config) > 256 or any(len(f.name) > 128 or len(f.value) > 1024 for f in identity.config):
        return "more than 256 configuration fingerprints, or one of more than 1024 characters"
    return ""


def _is_name(text: str, length_max: int) -> bool:
    return 1 <= len(text) <= length_max and text.isascii() and all(c.isalnum() or c in "._-" for c in text)


def _refuser(instance: str, rank: Rank) -> Callable[..., FrameRefusedError]:
    def refuse(code: str, message: str, *, retry_s: float = -1.0, next_seq: int = -1) -> FrameRefusedError:
        return FrameRefusedError(code, message, Refusal(message, retry_s, instance, rank, next_seq))

    return refuse


def _decode_carried(payload: bytes) -> Carried:
    try:
        return msgspec.msgpack.decode(payload, type=Carried)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"journal: a damaged position: {error}") from None
