"""Arrow record batches, as much of the format as the wire uses: plain columns, lists, and text, without nulls.

The bytes are those of an encapsulated Arrow IPC message (format/Message.fbs and Columnar.rst of Apache Arrow,
format version V5), which any Arrow library reads given the schema. Both ends know the schema, so neither it nor
an Arrow library travels: a batch of sixty columns costs Arrow's bindings a millisecond, and its content costs
microseconds. Reading trusts nothing: every position is checked against the bytes present, and all that is taken
are views of them, so no claim in a hostile batch can make us allocate.
"""

import struct
from collections.abc import Iterable, Sequence
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
_MESSAGE_HEAD: Final = (_ROOT, *_MESSAGE_VTABLE, _MESSAGE - 4, _V5, _RECORD_BATCH)
_BATCH_HEAD: Final = (
    _BATCH - _MESSAGE - 16,
    *_BATCH_VTABLE_CONTENT,
    _BATCH - _BATCH_VTABLE,
    _TABLES.size - _BATCH - 4,
)
"""What is before and behind the length of the body, the same in every batch that is written here."""
_BODY_FIRST: Final = np.array([1, 0], np.int64)
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


class Schema(tuple[Column, ...]):
    """The columns of a batch, and where in its lists of nodes and buffers each of them is described.

    Per column there is a node, and one more for the values of a listed one. Buffers are validity and values, with
    offsets between the two for text, and validity, offsets, validity and values for a listed one.
    """

    def __init__(self, columns: Iterable[Column]) -> None:
        self.nodes = self.buffers = 0
        self.texts: Final[list[tuple[str, int]]] = []
        """Text columns: name, and place of the buffer of offsets; content is in the next."""
        self.arrays: Final[list[Column]] = []
        """All others."""
        self.lists: Final[list[tuple[str, int, int]]] = []
        """Listed ones: name, place among ``arrays``, and place of the buffer of offsets."""
        first_nodes, value_nodes, value_buffers = [], [], []
        for column in self:
            first_nodes.append(self.nodes)
            if column.dtype is None:
                self.texts.append((column.name, self.buffers + 1))
                self.nodes, self.buffers = self.nodes + 1, self.buffers + 3
                continue
            if column.listed:
                self.lists.append((column.name, len(self.arrays), self.buffers + 1))
                self.nodes, self.buffers = self.nodes + 1, self.buffers + 2
            self.arrays.append(column)
            value_nodes.append(self.nodes)
            value_buffers.append(self.buffers + 1)
            self.nodes, self.buffers = self.nodes + 1, self.buffers + 2
        self.first_nodes: Final = np.array(first_nodes, np.intp)
        """Whose length is the batch's."""
        self.value_nodes: Final = np.array(value_nodes, np.intp)
        """Of ``arrays``: whose length is that of the values."""
        self.value_buffers: Final = np.array(value_buffers, np.intp)
        self.item_sizes: Final = np.array(
            [column.dtype.itemsize for column in self.arrays if column.dtype is not None], np.int64
        )


@dataclass(frozen=True, slots=True)
class Decoded:
    """A batch read back. Arrays are views of its bytes."""

    rows: int
    values: dict[str, Values]
    offsets: dict[str, NDArray[np.int32]]
    """Of listed columns: where each row's list begins and the last ends, int32 [rows + 1]; checked to lie within.
    Columns that list alike share one array."""


_NOTHING: Final[dict[np.dtype[Any] | None, NDArray[Any]]] = {
    dtype: np.zeros(0, dtype) for dtype in map(np.dtype, ("<i8", "<i4", "<u8", "u1"))
}


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
        schema = columns if isinstance(columns, Schema) else Schema(columns)
        return _columns(schema, data, *_tables(data))
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


def _tables(data: bytes) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
    """Rows, node lengths, and each buffer's position in ``data`` and size: int64 [buffers, 2]."""
    continuation, metadata_size = _PREFIX.unpack_from(data)
    body = _PREFIX.size + metadata_size
    if continuation != _CONTINUATION or metadata_size < 0 or metadata_size % 8 or body > len(data):
        raise ValueError("no encapsulated message")
    metadata = memoryview(data)[_PREFIX.size : body]
    rows, nodes, buffers = _as_written_here(metadata) or _as_written_anyhow(metadata)
    if nodes[:, 1].any():
        raise ValueError("it has nulls")
    room = len(data) - body
    # As unsigned, a negative number is one too large.
    if (
        not 0 <= rows <= room
        or max(nodes.view(np.uint64).max(initial=0), buffers.view(np.uint64).max(initial=0)) > room
    ):
        raise ValueError("a size that the bytes present cannot hold")
    if (buffers[:, 0] & 7).any() or buffers.sum(axis=1).max(initial=0) > room:
        raise ValueError("a column that is crooked or reaches beyond the end")
    return rows, nodes[:, 0], buffers + _BODY_FIRST * body


_Tables = tuple[int, NDArray[np.int64], NDArray[np.int64]]


def _as_written_here(metadata: memoryview) -> _Tables | None:
    """Rows, nodes and buffers where the tables have the shape that `_message` gives them; None for any other."""
    if len(metadata) < _TABLES.size + _COUNT.size:
        return None
    table = _TABLES.unpack_from(metadata)
    rows, buffers_at = table[19], _BATCH + 16 + table[20]
    (count,) = _COUNT.unpack_from(metadata, _TABLES.size)
    end = _TABLES.size + _COUNT.size + _STRUCT_SIZE * count
    if table[:10] != _MESSAGE_HEAD or table[11:19] != _BATCH_HEAD or buffers_at != end + 4:
        return None
    if len(metadata) < buffers_at + _COUNT.size:
        return None
    (parts,) = _COUNT.unpack_from(metadata, buffers_at)
    return rows, _structs(metadata, _TABLES.size, count), _structs(metadata, buffers_at, parts)


def _structs(metadata: memoryview, vector: int, count: int) -> NDArray[np.int64]:
    """The (int64, int64) structs of a vector: int64 [count, 2]."""
    return np.frombuffer(metadata, "<i8", 2 * count, vector + _COUNT.size).reshape(count, 2)


def _as_written_anyhow(metadata: memoryview) -> _Tables:
    """The same of tables of any shape, as other writers of the format make them."""
    message = _follow(metadata, 0)
    kind, header = _field(metadata, message, 1), _field(metadata, message, 2)
    if not kind or metadata[kind] != _RECORD_BATCH or not header:
        raise ValueError("no record batch")
    batch = _follow(metadata, header)
    if _field(metadata, batch, 3):
        raise ValueError("compressed, which is not taken")
    length = _field(metadata, batch, 0)
    rows = struct.unpack_from("<q", metadata, length)[0] if length else 0
    return (
        rows,
        _pairs(metadata, _field(metadata, batch, 1)),
        _pairs(metadata, _field(metadata, batch, 2)),
    )


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
    return _structs(metadata, vector, count)


def _columns(
    schema: Schema, data: bytes, rows: int, nodes: NDArray[np.int64], buffers: NDArray[np.int64]
) -> Decoded:
    if len(nodes) != schema.nodes or len(buffers) != schema.buffers:
        raise ValueError("more or fewer columns than announced")
    if (wrong := nodes[schema.first_nodes] != rows).any():
        raise ValueError(f"column {schema[int(wrong.argmax())].name} is not as long as the batch")
    counts, where = nodes[schema.value_nodes], buffers[schema.value_buffers]
    if (wrong := counts * schema.item_sizes > where[:, 1]).any():
        raise ValueError(f"column {schema.arrays[int(wrong.argmax())].name} does not fit its bytes")
    values: dict[str, Values] = {}
    lengths = counts.tolist()
    for column, position, count in zip(schema.arrays, where[:, 0].tolist(), lengths, strict=True):
        values[column.name] = (
            np.frombuffer(data, column.dtype, count, position) if count else _NOTHING[column.dtype]
        )
    for name, place in schema.texts:
        offsets_at, content = buffers[place : place + 2].tolist()
        values[name] = _texts(data, offsets_at, content, rows)
    offsets: dict[str, NDArray[np.int32]] = {}
    known: NDArray[np.int32] | None = None
    known_bytes = b""
    for name, array, place in schema.lists:
        position, size = buffers[place].tolist()
        # Most columns list alike: what was checked once need not be checked again.
        if known is None or data[position : position + size] != known_bytes:
            known, known_bytes = _lists(data, position, size, rows), data[position : position + size]
            ends = int(known[-1])
        offsets[name] = known
        if ends > lengths[array]:
            raise ValueError(f"column {name} has lists beyond its end")
    return Decoded(rows, values, offsets)


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
