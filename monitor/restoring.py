"""The journal read back: its entries as what they were when they were taken."""

import math
from dataclasses import replace
from typing import Final

import msgspec

from stagewatch.agents import wire
from stagewatch.agents.errors import FrameError
from stagewatch.agents.identity import Identity
from stagewatch.agents.wire import Hello, Limits
from stagewatch.monitor.journal import Carried, Entry, EntryKind
from stagewatch.monitor.streams import BatchTaken, HelloTaken, Streams, Taken


class Restorer:
    """Brings ``streams`` to where the journal says they were."""

    def __init__(self, streams: Streams, limits: Limits) -> None:
        self._streams: Final = streams
        self._limits = limits

    def take(self, entry: Entry) -> Taken | None:
        """Take an entry; None for one that is known. Raises FrameError for one that this build cannot read."""
        if entry.kind is EntryKind.CARRIED:
            carried = _decode_carried(entry.payload)
            return self._hello(carried.identity, carried.next_seq, entry.t_ns)
        frame = wire.decode_upward(entry.payload, self._limits)
        if isinstance(frame, Hello):
            return self._hello(frame.identity, 0, entry.t_ns)
        stream = self._streams.by_key.get((frame.instance, frame.rank))
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
        stream.offered_seq = stream.durable_seq = frame.next_seq
        stream.heard_ns = entry.t_ns
        return BatchTaken(stream, entry.t_ns, known_margin_s(frame.margin_s), frame.next_seq, evidence)

    def _hello(self, identity: Identity, next_seq: int, t_ns: int) -> Taken:
        key = (identity.instance, identity.rank)
        streams = self._streams
        stream = streams.by_key.get(key)
        if stream is None:
            if len(streams.by_key) >= streams.most:
                streams.make_room(t_ns, idle_ns=-1)
            known = key in streams.parked
            stream = streams.open(identity, t_ns)
            if not known:
                stream.offered_seq = stream.durable_seq = next_seq
        stream.identity = identity
        stream.unheard += max(next_seq - stream.durable_seq, 0)
        stream.offered_seq = stream.durable_seq = max(next_seq, stream.durable_seq)
        stream.heard_ns = t_ns
        return HelloTaken(stream, identity, t_ns, stream.durable_seq)


def known_margin_s(margin_s: float) -> float:
    """A margin as a frame tells it, negative where that is no number of seconds."""
    return margin_s if math.isfinite(margin_s) else -1.0


def identity_of(entry: Entry) -> Identity:
    """Whom an entry that is no batch is about. Raises FrameError."""
    if entry.kind is EntryKind.CARRIED:
        return _decode_carried(entry.payload).identity
    frame = wire.decode_upward(entry.payload, Limits())
    if not isinstance(frame, Hello):
        raise FrameError("journal: a batch where a hello belongs")
    return frame.identity


def _decode_carried(payload: bytes) -> Carried:
    try:
        return msgspec.msgpack.decode(payload, type=Carried)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"journal: a damaged position: {error}") from None
