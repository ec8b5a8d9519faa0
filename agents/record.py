"""The record: what one rank did in one step, as bytes.

Its layout is defined in `stagewatch.agents.layout` and nowhere else; both ends read and write it by this module.
Token columns are int32: a wider value wraps, which leaves an undefined or out-of-range value as visible as
before. ``step`` is the ordinal of an executed batch on its rank since the engine started. All ranks execute
the same sequence, so ordinals align ranks; nothing else does.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.bodies import (
    BODIES,
    I32,
    U8,
    U64,
    UNKNOWN,
    Bind,
    Body,
    Collective,
    Extent,
    Free,
    Heartbeat,
    Inputs,
    Kind,
    Mask,
    Note,
    Payload,
)
from stagewatch.agents.errors import RecordError, RingError
from stagewatch.agents.layout import (
    COLUMNS_MAX,
    CRC,
    DTYPES,
    HEAD,
    LEAD,
    MAGIC,
    NOTHING,
    REST,
    REST_AT,
    SCHEMAS,
    SIZE_MAX,
    Counts,
    Plan,
    Schema,
)

__all__ = [
    "BODIES",
    "COLUMNS_MAX",
    "HEAD_SIZE",
    "I32",
    "MAGIC",
    "SCHEMA",
    "SIZE_MAX",
    "U8",
    "U64",
    "UNKNOWN",
    "Bind",
    "Body",
    "Collective",
    "Counts",
    "Extent",
    "Free",
    "Heartbeat",
    "Inputs",
    "Kind",
    "Mask",
    "Note",
    "Payload",
    "Record",
    "RecordTooLongError",
    "decode",
    "encode",
    "encode_parts",
    "request_key",
    "size_of",
]

SCHEMA: Final = 1
HEAD_SIZE: Final = HEAD.size
_KINDS: Final = {int(kind): kind for kind in Kind}


class RecordTooLongError(RingError, ValueError):
    """A record that would push out everything worth keeping, or that no reader would believe."""


@dataclass(frozen=True, slots=True)
class Record:
    """One decoded record. Array fields of the body are read-only and safe from the ring's writer."""

    kind: Kind
    seq: int
    """Position among all records of the ring, from 0, without gaps."""
    step: int
    t_ns: int
    """Wall clock when recorded, nanoseconds since the epoch. For people; nothing is aligned by it."""
    body: Body


def request_key(request_id: str) -> int:
    """64-bit key that stands for a request id in columns; equal on every rank, engine and host."""
    return int.from_bytes(blake2b(_bytes(request_id), digest_size=8).digest(), "little")


def _bytes(text: str) -> bytes:
    # A lone surrogate is no UTF-8, but must not cost the rank its recorder: it is spelled out instead.
    return text.encode(errors="backslashreplace")


def size_of(body: Body) -> int:
    """Bytes that `encode` makes of ``body``."""
    schema = SCHEMAS[type(body)]
    text = b"" if schema.text is None else _bytes(getattr(body, schema.text))
    counts = NOTHING if schema.counts is None else schema.counts(body)
    return (schema.plan(counts).text_at + len(text) + 7) & ~7


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def encode_parts(
    kind: Kind, seq: int, step: int, t_ns: int, body: Body, size_max: int = SIZE_MAX
) -> tuple[bytes, bytes]:
    """One record, in two parts that follow each other: in one it would have to be copied once more.

    Columns of another dtype or memory layout are converted. Raises ValueError or IndexError if a column does
    not fit its extent, struct.error if a number does not fit its field, RecordTooLongError.
    """
    schema = SCHEMAS[type(body)]
    text = b"" if schema.text is None else _bytes(getattr(body, schema.text))
    counts = NOTHING if schema.counts is None else schema.counts(body)
    plan = schema.plans.get(counts) or schema.plan(counts)
    end = plan.text_at + len(text)
    size = (end + 7) & ~7
    if size > size_max:
        raise RecordTooLongError(
            f"{kind.name.lower()} record of {size} bytes exceeds {size_max}, a quarter of the ring "
            f"or the longest a reader takes: enlarge the ring"
        )
    scalars = schema.scalars(body)
    if schema.has_key:
        scalars = (*scalars[:-1], _signed(scalars[-1]))
    rest = REST.pack(*counts, len(text), seq, step, t_ns, *scalars, *schema.padding)
    if plan.sizes:
        rest = _joined(rest, schema, plan, schema.columns(body))
    if size != plan.text_at:
        rest += text.ljust(size - plan.text_at, b"\0")
    lead = LEAD.pack(MAGIC, kind, schema.scalar_count, size)
    return lead + CRC.pack(crc32(rest, crc32(lead))), rest


def _joined(rest: bytes, schema: Schema, plan: Plan, columns: tuple[NDArray[Any], ...]) -> bytes:
    """The rest of the head and the columns behind it."""
    if [column.size for column in columns] != plan.sizes or not plan.possible:
        raise ValueError(f"columns of shapes {[column.shape for column in columns]}, expected {plan.sizes}")
    right: list[Any] = [
        column if column.dtype is dtype else column.astype(dtype, "C", copy=False)
        for column, dtype in zip(columns, schema.dtypes, strict=True)
    ]
    try:
        return b"".join((rest, *right))
    except TypeError:  # a column with holes between its elements
        return b"".join((rest, *(column.copy(order="C") for column in right)))


def encode(kind: Kind, seq: int, step: int, t_ns: int, body: Body) -> bytes:
    """One record, as `encode_parts` makes it."""
    return b"".join(encode_parts(kind, seq, step, t_ns, body))


def decode(buffer: memoryview | bytes) -> Record:
    """Read one record that starts at the first byte of ``buffer``.

    Its arrays are read-only views of one copy that belongs to the record; of ``buffer`` itself if that is
    bytes. Raises RecordError for anything that `encode` cannot have written whole.
    """
    if len(buffer) < HEAD_SIZE:
        raise RecordError(f"record of {len(buffer)} bytes is shorter than its head of {HEAD_SIZE}")
    if not isinstance(buffer, bytes):
        # Copied before anything is believed: the memory may be shared with a writer.
        announced = int.from_bytes(buffer[4:8], "little")
        buffer = bytes(buffer[: max(HEAD_SIZE, min(announced, SIZE_MAX))])
    magic, kind_code, scalar_count, size, crc, *rest = HEAD.unpack_from(buffer)
    rows, width, drafts, ragged, text_size, seq, step, t_ns, *scalars = rest
    if magic != MAGIC:
        raise RecordError(f"record begins with {magic:#06x}, not {MAGIC:#06x}")
    if size > len(buffer) or size > SIZE_MAX or size < HEAD_SIZE or size % 8:
        raise RecordError(f"record claims {size} bytes of {len(buffer)} present")
    if crc32(memoryview(buffer)[REST_AT:size], crc32(buffer[: LEAD.size])) != crc:
        raise RecordError("record checksum does not match: torn or overwritten")
    kind = _KINDS.get(kind_code)
    if kind is None:
        raise RecordError(f"record kind {kind_code} is unknown to this build")
    if (seq | step | t_ns) >> 63:
        raise RecordError("record is numbered or dated beyond 63 bits")
    schema = SCHEMAS[BODIES[kind]]
    plan = schema.plan((rows, width, drafts, ragged))
    if (
        not plan.possible
        or (plan.text_at + text_size + 7) & ~7 != size
        or scalar_count != schema.scalar_count
        or (text_size and schema.text is None)
    ):
        raise RecordError(f"{kind.name.lower()} record of {size} bytes does not hold what its head announces")
    text = buffer[plan.text_at : plan.text_at + text_size]
    return Record(kind, seq, step, t_ns, _decode_body(schema, plan, buffer, size, scalars, ragged, text))


def _decode_body(
    schema: Schema, plan: Plan, buffer: bytes, size: int, scalars: list[int], ragged: int, text: bytes
) -> Body:
    values: list[Any] = scalars[: schema.scalar_count]
    if schema.has_key:
        values[-1] &= 2**64 - 1
    columns: list[NDArray[Any]] = []
    for group in plan.groups:
        items = np.frombuffer(buffer, DTYPES[group.item], size // group.item_size)
        columns += [items[place] for place in group.places]
    # Unsigned, so that a negative count makes the sum too large as well.
    scheduled = None if schema.scheduled_at is None else columns[schema.scheduled_at].view(np.uint32)
    if scheduled is not None and int(np.add.reduce(scheduled)) != ragged:
        raise RecordError("inputs record's scheduled counts do not add up to its fed tokens")
    for index, table in plan.tables:
        columns[index] = columns[index].reshape(table)
    values += columns
    if schema.text is not None:
        try:
            values.append(text.decode())
        except UnicodeDecodeError:
            raise RecordError("record text is not UTF-8") from None
    return schema.body_type(*values)
