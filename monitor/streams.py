"""The streams: one rank of one life of an engine each, and how far the collector has come with it.

Two positions matter: `offered_seq`, up to which batches were taken, and `durable_seq`, up to which they are safe.
A stream that was idle for long makes room for others; its position is remembered all the same, for a sidecar
that comes back must not make the collector take a record twice.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from stagewatch.agents.evidence import Evidence
from stagewatch.agents.identity import Identity, Sizes
from stagewatch.monitor.sessions import Session, StreamKey

IDLE_FORGET_NS: Final = 3600 * 10**9
"""A stream unheard of for so long makes room for a new one, if there are too many."""
PARKED_MAX: Final = 65_536
"""Streams that made room, and whose positions are remembered."""


@dataclass(slots=True)
class Stream:
    """One rank of one life of one engine."""

    identity: Identity
    offered_seq: int
    durable_seq: int
    heard_ns: int
    sessions: set[Session] = field(default_factory=set)
    unheard: int = 0
    """Records that were taken once and that the journal no longer has: lost, as the next evidence will say."""

    @property
    def key(self) -> StreamKey:
        """Instance and rank."""
        return self.identity.instance, self.identity.rank


@dataclass(frozen=True, slots=True)
class Parked:
    """What is remembered of a stream that made room."""

    started_ns: int
    next_seq: int


@dataclass(frozen=True, slots=True)
class HelloTaken:
    """A hello on its way through the journal."""

    stream: Stream
    identity: Identity
    """What this hello said; the stream's may be newer by the time it is judged."""
    t_ns: int
    next_seq: int = 0
    """Where the stream stood."""


@dataclass(frozen=True, slots=True)
class BatchTaken:
    """A batch on its way through the journal."""

    stream: Stream
    t_ns: int
    margin_s: float
    next_seq: int
    evidence: Evidence


Taken = HelloTaken | BatchTaken


class Streams:
    """All streams, at most ``most`` at a time."""

    def __init__(self, most: int) -> None:
        self.most: Final = most
        self.by_key: Final[dict[StreamKey, Stream]] = {}
        self.parked: Final[OrderedDict[StreamKey, Parked]] = OrderedDict()
        self.forgotten = 0
        """Streams whose positions are no longer remembered: should one come back, its ring is taken anew."""
        self._engines: dict[str, tuple[str, Sizes]] = {}

    def agrees(self, identity: Identity) -> bool:
        """Whether a rank says of its engine what the others of it said."""
        said = (identity.deployment, identity.sizes)
        return self._engines.get(identity.instance, said) == said

    def started_ns(self, key: StreamKey) -> int | None:
        """When the known life of a rank began; None if there is none."""
        stream, parked = self.by_key.get(key), self.parked.get(key)
        if stream is not None:
            return stream.identity.started_ns
        return None if parked is None else parked.started_ns

    def open(self, identity: Identity, now_ns: int) -> Stream:
        """A new stream, or one that made room once, from where it stood."""
        key = (identity.instance, identity.rank)
        parked = self.parked.pop(key, None)
        next_seq = parked.next_seq if parked is not None else 0
        self._engines.setdefault(identity.instance, (identity.deployment, identity.sizes))
        stream = self.by_key[key] = Stream(identity, next_seq, next_seq, now_ns)
        return stream

    def is_crowded(self, identity: Identity, most: int) -> bool:
        """Whether a rank's engine is a new one, and its deployment has as many as it may."""
        if identity.instance in self._engines:
            return False
        return sum(name == identity.deployment for name, _ in self._engines.values()) >= most

    def make_room(
        self, now_ns: int, idle_ns: int = IDLE_FORGET_NS, deployment: str | None = None
    ) -> StreamKey | None:
        """Park the stream (of a deployment) that is idle for longest, if one is for long enough; return its key."""
        idle = [
            (stream.heard_ns, key)
            for key, stream in self.by_key.items()
            if not stream.sessions
            and stream.durable_seq == stream.offered_seq
            and now_ns - stream.heard_ns > idle_ns
            and deployment in (None, stream.identity.deployment)
        ]
        if not idle:
            return None
        key = min(idle)[1]
        stream = self.by_key.pop(key)
        self.park(key, Parked(stream.identity.started_ns, stream.durable_seq))
        if not any(instance == key[0] for instance, _ in self.by_key):
            self._engines.pop(key[0], None)
        return key

    def park(self, key: StreamKey, parked: Parked) -> None:
        """Remember where a stream stood."""
        self.parked[key] = parked
        if len(self.parked) > PARKED_MAX:
            self.parked.popitem(last=False)
            self.forgotten += 1
