"""Arrow record batches, as much of the format as the wire uses: plain columns, lists, and text, without nulls.

The bytes are those of an encapsulated Arrow IPC message (format/Message.fbs and Columnar.rst of Apache Arrow,
format version V5), which any Arrow library reads given the schema. Both ends know the schema, so neither it nor
an Arrow library travels: a batch of sixty columns costs Arrow's bindings a millisecond, and its content costs
microseconds. Reading trusts nothing: every position is checked against the bytes present, and all that is taken
are views of them, so no claim in a hostile batch can make us allocate.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.errors import FrameError

Values = NDArray[Any] | list[str]

_CONTINUATION: Final = 0xFFFFFFFF
_PREFIX: Final = struct.Struct("<Ii")
_V5: Final = 4
_RECORD_BATCH: Final = 3
# Message and RecordBatch tables of a fixed shape, so that only numbers vary. Root, Message's vtable and
# table, RecordBatch's vtable, padding and table; the two vectors follow.
_TABLES: Final = struct.Struct("<I 6H iHBxqI 5H2x iIqI")
_ROOT, _MESSAGE, _BATCH_VTABLE, _BATCH = 16, 16, 36, 48
# Size of the vtable and of its table, then where in the table each field lies.
_MESSAGE_VTABLE: Final = (12, 20, 4, 6, 16, 8)
_BATCH_VTABLE_CONTENT: Final = (10, 20, 8, 4, 16)
_COUNT: Final = struct.Struct("<I")
_OFFSET_DTYPE: Final = np.dtype("<i4")
_STRUCT_SIZE: Final = 16
"""Bytes of a FieldNode and of a Buffer: two int64 each."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a batch. Nothing is null anywhere."""

    name: str
    dtype: np.dtype[Any] | None
    """None for text."""
    listed: bool
    """One list of values per row instead of one value."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """A batch read back. Arrays are views of its bytes."""

    rows: int
    values: dict[str, Values]
    offsets: dict[str, NDArray[np.int32]]
    """Of listed columns: where each row's list begins and the last ends, int32 [rows + 1]; checked to lie within.
    Columns that list alike share one array."""


def encode(
    columns: Sequence[Column], rows: int, values: Sequence[tuple[Values, NDArray[np.int32] | None]]
) -> bytes:
    """A batch of ``rows`` rows; ``values`` has each column's values, a listed one's laid end to end with offsets."""
    nodes: list[int] = []
    parts: list[bytes | memoryview] = []
    for column, (data, offsets) in zip(columns, values, strict=True):
        nodes.append(rows)
        if isinstance(data, list):
            texts = [text.encode() for text in data]
            ends = np.zeros(rows + 1, _OFFSET_DTYPE)
            np.cumsum([len(text) for text in texts], out=ends[1:])
            parts += (b"", ends.data, b"".join(texts))
            continue
        if offsets is not None:
            nodes.append(len(data))
            parts += (b"", np.ascontiguousarray(offsets, _OFFSET_DTYPE).data)
        parts += (b"", np.ascontiguousarray(data, column.dtype).data)
    return _message(rows, nodes, parts)


def decode(columns: Sequence[Column], data: bytes) -> Decoded:
    """Read a batch of these columns. Raises FrameError for anything else."""
    try:
        rows, nodes, buffers = _tables(data)
        return _columns(columns, data, rows, nodes, buffers)
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise FrameError(f"not the Arrow batch it should be: {str(error)[:120]}") from None


def _message(rows: int, nodes: Sequence[int], parts: Sequence[bytes | memoryview]) -> bytes:
    buffers = np.zeros((len(parts), 2), "<i8")
    sizes = np.array([len(part) if isinstance(part, bytes) else part.nbytes for part in parts], np.int64)
    padded = (sizes + 7) & ~7
    buffers[:, 1] = sizes
    np.cumsum(padded[:-1], out=buffers[1:, 0])
    node_table = np.zeros((len(nodes), 2), "<i8")
    node_table[:, 0] = nodes
    buffers_at = _TABLES.size + _COUNT.size + node_table.nbytes + 4
    metadata_size = buffers_at + _COUNT.size + buffers.nbytes
    message = (_MESSAGE - 4, _V5, _RECORD_BATCH, int(padded.sum()), _BATCH - _MESSAGE - 16)
    batch = (_BATCH - _BATCH_VTABLE, _TABLES.size - _BATCH - 4, rows, buffers_at - _BATCH - 16)
    pieces: list[bytes | memoryview] = [
        _PREFIX.pack(_CONTINUATION, metadata_size),
        _TABLES.pack(_ROOT, *_MESSAGE_VTABLE, *message, *_BATCH_VTABLE_CONTENT, *batch),
        _COUNT.pack(len(nodes)),
        node_table.data,
        bytes(4) + _COUNT.pack(len(parts)),
        buffers.data,
    ]
    for part, size, room in zip(parts, sizes.tolist(), padded.tolist(), strict=True):
        if size:
            pieces.append(part)
            if room > size:
                pieces.append(bytes(room - size))
    return b"".join(pieces)


def _tables(data: bytes) -> tuple[int, list[int], list[tuple[int, int]]]:
    """Rows, node lengths, and each buffer's (position in ``data``, size)."""
    continuation, metadata_size = _PREFIX.unpack_from(data)
    body = _PREFIX.size + metadata_size
    if continuation != _CONTINUATION or metadata_size < 0 or metadata_size % 8 or body > len(data):
        raise ValueError("no encapsulated message")
    metadata = memoryview(data)[_PREFIX.size : body]
    message = _follow(metadata, 0)
    kind, header = _field(metadata, message, 1), _field(metadata, message, 2)
    if not kind or metadata[kind] != _RECORD_BATCH or not header:
        raise ValueError("no record batch")
    batch = _follow(metadata, header)
    if _field(metadata, batch, 3):
        raise ValueError("compressed, which is not taken")
    length = _field(metadata, batch, 0)
    rows = struct.unpack_from("<q", metadata, length)[0] if length else 0
    nodes = _pairs(metadata, _field(metadata, batch, 1))
    buffers = _pairs(metadata, _field(metadata, batch, 2))
    if nodes[:, 1].any():
        raise ValueError("it has nulls")
    room = len(data) - body
    # As unsigned, a negative number is one too large.
    if (
        not 0 <= rows <= room
        or max(nodes.view(np.uint64).max(initial=0), buffers.view(np.uint64).max(initial=0)) > room
    ):
        raise ValueError("a size that the bytes present cannot hold")
    if (buffers[:, 0] & 7).any() or (buffers[:, 0] + buffers[:, 1]).max(initial=0) > room:
        raise ValueError("a column that is crooked or reaches beyond the end")
    return rows, nodes[:, 0].tolist(), [(body + at, size) for at, size in buffers.tolist()]


def _follow(metadata: memoryview, at: int) -> int:
    """The position that the relative offset at ``at`` leads to."""
    return at + int(_COUNT.unpack_from(metadata, at)[0])


def _field(metadata: memoryview, table: int, field: int) -> int:
    """Where a field of the flatbuffer table at ``table`` lies; 0 if it is absent."""
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    if vtable < 0:
        raise ValueError("a table that begins before its message")
    slot = 4 + 2 * field
    if slot >= struct.unpack_from("<H", metadata, vtable)[0]:
        return 0
    offset = struct.unpack_from("<H", metadata, vtable + slot)[0]
    return table + offset if offset else 0


def _pairs(metadata: memoryview, field: int) -> NDArray[np.int64]:
    """The vector of (int64, int64) structs that a field leads to: int64 [length, 2]."""
    if not field:
        raise ValueError("a missing vector")
    vector = _follow(metadata, field)
    (count,) = _COUNT.unpack_from(metadata, vector)
    return np.frombuffer(metadata, "<i8", 2 * count, vector + _COUNT.size).reshape(count, 2)


def _columns(
    columns: Sequence[Column], data: bytes, rows: int, nodes: list[int], buffers: list[tuple[int, int]]
) -> Decoded:
    values: dict[str, Values] = {}
    offsets: dict[str, NDArray[np.int32]] = {}
    # A validity buffer, empty or not, goes before each array's own; without nulls it says nothing.
    node, buffer = iter(nodes), iter(buffers)
    known: NDArray[np.int32] | None = None
    known_bytes = b""
    for column in columns:
        if _next(node) != rows:
            raise ValueError(f"column {column.name} is not as long as the batch")
        _next(buffer)
        if column.dtype is None:
            values[column.name] = _texts(data, _next(buffer), _next(buffer), rows)
            continue
        count = rows
        if column.listed:
            position, size = _next(buffer)
            # Most columns list alike: what was checked once need not be checked again.
            if known is None or data[position : position + size] != known_bytes:
                known, known_bytes = _lists(data, position, size, rows), data[position : position + size]
            offsets[column.name] = known
            count = _next(node)
            if known[-1] > count:
                raise ValueError(f"column {column.name} has lists beyond its end")
            _next(buffer)
        values[column.name] = _view(data, _next(buffer), column.dtype, count)
    if next(node, None) is not None or next(buffer, None) is not None:
        raise ValueError("more columns than announced")
    return Decoded(rows, values, offsets)


def _next(items: Any) -> Any:
    found = next(items, None)
    if found is None:
        raise ValueError("fewer columns than announced")
    return found


def _lists(data: bytes, position: int, size: int, rows: int) -> NDArray[np.int32]:
    """Offsets of lists, in order and not negative."""
    # Arrow lets the offsets of no lists be left out.
    found = _view(data, (position, size), _OFFSET_DTYPE, rows + 1) if rows else np.zeros(1, _OFFSET_DTYPE)
    if found[0] < 0 or (found[1:] < found[:-1]).any():
        raise ValueError("lists that are none")
    return found


def _view(data: bytes, where: tuple[int, int], dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    position, size = where
    if count * dtype.itemsize > size:
        raise ValueError(f"{count} values do not fit {size} bytes")
    return np.frombuffer(data, dtype, count, position) if count else np.zeros(0, dtype)


def _texts(data: bytes, where: tuple[int, int], content: tuple[int, int], rows: int) -> list[str]:
    if not rows:
        return []
    ends = _view(data, where, _OFFSET_DTYPE, rows + 1).tolist()
    start, size = content
    if ends[0] < 0 or ends[-1] > size or any(end < begin for begin, end in pairwise(ends)):
        raise ValueError("texts that are none")
    return [data[start + begin : start + end].decode() for begin, end in pairwise(ends)]
