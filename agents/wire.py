"""The wire: evidence as frames of a WebSocket, and back.

A frame is one msgpack message. Its columns travel as Arrow record batches without their schema, which
both ends derive from the block types: one Arrow row per record, row columns as lists. The collector
journals frames as they arrive, so this is the journal's format, too.

Everything decoded here may be hostile: sizes are limited before memory is taken, compressed buffers are not
taken at all, Arrow's own full validation runs before a buffer is believed, every list is compared with the row
counts it should follow, and whatever is wrong is a FrameError.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar, cast, get_type_hints

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stagewatch.agents.errors import FrameError
from stagewatch.agents.evidence import (
    Block,
    EventBlock,
    Evidence,
    InputsBlock,
    MaskBlock,
    PayloadBlock,
    list_offsets,
)
from stagewatch.agents.identity import Identity, Rank
from stagewatch.agents.record import I32

PROTOCOL: Final = 1


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Opens a rank's stream on a connection, before its first batch."""

    protocol: int
    identity: Identity


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answers a hello: send from ``next_seq`` on."""

    instance: str
    rank: Rank
    next_seq: int


class Batch(msgspec.Struct, frozen=True, tag="batch"):
    """Evidence of one rank."""

    instance: str
    rank: Rank
    first_seq: int
    next_seq: int
    lost: int
    margin_s: float
    """Time until the ring's writer overtakes the sidecar at the present rate; negative if unknown."""
    parts: dict[str, bytes]
    """Arrow record batches by the field of `Evidence` they fill."""


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """Everything before ``next_seq`` is safe with the collector."""

    instance: str
    rank: Rank
    next_seq: int


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """A frame was not taken. ``retry_s`` is negative where sending it again is useless."""

    reason: str
    retry_s: float
    instance: str = ""
    """With ``rank``, whose frame it was; empty where the frame could not be read that far."""
    rank: Rank | None = None
    next_seq: int = -1
    """Of a batch refused for good, one past its last record: go on from there and count it as lost."""


Upward = Hello | Batch
"""Frames from the sidecar."""
Downward = Welcome | Ack | Refusal
"""Frames from the collector."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a decoder believes at most."""

    frame_bytes: int = 32 << 20
    steps_per_frame: int = 65_536
    rows_per_frame: int = 2_000_000
    text_bytes: int = 65_536
    """Longest request id, note or heartbeat."""


_encoder: Final = msgspec.msgpack.Encoder()
_upward: Final = msgspec.msgpack.Decoder(Upward)
_downward: Final = msgspec.msgpack.Decoder(Downward)

_PARTS: Final[dict[str, type[Block]]] = {
    "inputs": InputsBlock,
    "mask": MaskBlock,
    "sent": PayloadBlock,
    "received": PayloadBlock,
    "consumed": PayloadBlock,
    "events": EventBlock,
}
_ARROW_TYPE: Final = {"uint64": pa.uint64(), "int64": pa.int64(), "int32": pa.int32(), "uint8": pa.uint8()}


def encode_frame(frame: Upward | Downward) -> bytes:
    """A frame as the bytes of one WebSocket message."""
    return _encoder.encode(frame)


def decode_upward(message: bytes, limits: Limits) -> Upward:
    """A sidecar's frame. Raises FrameError."""
    if len(message) > limits.frame_bytes:
        raise FrameError(f"frame of {len(message)} bytes exceeds {limits.frame_bytes}")
    try:
        return _upward.decode(message)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"malformed frame: {error}") from None


def decode_downward(message: bytes) -> Downward:
    """A collector's frame. Raises FrameError."""
    try:
        return _downward.decode(message)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"malformed frame: {error}") from None


def batch_of(identity: Identity, evidence: Evidence, margin_s: float) -> Batch:
    """Evidence as a frame."""
    parts = {name: _encode_block(block) for name in _PARTS if (block := getattr(evidence, name)) is not None}
    return Batch(
        identity.instance,
        identity.rank,
        evidence.first_seq,
        evidence.next_seq,
        evidence.lost,
        margin_s,
        parts,
    )


def evidence_of(batch: Batch, limits: Limits) -> Evidence:
    """A frame's evidence, its columns views of the frame's bytes. Raises FrameError."""
    unknown = batch.parts.keys() - _PARTS.keys()
    if unknown:
        raise FrameError(f"frame part {min(unknown)[:40]!r} is unknown to this build: upgrade the collector")
    if not 0 <= batch.first_seq <= batch.next_seq < 2**63 or not 0 <= batch.lost < 2**63:
        raise FrameError(f"frame covers records {batch.first_seq} to {batch.next_seq} with {batch.lost} lost")
    blocks = {name: _decode_block(_PARTS[name], name, data, limits) for name, data in batch.parts.items()}
    _check_coverage(batch, blocks)
    return Evidence(
        batch.first_seq,
        batch.next_seq,
        batch.lost,
        **{name: blocks.get(name) for name in _PARTS},  # type: ignore[arg-type]  # each name has its own block type by _PARTS
    )


def _check_coverage(batch: Batch, blocks: dict[str, Any]) -> None:
    """A frame's records are numbered without gap or repetition; what was lost lies before them."""
    seqs = np.sort(np.concatenate([np.zeros(0, np.int64), *(block.seq for block in blocks.values())]))
    if not np.array_equal(seqs, np.arange(batch.first_seq, batch.first_seq + len(seqs))) or (
        len(seqs) != batch.next_seq - batch.first_seq
    ):
        raise FrameError(
            f"frame covers records {batch.first_seq} to {batch.next_seq} and does not hold each of them once"
        )


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    arrow: pa.DataType
    listed: bool
    """One list per step instead of one value."""


def _columns(block_type: type[Block]) -> Iterator[_Column]:
    hints = get_type_hints(block_type)
    for field in fields(block_type):
        if field.name == "text":
            yield _Column("text", pa.string(), listed=False)
            continue
        # NDArray[np.int32] is ndarray[shape, dtype[int32]]
        scalar = hints[field.name].__args__[1].__args__[0]
        yield _Column(
            field.name, _ARROW_TYPE[np.dtype(scalar).name], field.name not in block_type.STEP_COLUMNS
        )


_LAYOUT: Final = {block_type: tuple(_columns(block_type)) for block_type in set(_PARTS.values())}
_SCHEMA: Final = {
    block_type: pa.schema(
        [
            pa.field(
                c.name,
                pa.list_(pa.field("item", c.arrow, nullable=False)) if c.listed else c.arrow,
                nullable=False,
            )
            for c in layout
        ]
    )
    for block_type, layout in _LAYOUT.items()
}


def _encode_block(block: Block) -> bytes:
    block_type = type(block)
    arrays = []
    for column, field in zip(_LAYOUT[block_type], _SCHEMA[block_type], strict=True):
        values = getattr(block, column.name)
        if column.listed:
            offsets = pa.array(list_offsets(block, column.name).astype(np.int32))
            arrays.append(pa.ListArray.from_arrays(offsets, pa.array(values, column.arrow), type=field.type))
        else:
            arrays.append(pa.array(values, column.arrow))
    return cast(bytes, pa.record_batch(arrays, schema=_SCHEMA[block_type]).serialize().to_pybytes())


_T = TypeVar("_T")


def _decode_block(block_type: type[_T], name: str, data: bytes, limits: Limits) -> _T:
    batch = _record_batch(_SCHEMA[cast("type[Block]", block_type)], name, data, limits)
    layout = _LAYOUT[cast("type[Block]", block_type)]
    single = [column for column in layout if not column.listed]
    values: dict[str, Any] = {column.name: _values(batch, column.name, name, limits) for column in single}
    if len(single) == len(layout):
        return block_type(**values)
    offsets = _row_offsets(name, values["rows"], limits)
    raw = {}
    for column in layout:
        if column.listed:
            lists = batch.column(column.name)
            found = lists.offsets.to_numpy()
            if column.name.startswith("raw_"):
                raw[column.name] = found
            elif not np.array_equal(found, offsets):
                raise FrameError(f"frame part {name}: column {column.name} does not have one entry per row")
            values[column.name] = lists.values[found[0] : found[-1]].to_numpy(zero_copy_only=True)
    block = block_type(**values)
    for column_name, found in raw.items():
        # Either nothing, or exactly what the other columns announce.
        if len(values[column_name]) and not np.array_equal(
            found, list_offsets(cast(Any, block), column_name)
        ):
            raise FrameError(f"frame part {name}: column {column_name} is not as long as its steps announce")
    return block


def _record_batch(schema: pa.Schema, name: str, data: bytes, limits: Limits) -> pa.RecordBatch:
    try:
        message = pa.ipc.read_message(pa.py_buffer(data))
        if message.type != "record batch" or _is_compressed(message.metadata):
            raise FrameError(f"frame part {name}: not a plain Arrow record batch")
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, EOFError, ValueError, TypeError, struct.error) as error:
        raise FrameError(f"frame part {name}: not the Arrow batch it should be: {str(error)[:120]}") from None
    if batch.num_rows > limits.steps_per_frame:
        raise FrameError(f"frame part {name}: {batch.num_rows} steps exceed {limits.steps_per_frame}")
    for index, field in enumerate(schema):
        column = batch.column(index)
        if column.null_count or (pa.types.is_list(field.type) and column.values.null_count):
            raise FrameError(f"frame part {name}: column {field.name} has nulls")
    return batch


def _is_compressed(metadata: pa.Buffer) -> bool:
    """Whether a record batch's buffers are compressed: we never send that, and believe no inflated size.

    Reads the flatbuffer that Arrow has verified: Message.header (field 2), RecordBatch.compression (field 3),
    as Arrow's format/Message.fbs numbers them.
    """
    view = memoryview(metadata)
    header = _flatbuffer_field(view, struct.unpack_from("<I", view)[0], 2)
    if header is None:
        raise ValueError("a message without header")
    return _flatbuffer_field(view, header + struct.unpack_from("<I", view, header)[0], 3) is not None


def _flatbuffer_field(view: memoryview, table: int, field: int) -> int | None:
    """Where a field of the table at ``table`` lies; None if it is absent."""
    vtable = table - struct.unpack_from("<i", view, table)[0]
    size = struct.unpack_from("<H", view, vtable)[0]
    slot = 4 + 2 * field
    offset = struct.unpack_from("<H", view, vtable + slot)[0] if slot < size else 0
    return table + offset if offset else None


def _values(batch: pa.RecordBatch, column: str, name: str, limits: Limits) -> Any:
    array = batch.column(column)
    if column != "text":
        return array.to_numpy(zero_copy_only=True)
    texts = array.to_pylist()
    if max(map(len, texts), default=0) > limits.text_bytes:
        raise FrameError(f"frame part {name}: a text exceeds {limits.text_bytes} characters")
    return texts


def _row_offsets(name: str, rows: I32, limits: Limits) -> NDArray[np.int64]:
    if len(rows) and int(rows.min()) < 0:
        raise FrameError(f"frame part {name}: a negative row count")
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(rows, dtype=np.int64, out=offsets[1:])
    if offsets[-1] > limits.rows_per_frame:
        raise FrameError(f"frame part {name}: {offsets[-1]} rows exceed {limits.rows_per_frame}")
    return offsets
