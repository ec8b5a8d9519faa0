"""Evidence: what leaves the node. The records of one rank, digested, as one columnar block per kind.

A block holds many steps. Step columns have one entry per record; row columns have one per batch row, all
steps laid end to end, ``rows[i]`` of them for record ``i``. Blocks stay columnar from here to the verdict.
Raw token columns are empty unless the operator opted in; nothing but display ever reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, ClassVar, Final, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.digest import Digester
from stagewatch.agents.identity import Identity
from stagewatch.agents.record import (
    I32,
    U8,
    U64,
    Bind,
    Collective,
    Heartbeat,
    Inputs,
    Kind,
    Mask,
    Note,
    Payload,
    Record,
)

I64 = NDArray[np.int64]

SUSPECT_ID_NEGATIVE: Final = 1
"""A fed token id below zero: a placeholder that reached the embedding."""
SUSPECT_ID_BEYOND_VOCAB: Final = 2
SUSPECT_POSITION: Final = 4
"""A position outside 0 to max_model_len - 1."""
SUSPECT_COUNTS: Final = 8
"""A payload's num_sampled or num_rejected outside what its width and draft count allow."""
DRAFTS_ALL_ZERO: Final = 16
"""Every used draft token is 0: what an earlier stage holds when no draft block ever reached it."""
FEED_IS_STATE: Final = 32
"""The fed window is the last sampled token followed by the draft block, as a decoding row's must be."""


@dataclass(frozen=True, slots=True)
class InputsBlock:
    """What a rank fed, step by step."""

    STEP_COLUMNS: ClassVar = (
        "seq",
        "step",
        "t_ns",
        "rows",
        "tick",
        "graph_mode",
        "spec_tokens",
        "padded_tokens",
        "drafts",
    )

    seq: I64
    step: I64
    t_ns: I64
    rows: I32
    tick: I64
    graph_mode: I32
    spec_tokens: I32
    padded_tokens: I32
    drafts: I32
    """Columns of the draft table (K)."""
    request: U64
    slot: I32
    generation: I32
    mirror: I32
    computed: I32
    prefill_len: I32
    scheduled: I32
    draft_count: I32
    cap: I32
    position: I32
    """The first position fed."""
    position_shape: U64
    """Order-sensitive sum over the row's positions relative to the first; equal for equal shapes."""
    ids_digest: U64
    last_digest: U64
    draft_digest: U64
    """Of the first ``draft_count`` tokens of the draft block, those the step uses."""
    prefilling: U8
    flags: U8
    raw_ids: I32
    """Per step: the fed ids, rows laid end to end by ``scheduled``. Empty unless opted in."""
    raw_last: I32
    raw_drafts: I32
    """Per step: rows x K draft tokens."""


@dataclass(frozen=True, slots=True)
class MaskBlock:
    """The engine's mask and the fixed mask, step by step."""

    STEP_COLUMNS: ClassVar = ("seq", "step", "t_ns", "rows", "engine_none", "fixed_none")

    seq: I64
    step: I64
    t_ns: I64
    rows: I32
    engine_none: I32
    fixed_none: I32
    engine: U8
    fixed: U8


@dataclass(frozen=True, slots=True)
class PayloadBlock:
    """Payloads of one kind (sent, received or consumed), by the step that sent them."""

    STEP_COLUMNS: ClassVar = ("seq", "step", "t_ns", "rows", "at", "skipped", "width", "drafts")

    seq: I64
    step: I64
    t_ns: I64
    rows: I32
    at: I64
    skipped: I32
    width: I32
    """Token columns of the payload."""
    drafts: I32
    """Draft columns of the payload; 0 where no draft block is relayed."""
    request: U64
    slot: I32
    generation: I32
    generation_now: I32
    num_sampled: I32
    num_rejected: I32
    tokens_digest: U64
    """Of the first ``num_sampled`` tokens: the rest is uninitialised memory."""
    last_digest: U64
    """Of the last sampled token alone; 0 for a row that sampled none."""
    draft_digest: U64
    applied: U8
    flags: U8
    raw_tokens: I32
    """Per step: rows x width tokens. Empty unless opted in."""
    raw_drafts: I32


@dataclass(frozen=True, slots=True)
class EventBlock:
    """Everything that has no batch rows: binds, frees, collectives, heartbeats, notes."""

    STEP_COLUMNS: ClassVar = (
        "seq",
        "step",
        "t_ns",
        "kind",
        "slot",
        "generation",
        "request",
        "prompt_len",
        "cap",
        "numel",
        "text",
    )

    seq: I64
    step: I64
    t_ns: I64
    kind: U8
    slot: I32
    generation: I32
    request: U64
    prompt_len: I32
    cap: I32
    numel: I64
    """Elements of a collective."""
    text: list[str]
    """Request id, ``group op dtype`` of a collective, JSON of a heartbeat, or a note."""


Block = InputsBlock | MaskBlock | PayloadBlock | EventBlock
B = TypeVar("B", InputsBlock, MaskBlock, PayloadBlock, EventBlock)

PER_STEP_LISTS: Final = frozenset({"raw_ids", "raw_drafts", "raw_tokens"})
"""Columns that are neither per step nor per row: their length per step is in no row count."""


def list_offsets(block: Block, column: str) -> I64:
    """Where each step's part of a row column or raw column begins: int64 [steps + 1]."""
    if isinstance(block, EventBlock):
        return np.arange(len(block.seq) + 1, dtype=np.int64)
    rows: I64 = np.concatenate([[0], np.cumsum(block.rows, dtype=np.int64)])
    if not column.startswith("raw_"):
        return rows
    if not len(getattr(block, column)):
        return np.zeros(len(rows), np.int64)
    if isinstance(block, InputsBlock) and column == "raw_ids":
        tokens: I64 = np.concatenate([[0], np.cumsum(block.scheduled, dtype=np.int64)])
        return tokens[rows]
    if column == "raw_last":
        return rows
    per_row = (
        block.width if isinstance(block, PayloadBlock) and column == "raw_tokens" else cast(Any, block).drafts
    )
    sizes: I64 = np.concatenate([[0], np.cumsum(block.rows * per_row, dtype=np.int64)])
    return sizes


def slice_steps(block: B, first: int, end: int) -> B:
    """Records ``first`` to ``end`` (exclusive) of a block, as views."""
    if first == 0 and end == len(block.seq):
        return block
    columns: list[Any] = []
    for field in fields(block):
        values = getattr(block, field.name)
        if field.name in block.STEP_COLUMNS:
            columns.append(values[first:end])
        else:
            offsets = list_offsets(block, field.name)
            columns.append(values[offsets[first] : offsets[end]])
    return type(block)(*columns)


@dataclass(frozen=True, slots=True)
class Evidence:
    """One rank's records of consecutive sequence numbers, digested."""

    first_seq: int
    next_seq: int
    """One past the last sequence number covered; records lost in between are in `lost`."""
    lost: int
    """Records before `next_seq` that were overwritten or damaged before they could be read."""
    inputs: InputsBlock | None
    mask: MaskBlock | None
    sent: PayloadBlock | None
    received: PayloadBlock | None
    consumed: PayloadBlock | None
    events: EventBlock | None


def digest_records(
    records: Sequence[Record], identity: Identity, digester: Digester, *, lost: int = 0, raw: bool = False
) -> Evidence:
    """Turn records of one rank, in ring order, into evidence. ``records`` is not empty."""
    by_kind: dict[Kind, list[Record]] = {}
    for found in records:
        by_kind.setdefault(found.kind, []).append(found)
    events = [found for found in records if not isinstance(found.body, Inputs | Mask | Payload)]

    def payloads(kind: Kind) -> PayloadBlock | None:
        return _payload_block(by_kind[kind], identity, digester, raw) if kind in by_kind else None

    return Evidence(
        first_seq=records[0].seq,
        next_seq=records[-1].seq + 1,
        lost=lost,
        inputs=_inputs_block(by_kind[Kind.INPUTS], identity, digester, raw)
        if Kind.INPUTS in by_kind
        else None,
        mask=_mask_block(by_kind[Kind.MASK]) if Kind.MASK in by_kind else None,
        sent=payloads(Kind.SENT),
        received=payloads(Kind.RECEIVED),
        consumed=payloads(Kind.CONSUMED),
        events=_event_block(events) if events else None,
    )


def _heads(records: Sequence[Record]) -> tuple[I64, I64, I64]:
    return (
        np.array([found.seq for found in records], np.int64),
        np.array([found.step for found in records], np.int64),
        np.array([found.t_ns for found in records], np.int64),
    )


def _scalar(bodies: Sequence[Any], name: str, dtype: type[np.signedinteger[Any]] = np.int32) -> NDArray[Any]:
    return np.array([getattr(body, name) for body in bodies], dtype)


def _joined(bodies: Sequence[Any], name: str) -> NDArray[Any]:
    return np.concatenate([getattr(body, name) for body in bodies])


def _inputs_block(
    records: Sequence[Record], identity: Identity, digester: Digester, raw: bool
) -> InputsBlock:
    bodies = [cast(Inputs, found.body) for found in records]
    scheduled = _joined(bodies, "scheduled")
    ids, positions = _joined(bodies, "input_ids"), _joined(bodies, "positions")
    last, draft_count = _joined(bodies, "last_sampled"), _joined(bodies, "draft_count")
    drafts = _padded(bodies)
    used = np.clip(draft_count, 0, drafts.shape[1])
    first, shape = _position_shape(positions, scheduled)
    ids_digest = digester.ragged(ids, scheduled)
    return InputsBlock(
        *_heads(records),
        rows=np.array([len(body.request) for body in bodies], np.int32),
        tick=_scalar(bodies, "tick", np.int64),
        graph_mode=_scalar(bodies, "graph_mode"),
        spec_tokens=_scalar(bodies, "spec_tokens"),
        padded_tokens=_scalar(bodies, "padded_tokens"),
        drafts=_draft_columns(bodies),
        request=_joined(bodies, "request"),
        slot=_joined(bodies, "slot"),
        generation=_joined(bodies, "generation"),
        mirror=_joined(bodies, "mirror"),
        computed=_joined(bodies, "computed"),
        prefill_len=_joined(bodies, "prefill_len"),
        scheduled=scheduled,
        draft_count=draft_count,
        cap=_joined(bodies, "cap"),
        position=first,
        position_shape=shape,
        ids_digest=ids_digest,
        last_digest=digester.single(last),
        draft_digest=digester.prefixes(drafts, used),
        prefilling=_joined(bodies, "prefilling"),
        flags=_input_flags(ids, positions, scheduled, last, drafts, used, ids_digest, identity, digester),
        raw_ids=ids if raw else _NO_TOKENS,
        raw_last=last if raw else _NO_TOKENS,
        raw_drafts=_joined_flat(bodies, "draft_tokens") if raw else _NO_TOKENS,
    )


_NO_TOKENS: Final = np.zeros(0, np.int32)


def _padded(bodies: Sequence[Inputs | Payload]) -> I32:
    """Draft tables of all steps one under the other, padded with 0 to the widest: int32 [rows, K]."""
    width = max(body.draft_tokens.shape[1] for body in bodies)
    if all(body.draft_tokens.shape[1] == width for body in bodies):
        return np.concatenate([body.draft_tokens for body in bodies])
    return np.concatenate(
        [np.pad(b.draft_tokens, ((0, 0), (0, width - b.draft_tokens.shape[1]))) for b in bodies]
    )


def _draft_columns(bodies: Sequence[Inputs | Payload]) -> I32:
    return np.array([body.draft_tokens.shape[1] for body in bodies], np.int32)


def _joined_flat(bodies: Sequence[Any], name: str) -> I32:
    return np.concatenate([getattr(body, name).reshape(-1) for body in bodies])


def _row_any(found: NDArray[np.bool_], lengths: I32) -> NDArray[np.bool_]:
    """Whether any element of each row is true; rows laid end to end, some perhaps empty."""
    sums = np.concatenate([[0], np.cumsum(found)])
    ends = np.cumsum(lengths)
    return cast("NDArray[np.bool_]", sums[ends] > sums[ends - lengths])


def _position_shape(positions: I32, lengths: I32) -> tuple[I32, U64]:
    starts = np.cumsum(lengths) - lengths
    if not len(positions):
        return np.zeros(len(lengths), np.int32), np.zeros(len(lengths), np.uint64)
    first = positions[np.minimum(starts, len(positions) - 1)]
    index = np.arange(len(positions)) - np.repeat(starts, lengths)
    relative = (positions - np.repeat(first, lengths)).astype(np.uint64)
    weights = (2 * index + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(relative * weights, dtype=np.uint64)])
    return first, sums[starts + lengths] - sums[starts]


def _input_flags(
    ids: I32,
    positions: I32,
    scheduled: I32,
    last: I32,
    drafts: I32,
    used: I32,
    ids_digest: U64,
    identity: Identity,
    digester: Digester,
) -> U8:
    flags = np.where(_row_any(ids < 0, scheduled), SUSPECT_ID_NEGATIVE, 0)
    if identity.vocab_size > 0:
        flags |= np.where(_row_any(ids >= identity.vocab_size, scheduled), SUSPECT_ID_BEYOND_VOCAB, 0)
    bad = positions < 0
    if identity.max_model_len > 0:
        bad |= positions >= identity.max_model_len
    flags |= np.where(_row_any(bad, scheduled), SUSPECT_POSITION, 0)
    columns = np.arange(drafts.shape[1]) < used[:, None]
    flags |= np.where((used > 0) & ~((drafts != 0) & columns).any(axis=1), DRAFTS_ALL_ZERO, 0)
    state = np.concatenate([last[:, None], drafts], axis=1)
    flags |= np.where(digester.prefixes(state, used + 1) == ids_digest, FEED_IS_STATE, 0)
    return flags.astype(np.uint8)


def _mask_block(records: Sequence[Record]) -> MaskBlock:
    bodies = [cast(Mask, found.body) for found in records]
    return MaskBlock(
        *_heads(records),
        rows=np.array([len(body.engine) for body in bodies], np.int32),
        engine_none=_scalar(bodies, "engine_none"),
        fixed_none=_scalar(bodies, "fixed_none"),
        engine=_joined(bodies, "engine"),
        fixed=_joined(bodies, "fixed"),
    )


def _payload_block(
    records: Sequence[Record], identity: Identity, digester: Digester, raw: bool
) -> PayloadBlock:
    bodies = [cast(Payload, found.body) for found in records]
    rows = np.array([len(body.request) for body in bodies], np.int32)
    width = np.array([body.tokens.shape[1] for body in bodies], np.int32)
    num_sampled, num_rejected = _joined(bodies, "num_sampled"), _joined(bodies, "num_rejected")
    widest = int(width.max())
    tokens = np.concatenate([np.pad(b.tokens, ((0, 0), (0, widest - b.tokens.shape[1]))) for b in bodies])
    row_width = np.repeat(width, rows)
    defined = np.clip(num_sampled, 0, row_width)
    last = (
        tokens[np.arange(len(tokens)), np.maximum(defined - 1, 0)]
        if widest
        else np.zeros(len(tokens), np.int32)
    )
    drafts = _padded(bodies)
    row_drafts = np.repeat(_draft_columns(bodies), rows)
    return PayloadBlock(
        *_heads(records),
        rows=rows,
        at=_scalar(bodies, "at", np.int64),
        skipped=_scalar(bodies, "skipped"),
        width=width,
        drafts=_draft_columns(bodies),
        request=_joined(bodies, "request"),
        slot=_joined(bodies, "slot"),
        generation=_joined(bodies, "generation"),
        generation_now=_joined(bodies, "generation_now"),
        num_sampled=num_sampled,
        num_rejected=num_rejected,
        tokens_digest=digester.prefixes(tokens, defined),
        last_digest=np.where(defined > 0, digester.single(last), np.uint64(0)),
        draft_digest=digester.prefixes(drafts, row_drafts),
        applied=_joined(bodies, "applied"),
        flags=_payload_flags(num_sampled, num_rejected, tokens, defined, identity),
        raw_tokens=_joined_flat(bodies, "tokens") if raw else _NO_TOKENS,
        raw_drafts=_joined_flat(bodies, "draft_tokens") if raw else _NO_TOKENS,
    )


def _payload_flags(num_sampled: I32, num_rejected: I32, tokens: I32, defined: I32, identity: Identity) -> U8:
    most = identity.spec_tokens + 1 if identity.spec_tokens >= 0 else np.iinfo(np.int32).max
    bad_counts = (num_sampled < 0) | (num_rejected < 0) | (num_sampled.astype(np.int64) + num_rejected > most)
    flags = np.where(bad_counts, SUSPECT_COUNTS, 0)
    columns = np.arange(tokens.shape[1]) < defined[:, None]
    flags |= np.where(((tokens < 0) & columns).any(axis=1), SUSPECT_ID_NEGATIVE, 0)
    if identity.vocab_size > 0:
        flags |= np.where(((tokens >= identity.vocab_size) & columns).any(axis=1), SUSPECT_ID_BEYOND_VOCAB, 0)
    return flags.astype(np.uint8)


def _event_block(records: Sequence[Record]) -> EventBlock:
    def column(name: str, dtype: Any) -> NDArray[Any]:
        return np.array([getattr(found.body, name, 0) for found in records], dtype)

    return EventBlock(
        *_heads(records),
        kind=np.array([found.kind for found in records], np.uint8),
        slot=column("slot", np.int32),
        generation=column("generation", np.int32),
        request=column("request", np.uint64),
        prompt_len=column("prompt_len", np.int32),
        cap=column("cap", np.int32),
        numel=column("numel", np.int64),
        text=[_event_text(found) for found in records],
    )


def _event_text(found: Record) -> str:
    match found.body:
        case Bind(request_id=text) | Collective(what=text) | Heartbeat(health=text) | Note(text=text):
            return text
        case _:
            return ""


def join(blocks: Sequence[B]) -> B:
    """One block of many of the same type, in the order given; at least one."""
    if len(blocks) == 1:
        return blocks[0]
    block_type = type(blocks[0])
    columns: list[Any] = []
    for field in fields(block_type):
        values: list[Any] = [getattr(block, field.name) for block in blocks]
        columns.append([*chain.from_iterable(values)] if field.name == "text" else np.concatenate(values))
    return block_type(*columns)
