"""What fuzzing begins with: sound frames, rings, journals, traces and bundles, made here and kept nowhere."""

import hashlib
import io
import sys
import tempfile
import zipfile
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
from stagewatch.agents.wire import Ack, Freeze, Frozen, Refusal, Welcome
from stagewatch.monitor.bundlefile import EVIDENCE, FORMAT, MANIFEST, MEMBERS, Manifest, Member
from stagewatch.monitor.journal import Carried, EntryKind, Header, head_of

TRACES = Path(__file__).parent.parent / "data" / "traces"


def frames() -> list[bytes]:
    rank = identity().rank
    others = (
        Welcome("life-1", rank, 3),
        Ack("life-1", rank, 3),
        Refusal("no", -1.0, "life-1", rank, 3),
        Freeze("life-1", rank, "0" * 16, 3, 9),
        Frozen("life-1", rank, "0" * 16, "/dev/shm/frozen/x", 1, 9),  # noqa: S108  # a path to be told
    )
    return [
        hello(),
        batch_message(0, 3),
        *(wire.encode_frame(wire.batch_of(identity(), every_kind(raw), 1.0)) for raw in (False, True)),
        *(wire.encode_frame(frame) for frame in others),
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


def bundle_of(evidence: bytes) -> bytes:
    """A bundle around evidence, with the checksums it should have."""
    members = dict.fromkeys(MEMBERS, b"{}") | {EVIDENCE: evidence}
    told = {name: Member(len(data), hashlib.sha256(data).hexdigest()) for name, data in members.items()}
    manifest = Manifest(
        FORMAT, "0" * 16, "test", "life-1", "tests", 1, 1, 2, True, True, False, False, {}, (), told
    )
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in ({MANIFEST: msgspec.json.encode(manifest)} | members).items():
            archive.writestr(name, data)
    return file.getvalue()


def bundles() -> list[bytes]:
    """A bundle's bytes, and the evidence that is to be put into one."""
    evidence = [content[1:] for content in journals()]
    return [b"\0" + bundle_of(evidence[0]), *(b"\1" + content for content in evidence)]


def traces() -> list[bytes]:
    return [
        b"".join(path.read_bytes().splitlines(keepends=True)[:12]) for path in sorted(TRACES.glob("*.jsonl"))
    ]
