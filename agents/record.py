"""The record: what one rank did in one step, as bytes. Its layout is defined here and nowhere else.

A record is a fixed head, then the columns of its kind in the order of their fields, then text.
Little-endian, eight-byte aligned. Eight-byte columns come first, one-byte columns last, so that every
column is aligned by construction. Token columns are int32: a wider value wraps, which leaves an
undefined or out-of-range value as visible as before.

``step`` is the ordinal of an executed batch on its rank since the engine started. All ranks execute
the same sequence, so ordinals align ranks; nothing else does.
"""

import struct
import zlib
from dataclasses import dataclass, fields
from enum import IntEnum
from hashlib import blake2b
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.errors import RecordError

SCHEMA = 1
MAGIC = 0x5357
SIZE_MAX = 1 << 26
"""Longest record in bytes, both written and believed."""

UNKNOWN = -1
"""Stands in a scalar or an int32 column for what the engine does not tell."""

U64 = NDArray[np.uint64]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]


class Kind(IntEnum):
    """What a record tells."""

    BIND = 1
    FREE = 2
    INPUTS = 3
    MASK = 4
    SENT = 5
    RECEIVED = 6
    CONSUMED = 7
    COLLECTIVE = 8
    HEARTBEAT = 9
    NOTE = 10


class Extent(IntEnum):
    """How many elements a column has, by the counts in the head."""

    ROW = 0
    """One per batch row: shape [rows]."""
    WIDTH = 1
    """One per batch row and token column of a payload: shape [rows, width]."""
    DRAFT = 2
    """One per batch row and draft position: shape [rows, drafts]."""
    RAGGED = 3
    """One per scheduled token, rows laid end to end: shape [sum of scheduled]."""


@dataclass(frozen=True, slots=True)
class Bind:
    """A request took a slot."""

    SCALARS: ClassVar = ("slot", "generation", "prompt_len", "cap", "request")
    COLUMNS: ClassVar = ()
    TEXT: ClassVar = "request_id"

    slot: int
    generation: int
    prompt_len: int
    cap: int
    """Length in tokens at which the request must stop, prompt included; UNKNOWN if the engine hides it."""
    request: int
    """`request_key` of the id."""
    request_id: str


@dataclass(frozen=True, slots=True)
class Free:
    """A slot was released. `generation` is the one that ended."""

    SCALARS: ClassVar = ("slot", "generation", "request")
    COLUMNS: ClassVar = ()
    TEXT: ClassVar = None

    slot: int
    generation: int
    request: int


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a rank fed at one step: after deferred updates are consumed, before the forward pass."""

    SCALARS: ClassVar = ("tick", "graph_mode", "spec_tokens", "padded_tokens")
    COLUMNS: ClassVar = (
        ("request", "u8", Extent.ROW),
        ("slot", "i4", Extent.ROW),
        ("generation", "i4", Extent.ROW),
        ("mirror", "i4", Extent.ROW),
        ("computed", "i4", Extent.ROW),
        ("prefill_len", "i4", Extent.ROW),
        ("scheduled", "i4", Extent.ROW),
        ("draft_count", "i4", Extent.ROW),
        ("cap", "i4", Extent.ROW),
        ("last_sampled", "i4", Extent.ROW),
        ("draft_tokens", "i4", Extent.DRAFT),
        ("input_ids", "i4", Extent.RAGGED),
        ("positions", "i4", Extent.RAGGED),
        ("prefilling", "u1", Extent.ROW),
    )
    TEXT: ClassVar = None

    tick: int
    """Engine iterations so far on this rank, empty ones included; the unit of the decode cadence."""
    graph_mode: int
    spec_tokens: int
    """Draft tokens the scheduler planned for this step."""
    padded_tokens: int
    request: U64
    slot: I32
    generation: I32
    mirror: I32
    """The host's optimistic count of computed tokens."""
    computed: I32
    """The device's count of computed tokens."""
    prefill_len: I32
    scheduled: I32
    draft_count: I32
    cap: I32
    last_sampled: I32
    draft_tokens: I32
    input_ids: I32
    positions: I32
    prefilling: U8


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask the engine computed beside the mask a sound engine computes."""

    SCALARS: ClassVar = ("engine_none", "fixed_none")
    COLUMNS: ClassVar = (("engine", "u1", Extent.ROW), ("fixed", "u1", Extent.ROW))
    TEXT: ClassVar = None

    engine_none: int
    """1 if the engine's mask was None: it broadcasts nothing this step."""
    fixed_none: int
    engine: U8
    fixed: U8


@dataclass(frozen=True, slots=True)
class Payload:
    """One broadcast of sampled tokens and draft blocks, as sent, as received, or as consumed.

    Recorded under the ordinal of the step that sent it. Only ``tokens[row, :num_sampled[row]]`` is defined.
    """

    SCALARS: ClassVar = ("at", "skipped")
    COLUMNS: ClassVar = (
        ("request", "u8", Extent.ROW),
        ("slot", "i4", Extent.ROW),
        ("generation", "i4", Extent.ROW),
        ("generation_now", "i4", Extent.ROW),
        ("num_sampled", "i4", Extent.ROW),
        ("num_rejected", "i4", Extent.ROW),
        ("tokens", "i4", Extent.WIDTH),
        ("draft_tokens", "i4", Extent.DRAFT),
        ("applied", "u1", Extent.ROW),
    )
    TEXT: ClassVar = None

    at: int
    """Ordinal of the step before which it was consumed; UNKNOWN for sent and received."""
    skipped: int
    """1 if nothing was broadcast, because the mask was None."""
    request: U64
    slot: I32
    generation: I32
    """The slot's generation when the payload was sent or received."""
    generation_now: I32
    """The slot's generation when the payload was consumed; equal to `generation` for sent and received."""
    num_sampled: I32
    num_rejected: I32
    tokens: I32
    draft_tokens: I32
    """Shape [rows, drafts]; drafts is 0 where the engine relays no draft block."""
    applied: U8
    """1 for a row that takes part: in the mask when sent or received, written to its slot when consumed."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective or point-to-point call, recorded before the call, so that a hang leaves its cause."""

    SCALARS: ClassVar = ("index", "numel", "group_size")
    COLUMNS: ClassVar = ()
    TEXT: ClassVar = "what"

    index: int
    """Position among this rank's collectives since the engine started."""
    numel: int
    group_size: int
    what: str
    """Group, operation and dtype, separated by single spaces: ``pp_broadcast broadcast int64``."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A JSON-encoded `stagewatch.agents.probe.Health`."""

    SCALARS: ClassVar = ()
    COLUMNS: ClassVar = ()
    TEXT: ClassVar = "health"

    health: str


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence for the operator: armed, disarmed and why, a hotfix in force."""

    SCALARS: ClassVar = ()
    COLUMNS: ClassVar = ()
    TEXT: ClassVar = "text"

    text: str


Body = Bind | Free | Inputs | Mask | Payload | Collective | Heartbeat | Note

BODIES: dict[Kind, type[Body]] = {
    Kind.BIND: Bind,
    Kind.FREE: Free,
    Kind.INPUTS: Inputs,
    Kind.MASK: Mask,
    Kind.SENT: Payload,
    Kind.RECEIVED: Payload,
    Kind.CONSUMED: Payload,
    Kind.COLLECTIVE: Collective,
    Kind.HEARTBEAT: Heartbeat,
    Kind.NOTE: Note,
}


@dataclass(frozen=True, slots=True)
class Record:
    """One decoded record. Array fields of the body own their memory."""

    kind: Kind
    seq: int
    """Position among all records of the ring, from 0, without gaps."""
    step: int
    t_ns: int
    """Wall clock when recorded, nanoseconds since the epoch. For people; nothing is aligned by it."""
    body: Body


@dataclass(frozen=True, slots=True)
class Views:
    """One buffer seen as arrays of each width, so that storing a column is one slice assignment."""

    u1: NDArray[np.uint8]
    i4: NDArray[np.int32]
    u8: NDArray[np.uint64]

    @classmethod
    def over(cls, buffer: memoryview | bytearray | bytes) -> Self:
        """Views of ``buffer``, whose length is a multiple of eight."""
        return cls(
            np.frombuffer(buffer, np.uint8), np.frombuffer(buffer, "<i4"), np.frombuffer(buffer, "<u8")
        )


# magic, kind, scalar count, size, crc, rows, width, drafts, ragged, text bytes, seq, step, t_ns, scalars
_HEAD = struct.Struct("<HBBIIIIIIIQQQ5q")
HEAD_SIZE = _HEAD.size
_CRC_FROM = 12
_SCALARS_MAX = 5
_ITEM_SIZE = {"u8": 8, "i4": 4, "u1": 1}
_DTYPE: dict[str, np.dtype[Any]] = {"u8": np.dtype("<u8"), "i4": np.dtype("<i4"), "u1": np.dtype("u1")}


def request_key(request_id: str) -> int:
    """64-bit key that stands for a request id in columns; equal on every rank, engine and host."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little")


def _counts(body: Body) -> tuple[int, int, int, int]:
    """(rows, width, drafts, ragged) of a body."""
    match body:
        case Inputs():
            return len(body.request), 0, body.draft_tokens.shape[1], len(body.input_ids)
        case Payload():
            return len(body.request), body.tokens.shape[1], body.draft_tokens.shape[1], 0
        case Mask():
            return len(body.engine), 0, 0, 0
        case _:
            return 0, 0, 0, 0


def _elements(extent: Extent, rows: int, width: int, drafts: int, ragged: int) -> int:
    if extent is Extent.ROW:
        return rows
    if extent is Extent.WIDTH:
        return rows * width
    if extent is Extent.DRAFT:
        return rows * drafts
    return ragged


def _payload_size(body_type: type[Body], rows: int, width: int, drafts: int, ragged: int) -> int:
    return sum(
        _ITEM_SIZE[dtype] * _elements(extent, rows, width, drafts, ragged)
        for _, dtype, extent in body_type.COLUMNS
    )


def _text(body: Body) -> bytes:
    return getattr(body, body.TEXT).encode() if body.TEXT is not None else b""


def size_of(body: Body) -> int:
    """Bytes that `encode` writes for ``body``."""
    text = len(_text(body)) if body.TEXT is not None else 0
    size = HEAD_SIZE + _payload_size(type(body), *_counts(body)) + text
    return (size + 7) & ~7


def encode(
    views: Views,
    buffer: memoryview | bytearray,
    at: int,
    kind: Kind,
    seq: int,
    step: int,
    t_ns: int,
    body: Body,
) -> int:
    """Write a record at byte ``at`` (a multiple of eight) of ``buffer``; return its size in bytes.

    ``views`` are the `Views` over the same buffer. Raises ValueError or IndexError if a column does
    not fit its extent or the buffer is too short.
    """
    rows, width, drafts, ragged = counts = _counts(body)
    offset = at + HEAD_SIZE
    for name, dtype, extent in body.COLUMNS:
        value = getattr(body, name)
        count = _elements(extent, *counts)
        if dtype == "i4":
            first = offset >> 2
            views.i4[first : first + count] = value if value.ndim == 1 else value.reshape(-1)
            offset += 4 * count
        elif dtype == "u1":
            views.u1[offset : offset + count] = value
            offset += count
        else:
            first = offset >> 3
            views.u8[first : first + count] = value
            offset += 8 * count
    text = _text(body)
    buffer[offset : offset + len(text)] = text
    offset += len(text)
    size = (offset - at + 7) & ~7
    buffer[offset : at + size] = bytes(at + size - offset)
    scalars = [_signed(getattr(body, name)) for name in body.SCALARS]
    scalars += [0] * (_SCALARS_MAX - len(scalars))
    head = (MAGIC, kind, len(body.SCALARS), size)
    tail = (rows, width, drafts, ragged, len(text), seq, step, t_ns, *scalars)
    _HEAD.pack_into(buffer, at, *head, 0, *tail)
    crc = zlib.crc32(memoryview(buffer)[at + _CRC_FROM : at + size])
    struct.pack_into("<I", buffer, at + 8, crc)
    return size


def decode(buffer: memoryview | bytes) -> Record:
    """Read one record that starts at the first byte of ``buffer``.

    Raises RecordError for anything that `encode` cannot have written whole.
    """
    if len(buffer) < HEAD_SIZE:
        raise RecordError(f"record of {len(buffer)} bytes is shorter than its head of {HEAD_SIZE}")
    head = _HEAD.unpack_from(buffer)
    magic, kind_code, scalar_count, size, crc, *counts_and_rest = head
    rows, width, drafts, ragged, text_size, seq, step, t_ns, *scalars = counts_and_rest
    if magic != MAGIC:
        raise RecordError(f"record begins with {magic:#06x}, not {MAGIC:#06x}")
    if size > len(buffer) or size > SIZE_MAX or size < HEAD_SIZE or size % 8:
        raise RecordError(f"record claims {size} bytes of {len(buffer)} present")
    if zlib.crc32(memoryview(buffer)[_CRC_FROM:size]) != crc:
        raise RecordError("record checksum does not match: torn or overwritten")
    try:
        kind = Kind(kind_code)
    except ValueError:
        raise RecordError(f"record kind {kind_code} is unknown to this build") from None
    body_type = BODIES[kind]
    expected = HEAD_SIZE + _payload_size(body_type, rows, width, drafts, ragged) + text_size
    if (expected + 7) & ~7 != size or scalar_count != len(body_type.SCALARS):
        raise RecordError(f"{kind.name.lower()} record of {size} bytes does not hold what its head announces")
    return Record(
        kind,
        seq,
        step,
        t_ns,
        _decode_body(body_type, buffer, (rows, width, drafts, ragged), text_size, scalars),
    )


def _decode_body(
    body_type: type[Body],
    buffer: memoryview | bytes,
    counts: tuple[int, int, int, int],
    text_size: int,
    scalars: list[int],
) -> Body:
    values: list[Any] = list(scalars[: len(body_type.SCALARS)])
    rows, width, drafts, _ = counts
    offset = HEAD_SIZE
    for _, dtype, extent in body_type.COLUMNS:
        count = _elements(extent, *counts)
        column = np.frombuffer(buffer, np.dtype(_DTYPE[dtype]), count, offset).copy()
        if extent is Extent.WIDTH:
            column = column.reshape(rows, width)
        elif extent is Extent.DRAFT:
            column = column.reshape(rows, drafts)
        values.append(column)
        offset += count * _ITEM_SIZE[dtype]
    if body_type.TEXT is not None:
        try:
            values.append(bytes(buffer[offset : offset + text_size]).decode())
        except UnicodeDecodeError:
            raise RecordError("record text is not UTF-8") from None
    if "request" in body_type.SCALARS:
        values[body_type.SCALARS.index("request")] = scalars[body_type.SCALARS.index("request")] & (2**64 - 1)
    if body_type is Inputs:
        scheduled = values[_SCHEDULED]
        if (scheduled < 0).any() or scheduled.sum(dtype=np.int64) != counts[3]:
            raise RecordError("inputs record's scheduled counts do not add up to its fed tokens")
    return body_type(*values)


_SCHEDULED = len(Inputs.SCALARS) + [name for name, _, _ in Inputs.COLUMNS].index("scheduled")


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


for _type in set(BODIES.values()):
    _declared = [
        *_type.SCALARS,
        *(name for name, _, _ in _type.COLUMNS),
        *((_type.TEXT,) if _type.TEXT else ()),
    ]
    if [field.name for field in fields(_type)] != _declared:
        raise TypeError(f"{_type.__name__}: fields do not follow SCALARS, COLUMNS, TEXT")
