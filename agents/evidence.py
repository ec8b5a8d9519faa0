"""Evidence: what leaves the node. The records of one rank, digested, as one columnar block per kind.

`stagewatch.agents.blocks` declares the blocks, and this module hands its names on. Rows are digested where
they lie, whatever the width of a step's tables, so that the company a record is digested in changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.blocks import (
    DRAFTS_ALL_ZERO,
    FEED_IS_STATE,
    I64,
    PER_STEP_LISTS,
    SUSPECT_COUNTS,
    SUSPECT_ID_BEYOND_VOCAB,
    SUSPECT_ID_NEGATIVE,
    SUSPECT_POSITION,
    B,
    Block,
    EventBlock,
    Evidence,
    InputsBlock,
    MaskBlock,
    PayloadBlock,
    join,
    list_offsets,
    slice_steps,
)
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

__all__ = [
    "DRAFTS_ALL_ZERO",
    "FEED_IS_STATE",
    "I64",
    "PER_STEP_LISTS",
    "SUSPECT_COUNTS",
    "SUSPECT_ID_BEYOND_VOCAB",
    "SUSPECT_ID_NEGATIVE",
    "SUSPECT_POSITION",
    "B",
    "Block",
    "EventBlock",
    "Evidence",
    "InputsBlock",
    "MaskBlock",
    "PayloadBlock",
    "digest_records",
    "join",
    "list_offsets",
    "slice_steps",
]


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


class _Columns:
    """The columns and scalars of many bodies of one type, fetched once: by name, one array per body."""

    def __init__(self, records: Sequence[Record]) -> None:
        bodies = [found.body for found in records]
        names = [*bodies[0].SCALARS, *(name for name, _, _ in bodies[0].COLUMNS)]
        self._values = dict(zip(names, zip(*map(attrgetter(*names), bodies), strict=True), strict=True))

    def joined(self, name: str) -> NDArray[Any]:
        """A column with one entry per row, all steps end to end."""
        return np.concatenate(self._values[name])

    def flat(self, name: str) -> I32:
        """A table of every step, its rows laid end to end, whatever the width of each."""
        return np.concatenate([table.reshape(-1) for table in self._values[name]])

    def rows(self, name: str) -> I32:
        """Rows of the column or table in each step."""
        return np.array([len(value) for value in self._values[name]], np.int32)

    def width(self, name: str) -> I32:
        """Columns of the table in each step."""
        return np.array([table.shape[1] for table in self._values[name]], np.int32)

    def scalar(self, name: str, dtype: type[np.signedinteger[Any]] = np.int32) -> NDArray[Any]:
        """A number per step. A wider one wraps, as it does in a record's columns."""
        return np.array(self._values[name], np.int64).astype(dtype)


_NO_TOKENS: Final = np.zeros(0, np.int32)


def _starts(lengths: I32) -> I64:
    """Where each row begins, rows of the given lengths laid end to end."""
    return np.cumsum(lengths, dtype=np.int64) - lengths


def _elements(starts: I64, lengths: I32) -> I64:
    """Index of each element of each row, row after row: int64 [sum of lengths]."""
    total = int(lengths.sum(dtype=np.int64))
    return np.repeat(starts - _starts(lengths), lengths) + np.arange(total)


def _any_within(found: NDArray[np.bool_], starts: I64, lengths: I32) -> NDArray[np.bool_]:
    """Whether any element of each row is true; a row is ``lengths[row]`` elements from ``starts[row]`` on."""
    if not found.any():
        return np.zeros(len(lengths), np.bool_)
    sums = np.zeros(len(found) + 1, np.int64)
    np.cumsum(found, out=sums[1:])
    within: NDArray[np.bool_] = sums[starts + lengths] > sums[starts]
    return within


def _inputs_block(
    records: Sequence[Record], identity: Identity, digester: Digester, raw: bool
) -> InputsBlock:
    columns = _Columns(records)
    fed = _Fed(
        ids=columns.joined("input_ids"),
        positions=columns.joined("positions"),
        scheduled=columns.joined("scheduled"),
        last=columns.joined("last_sampled"),
        drafts=columns.flat("draft_tokens"),
        widths=np.repeat(columns.width("draft_tokens"), columns.rows("request")),
        draft_count=columns.joined("draft_count"),
    )
    position, position_shape = _position_shape(fed.positions, fed.scheduled)
    return InputsBlock(
        *_heads(records),
        rows=columns.rows("request"),
        tick=columns.scalar("tick", np.int64),
        graph_mode=columns.scalar("graph_mode"),
        spec_tokens=columns.scalar("spec_tokens"),
        padded_tokens=columns.scalar("padded_tokens"),
        drafts=columns.width("draft_tokens"),
        request=columns.joined("request"),
        slot=columns.joined("slot"),
        generation=columns.joined("generation"),
        mirror=columns.joined("mirror"),
        computed=columns.joined("computed"),
        prefill_len=columns.joined("prefill_len"),
        scheduled=fed.scheduled,
        draft_count=fed.draft_count,
        cap=columns.joined("cap"),
        position=position,
        position_shape=position_shape,
        ids_digest=digester.ragged(fed.ids, fed.scheduled),
        last_digest=digester.single(fed.last),
        draft_digest=digester.rows(fed.drafts, _starts(fed.widths), fed.used),
        prefilling=columns.joined("prefilling"),
        flags=_input_flags(fed, identity),
        raw_ids=fed.ids if raw else _NO_TOKENS,
        raw_last=fed.last if raw else _NO_TOKENS,
        raw_drafts=fed.drafts if raw else _NO_TOKENS,
    )


@dataclass(frozen=True, slots=True)
class _Fed:
    """The tokens that the rows of an inputs block fed and held, rows laid end to end."""

    ids: I32
    positions: I32
    scheduled: I32
    last: I32
    drafts: I32
    widths: I32
    """Columns that each row has in `drafts`."""
    draft_count: I32

    @property
    def used(self) -> I32:
        """Draft tokens of each row that its step uses."""
        return np.clip(self.draft_count, 0, self.widths)


def _position_shape(positions: I32, lengths: I32) -> tuple[I32, U64]:
    starts = _starts(lengths)
    if not len(positions):
        return np.zeros(len(lengths), np.int32), np.zeros(len(lengths), np.uint64)
    first = positions[np.minimum(starts, len(positions) - 1)]
    first[lengths == 0] = 0
    index = np.arange(len(positions)) - np.repeat(starts, lengths)
    relative = (positions - np.repeat(first, lengths)).astype(np.uint64)
    weights = (2 * index + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    sums = np.zeros(len(positions) + 1, np.uint64)
    np.cumsum(relative * weights, out=sums[1:])
    return first, sums[starts + lengths] - sums[starts]


def _input_flags(fed: _Fed, identity: Identity) -> U8:
    starts, draft_starts, used = _starts(fed.scheduled), _starts(fed.widths), fed.used
    flags = np.where(_any_within(fed.ids < 0, starts, fed.scheduled), SUSPECT_ID_NEGATIVE, 0)
    if identity.vocab_size > 0:
        beyond = _any_within(fed.ids >= identity.vocab_size, starts, fed.scheduled)
        flags |= np.where(beyond, SUSPECT_ID_BEYOND_VOCAB, 0)
    bad = fed.positions < 0
    if identity.max_model_len > 0:
        bad |= fed.positions >= identity.max_model_len
    flags |= np.where(_any_within(bad, starts, fed.scheduled), SUSPECT_POSITION, 0)
    held = _any_within(fed.drafts != 0, draft_starts, used)
    flags |= np.where((used > 0) & ~held, DRAFTS_ALL_ZERO, 0)
    rows = np.flatnonzero(fed.scheduled == used + 1)
    starts, draft_starts, used = starts[rows], draft_starts[rows], used[rows]
    differs = fed.ids[_elements(starts + 1, used)] != fed.drafts[_elements(draft_starts, used)]
    is_state = (fed.ids[starts] == fed.last[rows]) & ~_any_within(differs, _starts(used), used)
    flags[rows[is_state]] |= FEED_IS_STATE
    return flags.astype(np.uint8)


def _mask_block(records: Sequence[Record]) -> MaskBlock:
    columns = _Columns(records)
    return MaskBlock(
        *_heads(records),
        rows=columns.rows("engine"),
        engine_none=columns.scalar("engine_none"),
        fixed_none=columns.scalar("fixed_none"),
        engine=columns.joined("engine"),
        fixed=columns.joined("fixed"),
    )


def _payload_block(
    records: Sequence[Record], identity: Identity, digester: Digester, raw: bool
) -> PayloadBlock:
    columns = _Columns(records)
    rows, width, draft_width = columns.rows("request"), columns.width("tokens"), columns.width("draft_tokens")
    num_sampled, num_rejected = columns.joined("num_sampled"), columns.joined("num_rejected")
    tokens, drafts = columns.flat("tokens"), columns.flat("draft_tokens")
    row_width, row_drafts = np.repeat(width, rows), np.repeat(draft_width, rows)
    starts, defined = _starts(row_width), np.clip(num_sampled, 0, row_width)
    sampled = defined > 0
    last_digest = np.zeros(len(defined), np.uint64)
    last_digest[sampled] = digester.single(tokens[(starts + defined - 1)[sampled]])
    return PayloadBlock(
        *_heads(records),
        rows=rows,
        at=columns.scalar("at", np.int64),
        skipped=columns.scalar("skipped"),
        width=width,
        drafts=draft_width,
        request=columns.joined("request"),
        slot=columns.joined("slot"),
        generation=columns.joined("generation"),
        generation_now=columns.joined("generation_now"),
        num_sampled=num_sampled,
        num_rejected=num_rejected,
        tokens_digest=digester.rows(tokens, starts, defined),
        last_digest=last_digest,
        draft_digest=digester.ragged(drafts, row_drafts),
        applied=columns.joined("applied"),
        flags=_payload_flags(num_sampled, num_rejected, tokens, starts, defined, identity),
        raw_tokens=tokens if raw else _NO_TOKENS,
        raw_drafts=drafts if raw else _NO_TOKENS,
    )


def _payload_flags(
    num_sampled: I32, num_rejected: I32, tokens: I32, starts: I64, defined: I32, identity: Identity
) -> U8:
    # A recorded trace does not say what K was.
    most = identity.spec_tokens + 1 if identity.spec_tokens >= 0 else np.iinfo(np.int32).max
    bad_counts = (num_sampled < 0) | (num_rejected < 0) | (num_sampled.astype(np.int64) + num_rejected > most)
    flags = np.where(bad_counts, SUSPECT_COUNTS, 0)
    flags |= np.where(_any_within(tokens < 0, starts, defined), SUSPECT_ID_NEGATIVE, 0)
    if identity.vocab_size > 0:
        beyond = _any_within(tokens >= identity.vocab_size, starts, defined)
        flags |= np.where(beyond, SUSPECT_ID_BEYOND_VOCAB, 0)
    return flags.astype(np.uint8)


def _event_block(records: Sequence[Record]) -> EventBlock:
    def column(name: str, dtype: Any) -> NDArray[Any]:
        values = [getattr(found.body, name, 0) for found in records]
        # A number too wide for its column wraps, as it does in a record's columns.
        return np.array(values, np.uint64 if dtype is np.uint64 else np.int64).astype(dtype)

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
