"""The wire: evidence as frames of a WebSocket, and back.

A frame is one msgpack message. Its columns travel as Arrow record batches without their schema, which
both ends derive from the block types: one Arrow row per record, row columns as lists. The collector
journals frames as they arrive, so this is the journal's format, too.

Everything decoded here may be hostile: sizes are limited before memory is taken, columns are views that were
checked to lie within the frame, every list is compared with the row counts it should follow, and whatever is
wrong is a FrameError.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar, cast, get_args, get_type_hints

import msgspec
import numpy as np

from stagewatch.agents import columnar
from stagewatch.agents.blocks import (
    I64,
    Block,
    EventBlock,
    InputsBlock,
    MaskBlock,
    PayloadBlock,
    list_offsets,
)
from stagewatch.agents.bodies import I32, U8, U64, Kind
from stagewatch.agents.columnar import Column, Decoded, Schema
from stagewatch.agents.errors import FrameError, FrameLimitError
from stagewatch.agents.evidence import Evidence
from stagewatch.agents.identity import Identity, Node, Rank

PROTOCOL: Final = 1


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Opens a rank's stream on a connection, before its first batch."""

    protocol: int
    identity: Identity
    freezes: bool = False
    """Whether the sidecar takes a `Freeze`; one that does not say so would break off the connection over it."""


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
    left_out: int = 0
    """Of the lost records, those that the sidecar had: refused before, or too long for a frame."""
    node: Node | None = None


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


class Freeze(msgspec.Struct, frozen=True, tag="freeze"):
    """An incident turned critical: keep what the rank's ring holds around it, before it is overwritten."""

    instance: str
    rank: Rank
    incident: str
    """Its id, 16 hex digits."""
    first_step: int
    """The first bad step."""
    through_step: int
    """The newest step known when it turned critical."""


class Frozen(msgspec.Struct, frozen=True, tag="frozen"):
    """Answers a `Freeze`: where the window lies."""

    instance: str
    rank: Rank
    incident: str
    path: str
    """Of a dump on the sidecar's node; empty where there is none."""
    first_step: int
    last_step: int
    failure: str = ""
    """Why there is none."""


Upward = Hello | Batch
"""Frames from the sidecar that are journalled."""
FromSidecar = Upward | Frozen
Downward = Welcome | Ack | Refusal | Freeze
"""Frames from the collector."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a decoder believes at most."""

    frame_bytes: int = 32 << 20
    steps_per_frame: int = 65_536
    rows_per_frame: int = 2_000_000
    text_bytes: int = 65_536
    """Longest note or heartbeat."""
    request_characters: int = 4096
    """Longest request id. The probe cuts off what is longer, so only a stranger's can be."""


LIMITS: Final = {
    "frame_too_long": "a frame of more bytes than are allowed",
    "too_many_steps": "a frame of more steps than are allowed",
    "too_many_rows": "a frame of more rows than are allowed",
    "text_too_long": "a name or another text that is too long",
    "request_too_long": "a request id that is too long",
}
"""What can be too much, as labels, and in words."""


_encoder: Final = msgspec.msgpack.Encoder()
_upward: Final = msgspec.msgpack.Decoder(Upward)
_from_sidecar: Final = msgspec.msgpack.Decoder(FromSidecar)
_downward: Final = msgspec.msgpack.Decoder(Downward)

_PARTS: Final[dict[str, type[Block]]] = {
    "inputs": InputsBlock,
    "mask": MaskBlock,
    "sent": PayloadBlock,
    "received": PayloadBlock,
    "consumed": PayloadBlock,
    "events": EventBlock,
}


class _Tagged(msgspec.Struct, frozen=True):
    """Any frame, for its tag alone."""

    type: str


_any: Final = msgspec.msgpack.Decoder(_Tagged)
_DOWNWARD_TAGS: Final = frozenset(kind.__struct_config__.tag for kind in get_args(Downward))


def encode_frame(frame: FromSidecar | Downward) -> bytes:
    """A frame as the bytes of one WebSocket message."""
    return _encoder.encode(frame)


def decode_upward(message: bytes, limits: Limits) -> Upward:
    """A sidecar's frame of those that are journalled. Raises FrameError."""
    return cast(Upward, _decoded(_upward, message, limits))


def decode_from_sidecar(message: bytes, limits: Limits) -> FromSidecar:
    """A sidecar's frame. Raises FrameError."""
    return cast(FromSidecar, _decoded(_from_sidecar, message, limits))


def _decoded(decoder: Any, message: bytes, limits: Limits) -> Any:
    if len(message) > limits.frame_bytes:
        raise FrameLimitError(f"frame of {len(message)} bytes exceeds {limits.frame_bytes}", "frame_too_long")
    try:
        return decoder.decode(message)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"malformed frame: {error}") from None


def decode_downward(message: bytes) -> Downward | None:
    """A collector's frame; None for one of a kind that only later builds know. Raises FrameError."""
    try:
        return _downward.decode(message)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        if _tag_of(message) not in ("", *_DOWNWARD_TAGS):
            return None
        raise FrameError(f"malformed frame: {error}") from None


def _tag_of(message: bytes) -> str:
    try:
        return _any.decode(message).type
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""


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
        evidence.left_out,
        evidence.node,
    )


def evidence_of(batch: Batch, limits: Limits) -> Evidence:
    """A frame's evidence, its columns views of the frame's bytes. Raises FrameError."""
    unknown = batch.parts.keys() - _PARTS.keys()
    if unknown:
        raise FrameError(f"frame part {min(unknown)[:40]!r} is unknown to this build: upgrade the collector")
    if not 0 <= batch.first_seq <= batch.next_seq < 2**63 or not 0 <= batch.lost < 2**63:
        raise FrameError(f"frame covers records {batch.first_seq} to {batch.next_seq} with {batch.lost} lost")
    if not 0 <= batch.left_out <= batch.lost:
        raise FrameError(f"frame says that {batch.left_out} of {batch.lost} lost records were left out")
    _check_node(batch.node)
    blocks = {name: _decode_block(_PARTS[name], name, data, limits) for name, data in batch.parts.items()}
    _check_coverage(batch, blocks)
    return Evidence(
        batch.first_seq,
        batch.next_seq,
        batch.lost,
        **{name: blocks.get(name) for name in _PARTS},  # type: ignore[arg-type]  # each name has its own block type by _PARTS
        left_out=batch.left_out,
        node=batch.node,
    )


def _check_node(node: Node | None) -> None:
    if node is None:
        return
    counts = (node.ring_removed, node.ring_unreadable, node.rings_refused, node.windows_dropped)
    is_id = len(node.sidecar) == 16 and all(digit in "0123456789abcdef" for digit in node.sidecar)
    if not is_id or not all(0 <= count < 2**63 for count in counts):
        raise FrameError("frame tells of its sidecar what cannot be")


def _check_coverage(batch: Batch, blocks: dict[str, Any]) -> None:
    """A frame's records are numbered without gap or repetition; what was lost lies before them."""
    places = (
        np.concatenate([np.zeros(0, np.int64), *(block.seq for block in blocks.values())]) - batch.first_seq
    )
    count = batch.next_seq - batch.first_seq
    is_present = np.zeros(len(places), np.bool_)
    if len(places) == count and ((places >= 0) & (places < count)).all():
        is_present[places] = True
    if len(places) != count or not is_present.all():
        raise FrameError(
            f"frame covers records {batch.first_seq} to {batch.next_seq} and does not hold each of them once"
        )


_DTYPES: Final = (
    (I64, np.dtype("<i8")),
    (I32, np.dtype("<i4")),
    (U64, np.dtype("<u8")),
    (U8, np.dtype("u1")),
)
"""By the types that blocks declare: what is inside an array type is numpy's own business."""


def _columns(block_type: type[Block]) -> Iterator[Column]:
    hints = get_type_hints(block_type)
    for field in fields(block_type):
        if field.name == "text":
            yield Column("text", None, listed=False)
            continue
        dtype = next(dtype for array, dtype in _DTYPES if hints[field.name] == array)
        yield Column(field.name, dtype, listed=field.name not in block_type.STEP_COLUMNS)


COLUMNS: Final[dict[type[Block], Schema]] = {
    block_type: Schema(_columns(block_type)) for block_type in set(_PARTS.values())
}
"""The schema of each part, in order: what an Arrow library needs to read one."""


def _encode_block(block: Block) -> bytes:
    values: list[tuple[Any, Any]] = []
    known: dict[str, Any] = {}
    for column in COLUMNS[type(block)]:
        offsets = None
        if column.listed:
            # Row columns share their offsets; each raw column has its own.
            name = column.name if column.name.startswith("raw_") else "rows"
            if name not in known:
                known[name] = list_offsets(block, column.name)
            offsets = known[name]
        values.append((getattr(block, column.name), offsets))
    return columnar.encode(COLUMNS[type(block)], len(block.seq), values)


_T = TypeVar("_T")


def _decode_block(block_type: type[_T], name: str, data: bytes, limits: Limits) -> _T:
    try:
        decoded = columnar.decode(COLUMNS[cast("type[Block]", block_type)], data)
    except FrameError as error:
        raise FrameError(f"frame part {name}: {error}") from None
    if decoded.rows > limits.steps_per_frame:
        raise FrameLimitError(
            f"frame part {name}: {decoded.rows} steps exceed {limits.steps_per_frame}", "too_many_steps"
        )
    block = block_type(**decoded.values)
    if isinstance(block, EventBlock):
        _check_texts(name, block, limits)
    if decoded.offsets:
        _check_lists(name, cast(Any, block), decoded, limits)
    return block


def _check_texts(name: str, block: EventBlock, limits: Limits) -> None:
    if max(map(len, block.text), default=0) > limits.text_bytes:
        raise FrameLimitError(
            f"frame part {name}: a text exceeds {limits.text_bytes} characters", "text_too_long"
        )
    binds = np.flatnonzero(block.kind == Kind.BIND).tolist()
    if max((len(block.text[place]) for place in binds), default=0) > limits.request_characters:
        raise FrameLimitError(
            f"frame part {name}: a request id exceeds {limits.request_characters} characters",
            "request_too_long",
        )


def _check_lists(
    name: str, block: InputsBlock | MaskBlock | PayloadBlock, decoded: Decoded, limits: Limits
) -> None:
    """Lists are as long as the step columns say: one entry per row, raw columns all or nothing."""
    if (block.rows < 0).any():
        raise FrameError(f"frame part {name}: a negative row count")
    offsets = list_offsets(block, "")
    if offsets[-1] > limits.rows_per_frame:
        raise FrameLimitError(
            f"frame part {name}: {offsets[-1]} rows exceed {limits.rows_per_frame}", "too_many_rows"
        )
    right: Any = None
    for column, found in decoded.offsets.items():
        if column.startswith("raw_"):
            # Lists without any values were found to be empty when they were read.
            is_right = not found[-1] or np.array_equal(found, list_offsets(block, column))
        else:
            is_right = found is right or np.array_equal(found, offsets)
            right = found
        if not is_right or len(decoded.values[column]) != found[-1]:
            raise FrameError(f"frame part {name}: column {column} is not as long as its steps announce")
