"""The wire: evidence as frames of a WebSocket, and back.

A frame is one msgpack message. Its columns travel as Arrow record batches without their schema, which
both ends derive from the block types: one Arrow row per record, row columns as lists. The collector
journals frames as they arrive, so this is the journal's format, too.

Everything decoded here may be hostile: sizes are limited before memory is taken, Arrow's own full
validation runs before a buffer is believed, and whatever is wrong is a FrameError.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar, cast, get_type_hints

import msgspec
import numpy as np
import pyarrow as pa

from stagewatch.agents.errors import FrameError
from stagewatch.agents.evidence import (
    PER_STEP_LISTS,
    Block,
    EventBlock,
    Evidence,
    InputsBlock,
    MaskBlock,
    PayloadBlock,
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
    return Evidence(
        batch.first_seq,
        batch.next_seq,
        batch.lost,
        **{name: blocks.get(name) for name in _PARTS},  # type: ignore[arg-type]  # each name has its own block type by _PARTS
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
    steps = len(block.seq)
    row_offsets = np.zeros(steps + 1, np.int32)
    if not isinstance(block, EventBlock):
        np.cumsum(block.rows, out=row_offsets[1:])
    arrays = []
    for column, field in zip(_LAYOUT[block_type], _SCHEMA[block_type], strict=True):
        values = getattr(block, column.name)
        if not column.listed:
            arrays.append(pa.array(values, column.arrow))
            continue
        offsets = row_offsets
        if column.name in PER_STEP_LISTS or column.name.startswith("raw_"):
            offsets = _raw_offsets(block, column.name, row_offsets)
        arrays.append(
            pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, column.arrow), type=field.type)
        )
    return cast(bytes, pa.record_batch(arrays, schema=_SCHEMA[block_type]).serialize().to_pybytes())


def _raw_offsets(block: Block, name: str, row_offsets: I32) -> I32:
    if not len(getattr(block, name)):
        return np.zeros(len(row_offsets), np.int32)
    if isinstance(block, InputsBlock) and name == "raw_ids":
        token_offsets = np.concatenate([[0], np.cumsum(block.scheduled)])
        return cast(I32, token_offsets[row_offsets].astype(np.int32))
    if name == "raw_last":
        return row_offsets
    columns = (
        block.width if isinstance(block, PayloadBlock) and name == "raw_tokens" else cast(Any, block).drafts
    )
    offsets: I32 = np.concatenate([[0], np.cumsum(cast(Any, block).rows * columns)]).astype(np.int32)
    return offsets


_T = TypeVar("_T")


def _decode_block(block_type: type[_T], name: str, data: bytes, limits: Limits) -> _T:
    schema = _SCHEMA[cast("type[Block]", block_type)]
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(data), schema)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FrameError(f"frame part {name}: not the Arrow batch it should be: {str(error)[:120]}") from None
    if batch.num_rows > limits.steps_per_frame:
        raise FrameError(f"frame part {name}: {batch.num_rows} steps exceed {limits.steps_per_frame}")
    values: dict[str, Any] = {}
    for column in _LAYOUT[cast("type[Block]", block_type)]:
        array = batch.column(column.name)
        if array.null_count:
            raise FrameError(f"frame part {name}: column {column.name} has nulls")
        if column.name == "text":
            if array.nbytes > limits.text_bytes * max(batch.num_rows, 1):
                raise FrameError(f"frame part {name}: texts exceed {limits.text_bytes} bytes each")
            values["text"] = array.to_pylist()
        elif column.listed:
            values[column.name] = array.flatten().to_numpy(zero_copy_only=True)
        else:
            values[column.name] = array.to_numpy(zero_copy_only=True)
    _check_lengths(name, values, limits)
    return block_type(**values)


def _check_lengths(name: str, values: dict[str, Any], limits: Limits) -> None:
    if "rows" not in values:
        return
    counts = values["rows"]
    if len(counts) and int(counts.min()) < 0:
        raise FrameError(f"frame part {name}: a negative row count")
    rows = int(counts.sum(dtype=np.int64))
    if rows > limits.rows_per_frame:
        raise FrameError(f"frame part {name}: {rows} rows exceed {limits.rows_per_frame}")
    steps = len(counts)
    for column, array in values.items():
        if not column.startswith("raw_") and len(array) not in (rows, steps):
            raise FrameError(f"frame part {name}: column {column} has {len(array)} entries for {rows} rows")
