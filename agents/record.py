"""The record: what one rank did in one step, as bytes. Its layout is defined here and nowhere else.

A record is a fixed head, then the columns of its kind in the order of their fields, then text; the kinds
and their columns are declared in `stagewatch.agents.bodies`. Little-endian, eight-byte aligned. Eight-byte
columns come first, one-byte columns last, so that every column is aligned by construction. Token columns
are int32: a wider value wraps, which leaves an undefined or out-of-range value as visible as before.

``step`` is the ordinal of an executed batch on its rank since the engine started. All ranks execute
the same sequence, so ordinals align ranks; nothing else does.
"""

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate, pairwise
from math import prod
from operator import attrgetter
from typing import Any, Final

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
from stagewatch.agents.errors import RecordError

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
    "decode",
    "encode",
    "request_key",
    "size_of",
]

SCHEMA = 1
MAGIC = 0x5357
SIZE_MAX = 1 << 26
"""Longest record in bytes, both written and believed."""
COLUMNS_MAX = 1 << 16
"""Most columns of a table, both written and believed: without rows they cost a forger nothing."""


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


# magic, kind, scalar count, size, crc, rows, width, drafts, ragged, text bytes, seq, step, t_ns, scalars
_HEAD = struct.Struct("<HBBIIIIIIIQQQ5q")
HEAD_SIZE = _HEAD.size
# The head in its parts: the checksum lies between two and covers everything else, the kind included.
_LEAD = struct.Struct("<HBBI")
_CRC = struct.Struct("<I")
_REST = struct.Struct("<IIIIIQQQ5q")
_REST_AT = _LEAD.size + _CRC.size
_SCALARS_MAX = 5
_KINDS = {int(kind): kind for kind in Kind}

Counts = tuple[int, int, int, int]
"""(rows, width, drafts, ragged): what the extents of a record's columns follow from."""


def request_key(request_id: str) -> int:
    """64-bit key that stands for a request id in columns; equal on every rank, engine and host."""
    return int.from_bytes(blake2b(_bytes(request_id), digest_size=8).digest(), "little")


def _bytes(text: str) -> bytes:
    # A lone surrogate is no UTF-8, but must not cost the rank its recorder: it is spelled out instead.
    return text.encode(errors="backslashreplace")


_ITEM_SIZES: Final = {"u8": 8, "i4": 4, "u1": 1}
_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "u8": np.dtype("<u8"),
    "i4": np.dtype("<i4"),
    "u1": np.dtype("u1"),
}


@dataclass(frozen=True, slots=True)
class _Group:
    """The columns of one item size, which lie next to each other. Places count items from the record's start."""

    item: str
    item_size: int
    places: tuple[slice, ...]
    """Where each column lies."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where the columns of one body type lie for given counts, worked out once and kept."""

    sizes: list[int]
    """Elements of each column."""
    groups: tuple[_Group, ...]
    tables: tuple[tuple[int, tuple[int, int]], ...]
    """Index and shape of each two-dimensional column."""
    text_at: int
    """Bytes from the start of the record to its text."""
    possible: bool
    """Whether a body of the type can have these counts."""


class _Schema:
    """What the class variables of a body type say, in the form that storing and reading want."""

    def __init__(self, body_type: type[Body]) -> None:
        self.body_type = body_type
        self.scalar_count = len(body_type.SCALARS)
        self.scalar_padding = (0,) * (_SCALARS_MAX - self.scalar_count)
        self.scalars = _scalar_getter(body_type)
        self.has_key = "request" in body_type.SCALARS
        self.text: str | None = body_type.TEXT
        names = [name for name, _, _ in body_type.COLUMNS]
        self.columns = _getter(names)
        self.items: list[str] = [item for _, item, _ in body_type.COLUMNS]
        self.dtypes = [_DTYPES[item] for item in self.items]
        self.extents: list[Extent] = [extent for _, _, extent in body_type.COLUMNS]
        self.scheduled_at = names.index("scheduled") if "scheduled" in names else None
        if self.items != sorted(self.items, key=_ITEM_SIZES.__getitem__, reverse=True):
            raise TypeError(f"{body_type.__name__}: columns are not in order of item size, widest first")
        declared = [*body_type.SCALARS, *names, *((self.text,) if self.text else ())]
        if [field.name for field in fields(body_type)] != declared:
            raise TypeError(f"{body_type.__name__}: fields do not follow SCALARS, COLUMNS, TEXT")


def _getter(names: Sequence[str]) -> Callable[[Body], tuple[Any, ...]]:
    """One call that fetches the named attributes as a tuple."""
    if len(names) > 1:
        return attrgetter(*names)
    if names:
        single = attrgetter(names[0])
        return lambda body: (single(body),)
    return lambda body: ()


def _scalar_getter(body_type: type[Body]) -> Callable[[Body], tuple[int, ...]]:
    """One call that fetches a body's scalars, as the signed numbers that the head holds."""
    fetch = _getter(body_type.SCALARS)
    if "request" not in body_type.SCALARS:
        return fetch
    # A request key is unsigned, and the last scalar of each type that has one.
    return lambda body: (*fetch(body)[:-1], _signed(fetch(body)[-1]))


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_SCHEMAS: dict[type[Body], _Schema] = {body_type: _Schema(body_type) for body_type in set(BODIES.values())}


@lru_cache(maxsize=512)
def _plan(schema: _Schema, counts: Counts) -> _Plan:
    rows, width, drafts, ragged = counts
    shapes = {
        Extent.ROW: (rows, 1),
        Extent.WIDTH: (rows, width),
        Extent.DRAFT: (rows, drafts),
        Extent.RAGGED: (ragged, 1),
    }
    sizes = [prod(shapes[extent]) for extent in schema.extents]
    tables = {Extent.WIDTH, Extent.DRAFT}
    groups: list[_Group] = []
    at, first = HEAD_SIZE, 0
    for item, item_size in _ITEM_SIZES.items():
        count = schema.items.count(item)
        if not count:
            continue
        edges = [*accumulate(sizes[first : first + count], initial=at // item_size)]
        groups.append(_Group(item, item_size, tuple(slice(a, b) for a, b in pairwise(edges))))
        at += item_size * (edges[-1] - edges[0])
        first += count
    # Any extent but the ragged one has rows in it.
    used = (bool(schema.extents), *(e in schema.extents for e in (Extent.WIDTH, Extent.DRAFT, Extent.RAGGED)))
    return _Plan(
        sizes=sizes,
        groups=tuple(groups),
        tables=tuple((i, shapes[e]) for i, e in enumerate(schema.extents) if e in tables),
        text_at=at,
        possible=max(width, drafts) <= COLUMNS_MAX
        and all(needed or not count for needed, count in zip(used, counts, strict=True)),
    )


def _counts(body: Body) -> Counts:
    match body:
        case Inputs():
            return len(body.request), 0, body.draft_tokens.shape[1], len(body.input_ids)
        case Payload():
            return len(body.request), body.tokens.shape[1], body.draft_tokens.shape[1], 0
        case Mask():
            return len(body.engine), 0, 0, 0
        case _:
            return 0, 0, 0, 0


def size_of(body: Body) -> int:
    """Bytes that `encode` makes of ``body``."""
    text_at = _plan(_SCHEMAS[type(body)], _counts(body)).text_at
    return (text_at + len(_text(body)) + 7) & ~7


def _text(body: Body) -> bytes:
    return b"" if body.TEXT is None else _bytes(getattr(body, body.TEXT))


def encode(kind: Kind, seq: int, step: int, t_ns: int, body: Body) -> bytes:
    """One record.

    Columns of another dtype or memory layout are converted. Raises ValueError or IndexError if a column does
    not fit its extent, struct.error if a number does not fit its field.
    """
    schema, counts, text = _SCHEMAS[type(body)], _counts(body), _text(body)
    plan = _plan(schema, counts)
    columns = schema.columns(body)
    sizes = [column.size for column in columns]
    if sizes != plan.sizes or not plan.possible:
        raise ValueError(f"columns of shapes {[column.shape for column in columns]}, expected {plan.sizes}")
    if [column.dtype for column in columns] != schema.dtypes:
        columns = tuple(c.astype(d, "C", copy=False) for c, d in zip(columns, schema.dtypes, strict=True))
    end = plan.text_at + len(text)
    size = (end + 7) & ~7
    scalars = (*schema.scalars(body), *schema.scalar_padding)
    head = _REST.pack(*counts, len(text), seq, step, t_ns, *scalars)
    padding = bytes(size - end)
    try:
        rest = b"".join((head, *columns, text, padding))
    except TypeError:  # a column with holes between its elements
        columns = tuple(column.copy(order="C") for column in columns)
        rest = b"".join((head, *columns, text, padding))
    lead = _LEAD.pack(MAGIC, kind, schema.scalar_count, size)
    return lead + _CRC.pack(zlib.crc32(rest, zlib.crc32(lead))) + rest


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
    magic, kind_code, scalar_count, size, crc, *rest = _HEAD.unpack_from(buffer)
    rows, width, drafts, ragged, text_size, seq, step, t_ns, *scalars = rest
    if magic != MAGIC:
        raise RecordError(f"record begins with {magic:#06x}, not {MAGIC:#06x}")
    if size > len(buffer) or size > SIZE_MAX or size < HEAD_SIZE or size % 8:
        raise RecordError(f"record claims {size} bytes of {len(buffer)} present")
    if zlib.crc32(memoryview(buffer)[_REST_AT:size], zlib.crc32(buffer[: _LEAD.size])) != crc:
        raise RecordError("record checksum does not match: torn or overwritten")
    kind = _KINDS.get(kind_code)
    if kind is None:
        raise RecordError(f"record kind {kind_code} is unknown to this build")
    if (seq | step | t_ns) >> 63:
        raise RecordError("record is numbered or dated beyond 63 bits")
    schema = _SCHEMAS[BODIES[kind]]
    plan = _plan(schema, (rows, width, drafts, ragged))
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
    schema: _Schema, plan: _Plan, buffer: bytes, size: int, scalars: list[int], ragged: int, text: bytes
) -> Body:
    values: list[Any] = scalars[: schema.scalar_count]
    if schema.has_key:
        values[-1] &= 2**64 - 1
    columns: list[NDArray[Any]] = []
    for group in plan.groups:
        items = np.frombuffer(buffer, _DTYPES[group.item], size // group.item_size)
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
