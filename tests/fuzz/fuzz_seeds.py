"""What fuzzing begins with: sound frames, rings, journals and traces, made here and kept nowhere."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "service"))

import msgspec
import numpy as np
from service_records import append_note, append_steps, batch_message, hello, identity
from test_wire import every_kind

from stagewatch.agents import wire
from stagewatch.agents.bodies import Bind, Mask
from stagewatch.agents.record import Kind
from stagewatch.agents.ring import CAPACITY_MIN, RingWriter
from stagewatch.agents.wire import Ack, Refusal, Welcome
from stagewatch.monitor.journal import Carried, EntryKind, Header, head_of

TRACES = Path(__file__).parent.parent / "data" / "traces"


def frames() -> list[bytes]:
    rank = identity().rank
    downward = (Welcome("life-1", rank, 3), Ack("life-1", rank, 3), Refusal("no", -1.0, "life-1", rank, 3))
    return [
        hello(),
        batch_message(0, 3),
        *(wire.encode_frame(wire.batch_of(identity(), every_kind(raw), 1.0)) for raw in (False, True)),
        *(wire.encode_frame(frame) for frame in downward),
    ]


def rings() -> list[bytes]:
    with tempfile.TemporaryDirectory() as directory:
        ring = RingWriter(Path(directory), identity(), CAPACITY_MIN)
        ring.append(Kind.BIND, 1, 1, Bind(0, 1, 10, 100, 7, "request-1"))
        append_steps(ring, 8)
        ring.append(Kind.MASK, 2, 2, Mask(0, 1, np.ones(3, np.uint8), np.zeros(3, np.uint8)))
        append_note(ring, "a note")
        young = ring.path.read_bytes()
        append_steps(ring, 400, first_step=9)
        return [bytes([mended]) + content for content in (young, ring.path.read_bytes()) for mended in (0, 1)]


def journals() -> list[bytes]:
    found = []
    for version in (1, 2):
        header = Header(version, 7 if version == 2 else 0, 1)
        begin = b"STGWJRN1" if version == 1 else header.encode()
        carried = msgspec.msgpack.encode(Carried(identity(1), 5))
        entries = (
            (EntryKind.CARRIED, carried),
            (EntryKind.HELLO, hello()),
            (EntryKind.BATCH, batch_message(0, 2)),
        )
        content = begin + b"".join(
            head_of(kind, 1, payload, header.seed) + payload for kind, payload in entries
        )
        found += [bytes([mended]) + content for mended in (0, 1)]
    return found


def traces() -> list[bytes]:
    return [
        b"".join(path.read_bytes().splitlines(keepends=True)[:12]) for path in sorted(TRACES.glob("*.jsonl"))
    ]
