"""Tailing one ring: from its records to frames that wait for their acknowledgement.

A tail knows three positions, all counts of records: up to which the collector has acknowledged, up to which
frames were sent on this connection, and up to which the ring was read. Frames between the first and the
last are held, up to a bound; at the bound the tail stops reading, the ring's writer overruns it in time, and
what was overwritten is counted as lost in the next frame. So memory is bounded, and nothing is lost unseen.
"""

import logging
import os
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from stagewatch.agents import record, wire
from stagewatch.agents.digest import Digester
from stagewatch.agents.evidence import EventBlock, Evidence, InputsBlock, PayloadBlock, digest_records
from stagewatch.agents.identity import Fingerprint, Identity, Node
from stagewatch.agents.record import U64, Kind, Record
from stagewatch.agents.ring import RingReader

log = logging.getLogger("stagewatch.sidecar")

RECORDS_PER_FRAME: Final = 1024
BYTES_PER_FRAME: Final = 4 << 20
"""Bytes of records that make a frame full; the frame itself is smaller."""
RATE_SPAN_S: Final = 1.0
"""Time over which a ring's rate is taken."""
FRAME_BYTES_MAX: Final = wire.Limits().frame_bytes
"""Longest frame that a collector takes; it would break off the connection over a longer one, each time anew."""


@dataclass(frozen=True, slots=True)
class Privacy:
    """What may leave the node, and under which key."""

    digester: Digester
    key_fingerprint: Fingerprint
    raw_tokens: bool
    pseudonymise: bool
    """Replace request ids and their keys by keyed digests."""

    @property
    def fingerprints(self) -> tuple[Fingerprint, ...]:
        """What ranks show of this, so that those made differently are never compared."""
        return self.key_fingerprint, Fingerprint(
            "request_ids", "pseudonyms" if self.pseudonymise else "plain"
        )


@dataclass(frozen=True, slots=True)
class Held:
    """A frame that the collector has not acknowledged."""

    first_seq: int
    next_seq: int
    message: bytes


class Tail:
    """One ring. Raises RingError where the file is none."""

    def __init__(self, path: Path, privacy: Privacy) -> None:
        self._reader: Final = RingReader(path)
        self._privacy = privacy
        self._file = _file_at(path)
        found = self._reader.identity
        self.path: Final = path
        self.identity: Final[Identity] = msgspec.structs.replace(
            found, config=(*found.config, *privacy.fingerprints)
        )
        self.welcomed = False
        """Whether the collector knows this rank on the present connection."""
        self.refused = ""
        """Why the collector does not want this rank; empty if it does."""
        self.read_seq = 0
        """One past the last record read and covered by a frame."""
        self.lost = 0
        """Records overwritten or damaged before they were read, or refused for good."""
        self._held: deque[Held] = deque()
        self._held_bytes = 0
        self._sent = 0
        """How many of the held frames were sent on this connection."""
        self._condemned_seq = 0
        """Records below this are not to be sent again: the collector refused them for good."""
        self._beyond = -1
        """A welcome beyond what the ring holds that was told."""
        self._carry: Record | None = None
        """A record already read that begins after a gap, and so begins the next frame."""
        self._rate = Rate()

    @property
    def held_bytes(self) -> int:
        """Bytes of frames that wait for their acknowledgement."""
        return self._held_bytes

    @property
    def unacknowledged(self) -> int:
        """Records read and not acknowledged."""
        return self.read_seq - self._held[0].first_seq if self._held else 0

    @property
    def is_drained(self) -> bool:
        """Whether everything in the ring was read and acknowledged."""
        return not self._held and self._carry is None and self._reader.margin().bytes_behind == 0

    @property
    def is_in_place(self) -> bool:
        """Whether the file at the path is still the one being read, and whole."""
        return self._reader.is_whole and self._file is not None and _file_at(self.path) == self._file

    def disconnected(self) -> None:
        """The connection is gone: what is held must be sent again."""
        self.welcomed = False
        self._sent = 0

    def welcome(self, next_seq: int) -> None:
        """The collector has everything before ``next_seq``: go on from there."""
        self.welcomed = True
        self.refused = ""
        self._sent = 0
        self.acknowledge(next_seq)
        first = self._held[0].first_seq if self._held else self.read_seq
        if next_seq > max(self._reader.records_written, self.read_seq) and next_seq != self._beyond:
            self._beyond = next_seq
            log.warning(
                "rank %s: the collector says it has %d records of a ring that holds %d: something else streamed this "
                "rank. What the ring holds counts as known until the engine is started anew.",
                self.identity.rank,
                next_seq,
                self._reader.records_written,
            )
        if first != next_seq:
            # It has less than it once said, or a frame of another life of this sidecar ended elsewhere.
            self._start_over(next_seq)

    def acknowledge(self, next_seq: int) -> None:
        """Everything before ``next_seq`` is safe."""
        while self._held and self._held[0].next_seq <= next_seq:
            self._held_bytes -= len(self._held.popleft().message)
            self._sent = max(self._sent - 1, 0)

    def condemn(self, next_seq: int) -> None:
        """The collector will never take the records before ``next_seq``: leave them out, and count them."""
        self._condemned_seq = max(self._condemned_seq, next_seq)
        self._start_over(self._held[0].first_seq if self._held else self.read_seq)

    def unsent(self) -> Held | None:
        """The next frame to send on this connection; it counts as sent from now on."""
        if not self.welcomed or self._sent >= len(self._held):
            return None
        self._sent += 1
        return self._held[self._sent - 1]

    def read(self, held_bytes_max: int, node: Node | None = None) -> bool:
        """Read records into one more frame, if there are any and the bound allows. Whether the ring had any.

        ``node`` is what the sidecar tells of itself.
        """
        self._rate.note(self._reader.margin().bytes_written)
        if self._held_bytes >= held_bytes_max:
            return False
        records, moved = self._contiguous_records()
        if not records:
            return moved
        lost = records[0].seq - self.read_seq
        self.lost += lost
        left_out = max(min(self._condemned_seq, records[0].seq) - self.read_seq, 0)
        evidence = digest_records(
            records, self.identity, self._privacy.digester, lost=lost, raw=self._privacy.raw_tokens
        )
        evidence = replace(evidence, left_out=left_out, node=node)
        if self._privacy.pseudonymise:
            evidence = pseudonymised(evidence, self._privacy.digester)
        message = wire.encode_frame(wire.batch_of(self.identity, evidence, self.margin_s()))
        if len(message) > FRAME_BYTES_MAX:
            self._leave_out(evidence, len(message))
            return True
        self._held.append(Held(self.read_seq, evidence.next_seq, message))
        self._held_bytes += len(message)
        self.read_seq = evidence.next_seq
        return True

    def _leave_out(self, evidence: Evidence, size: int) -> None:
        """No collector takes a frame so long: its records are lost, and the next frame says so."""
        self.lost -= evidence.lost  # the next frame's gap begins where this one's did, and is counted there
        self._condemned_seq = max(self._condemned_seq, evidence.next_seq)
        log.warning(
            "rank %s: %d records left out: a frame of %d bytes exceeds %d",
            self.identity.rank,
            evidence.next_seq - evidence.first_seq,
            size,
            FRAME_BYTES_MAX,
        )

    def margin_s(self) -> float:
        """Seconds until the writer overtakes us at its present rate; negative if unknown."""
        rate = self._rate.bytes_per_s
        return self._reader.margin().bytes_free / rate if rate > 0 else -1.0

    def close(self) -> None:
        """Let go of the ring."""
        self._reader.close()

    def _start_over(self, next_seq: int) -> None:
        """Read the ring again, for frames from ``next_seq`` on."""
        self._held.clear()
        self._held_bytes = self._sent = 0
        self._carry = None
        self._reader.rewind()
        self.read_seq = next_seq

    def _contiguous_records(self) -> tuple[list[Record], bool]:
        """Records for one frame, without a gap between them and not too many; whether the ring had any at all."""
        records: list[Record] = []
        size = 0
        moved = self._carry is not None
        skip_below = max(self.read_seq, self._condemned_seq)
        if self._carry is not None:
            records.append(self._carry)
            self._carry = None
        for found in self._reader.read(RECORDS_PER_FRAME):
            moved = True
            if found.seq < skip_below:
                continue
            if records and found.seq != records[-1].seq + 1:
                self._carry = found
                break
            records.append(found)
            size += record.size_of(found.body)
            if size >= BYTES_PER_FRAME:
                break
        return records, moved


def _file_at(path: Path) -> tuple[int, int] | None:
    """Device and inode of the file at ``path``; None if there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Rate:
    """Growth of a counter in bytes per second, over about `RATE_SPAN_S`."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self._bytes = -1
        self._at = 0.0

    def note(self, bytes_written: int) -> None:
        """Tell the counter's present value."""
        now = time.monotonic()
        if self._bytes < 0:
            self._bytes, self._at = bytes_written, now
        elif now - self._at >= RATE_SPAN_S:
            self.bytes_per_s = (bytes_written - self._bytes) / (now - self._at)
            self._bytes, self._at = bytes_written, now


def pseudonymised(evidence: Evidence, digester: Digester) -> Evidence:
    """The same evidence with request ids and keys replaced by keyed digests; equal on all ranks of a key."""

    def masked(keys: U64) -> U64:
        halves = np.ascontiguousarray(keys).view("<i4").reshape(-1, 2)
        digests = digester.prefixes(halves, np.full(len(halves), 2, np.int32))
        return np.where(keys == 0, keys, digests)

    def payload(block: PayloadBlock | None) -> PayloadBlock | None:
        return None if block is None else replace(block, request=masked(block.request))

    inputs: InputsBlock | None = evidence.inputs
    if inputs is not None:
        inputs = replace(inputs, request=masked(inputs.request))
    events: EventBlock | None = evidence.events
    if events is not None:
        request = masked(events.request)
        text = [
            f"anon-{key:016x}" if kind == Kind.BIND else text
            for key, kind, text in zip(request.tolist(), events.kind.tolist(), events.text, strict=True)
        ]
        events = replace(events, request=request, text=text)
    return replace(
        evidence,
        inputs=inputs,
        sent=payload(evidence.sent),
        received=payload(evidence.received),
        consumed=payload(evidence.consumed),
        events=events,
    )
