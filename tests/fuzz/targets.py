"""What is fuzzed: each decoder as a function of bytes that may raise nothing but our own errors.

Checksums would keep a fuzzer out of what lies behind them, so where the first byte is odd they are mended first,
as somebody who means it would.
"""

import contextlib
import struct
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fuzz_seeds import bundle_of
from fuzz_seeds import bundles as bundle_seeds
from fuzz_seeds import frames as frame_seeds
from fuzz_seeds import journals as journal_seeds
from fuzz_seeds import rings as ring_seeds
from fuzz_seeds import traces as trace_seeds

from stagewatch.agents import record, wire
from stagewatch.agents.digest import Digester
from stagewatch.agents.errors import FrameError, StagewatchError
from stagewatch.agents.ring import HEADER_SIZE
from stagewatch.agents.ringfile import FIXED
from stagewatch.agents.wire import Limits
from stagewatch.monitor.journal import EntryKind, SegmentReader, head_of, read_header
from stagewatch.monitor.replay import replay
from stagewatch.monitor.restoring import Restorer
from stagewatch.monitor.sources import RingSource, open_recordings
from stagewatch.monitor.streams import Streams
from stagewatch.monitor.traces import TraceReader, identities, trace_file
from stagewatch.monitor.watch import Watch

_DIGESTER: Final = Digester(bytes(range(16)))
_LIMITS: Final = Limits()
_ENTRY_HEAD: Final = len(head_of(EntryKind.HELLO, 0, b""))
_directory = tempfile.TemporaryDirectory(prefix="stagewatch-fuzz-", dir="/dev/shm")  # memory


@dataclass(frozen=True)
class Target:
    """One decoder."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


def frames(data: bytes) -> None:
    """Frames of a sidecar, and of a collector."""
    with contextlib.suppress(FrameError):
        wire.decode_downward(data)
    with contextlib.suppress(FrameError):
        wire.decode_from_sidecar(data, _LIMITS)
    with contextlib.suppress(FrameError):
        frame = wire.decode_upward(data, _LIMITS)
        if isinstance(frame, wire.Batch):
            _check_evidence(frame)


def _check_evidence(frame: wire.Batch) -> None:
    evidence = wire.evidence_of(frame, _LIMITS)
    present = [getattr(evidence, name) for name in frame.parts]
    # Nothing is made of a frame that does not lie in it.
    held = sum(len(block.seq) for block in present)
    if held != frame.next_seq - frame.first_seq or held > sum(map(len, frame.parts.values())):
        raise AssertionError(f"{held} records of {frame.first_seq} to {frame.next_seq}")


def rings(data: bytes) -> None:
    """A ring file, read to its end and digested as the sidecar does."""
    mended, content = bool(data[:1] and data[0] & 1), bytearray(data[1:])
    if mended:
        _mend_ring(content)
    path = _file("engine.dp0.pp0.tp0.ring", bytes(content))
    with contextlib.suppress(StagewatchError):
        next_seq = 0
        for evidence in RingSource(path, _DIGESTER).evidence():
            # Read or counted as lost: the numbers add up without a gap.
            if evidence.first_seq - evidence.lost != next_seq:
                raise AssertionError(f"{evidence.first_seq} with {evidence.lost} lost after {next_seq}")
            next_seq = evidence.next_seq


def journals(data: bytes) -> None:
    """A journal's segment, and what its entries bring back."""
    mended, content = bool(data[:1] and data[0] & 1), bytearray(data[1:])
    path = _file(f"{1:016d}.journal", bytes(content))
    if mended:
        _mend_journal(path, content)
    restorer = Restorer(Streams(8), _LIMITS)
    with contextlib.suppress(StagewatchError):
        for entry in SegmentReader(path):
            with contextlib.suppress(FrameError):
                restorer.take(entry)


def traces(data: bytes) -> None:
    """One rank's file of a recorded trace."""
    path = _file("trace.rank0.jsonl", data)
    other = trace_file(path.with_name("trace.rank1.jsonl"))
    file = trace_file(path)
    if file is None or other is None:
        raise AssertionError(path)
    with contextlib.suppress(StagewatchError):
        for _ in TraceReader(file, identities([file, other])[file], _DIGESTER).evidence():
            pass


def bundles(data: bytes) -> None:
    """A bundle, replayed to its end; where mended, sound but for the evidence in it."""
    content = data[1:]
    if data[:1] and data[0] & 1:
        evidence = _file(f"{2:016d}.journal", content)
        _mend_journal(evidence, bytearray(content))
        content = bundle_of(evidence.read_bytes())
    with contextlib.suppress(StagewatchError):
        replay(open_recordings([_file("bundle.zip", content)]), Watch())


TARGETS: Final = {
    "frames": Target(frames, frame_seeds),
    "rings": Target(rings, ring_seeds),
    "journals": Target(journals, journal_seeds),
    "traces": Target(traces, trace_seeds),
    "bundles": Target(bundles, bundle_seeds),
}


def _file(name: str, content: bytes) -> Path:
    path = Path(_directory.name) / name
    path.touch(0o600)
    path.write_bytes(content)
    return path


def _mend_ring(content: bytearray) -> None:
    """Make a header's size and every record's checksum fit what is there."""
    if len(content) < HEADER_SIZE + 64:
        return
    magic, schema, header_size, _, identity_size = FIXED.unpack_from(content)
    FIXED.pack_into(content, 0, magic, schema, header_size, len(content) - HEADER_SIZE, identity_size)
    mark = struct.pack("<H", record.MAGIC)
    at = content.find(mark, HEADER_SIZE)
    while 0 <= at <= len(content) - record.HEAD_SIZE:
        size = int.from_bytes(content[at + 4 : at + 8], "little")
        if at % 8 == 0 and record.HEAD_SIZE <= size <= len(content) - at:
            body = bytes(content[at + 12 : at + size])
            crc = zlib.crc32(body, zlib.crc32(bytes(content[at : at + 8])))
            content[at + 8 : at + 12] = crc.to_bytes(4, "little")
        at = content.find(mark, at + 1)


def _mend_journal(path: Path, content: bytearray) -> None:
    """Make every entry's checksum fit what is there."""
    with contextlib.suppress(StagewatchError):
        header = read_header(path)
        if header is None:
            return
        at = header.size
        while at + _ENTRY_HEAD <= len(content):
            length = min(int.from_bytes(content[at : at + 4], "little"), len(content) - at - _ENTRY_HEAD)
            kind = EntryKind(1 + content[at + 16] % len(EntryKind))
            t_ns = int.from_bytes(content[at + 8 : at + 16], "little")
            payload = bytes(content[at + _ENTRY_HEAD : at + _ENTRY_HEAD + length])
            content[at : at + _ENTRY_HEAD] = head_of(kind, t_ns, payload, header.seed)
            at += _ENTRY_HEAD + length
        path.write_bytes(content)
