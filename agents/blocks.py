"""Blocks: the columns that leave the node, by kind of record.

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

from stagewatch.agents.identity import Node
from stagewatch.agents.record import I32, U8, U64

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
    rows = np.zeros(len(block.rows) + 1, np.int64)
    np.cumsum(block.rows, out=rows[1:])
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
    sizes: I64 = np.concatenate([[0], np.cumsum(block.rows.astype(np.int64) * per_row)])
    return sizes


def slice_steps(block: B, first: int, end: int) -> B:
    """Records ``first`` to ``end`` (exclusive) of a block, as views."""
    if first == 0 and end == len(block.seq):
        return block
    columns: list[Any] = []
    rows: slice | None = None
    for field in fields(block):
        values = getattr(block, field.name)
        if field.name in block.STEP_COLUMNS:
            columns.append(values[first:end])
        elif field.name.startswith("raw_"):
            offsets = list_offsets(block, field.name)
            columns.append(values[offsets[first] : offsets[end]])
        else:
            if rows is None:
                offsets = list_offsets(block, field.name)
                rows = slice(offsets[first], offsets[end])
            columns.append(values[rows])
    return type(block)(*columns)


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
    left_out: int = 0
    """Of the lost records, those that the sidecar had: the collector refused them, or no frame could hold them."""
    node: Node | None = None
