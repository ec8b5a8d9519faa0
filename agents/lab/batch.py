"""The input batch, and how a rank prepares it from its request states.

Like the engine it stands for, the batch carries no length cap: whoever needs one asks the request states.
"""

from dataclasses import dataclass

import numpy as np

from stagewatch.agents.lab.messages import I32, I64, Bool, SchedulerOutput
from stagewatch.agents.lab.states import RequestStates


@dataclass(slots=True)
class InputBatch:
    """One step's batch on the ranks of a block. Leading axis: ranks. Lengths in tokens."""

    handles: I32
    """Shape [rows]."""
    slots: I32
    """Shape [ranks, rows]."""
    flat: I64
    """Flat indices of `slots` into the states; shape [ranks, rows]."""
    generation: I32
    mirror: I32
    """The host's optimistic count; shape [ranks, rows], equal on all ranks of a sound engine."""
    computed: I32
    """The device's count; shape [ranks, rows]."""
    prefill_len: I32
    prefilling: Bool
    """Whether the host takes the row for a prefill chunk; shape [ranks, rows]."""
    scheduled: I32
    """Shape [rows]."""
    draft_count: I32
    """Shape [rows]."""
    last_sampled: I32
    draft_tokens: I32
    """Shape [ranks, rows, K]."""
    input_ids: I32
    """Shape [ranks, tokens]: rows end to end."""
    positions: I32
    """Shape [ranks, tokens]."""
    token_row: I64
    """Row of each token; shape [tokens]."""
    row_end: I64
    """End of each row's tokens; shape [rows]."""
    spec_tokens: int
    """Draft tokens to propose in this step."""

    @property
    def rows(self) -> int:
        """Number of requests in the batch."""
        return len(self.handles)

    @property
    def tokens(self) -> int:
        """Number of tokens in the batch."""
        return len(self.token_row)


def prepare_inputs(states: RequestStates, order: SchedulerOutput, slots: I32, mirror: I32) -> InputBatch:
    """Build the step's batch from the states as they are after deferred updates were consumed.

    ``slots`` [ranks, rows] are the rows' slots, ``mirror`` [ranks, rows] the host's counts as each rank holds them.
    Prefill rows take their ids from the known tokens; a decode row feeds its last sampled token, then its draft block.
    """
    scheduled, draft_count = order.scheduled, order.draft_count
    flat = states.flat(slots)
    computed = states.computed.reshape(-1)[flat]
    prefill_len = states.prefill_len.reshape(-1)[flat]
    last_sampled = states.last_sampled.reshape(-1)[flat]
    drafts = states.draft_tokens.shape[2]
    draft_tokens = states.draft_tokens.reshape(states.ranks * states.slots, drafts)[flat]
    row_end = np.cumsum(scheduled, dtype=np.int64)
    token_row = np.arange(len(scheduled)).repeat(scheduled)
    column = np.arange(len(token_row)) - (row_end - scheduled).repeat(scheduled)
    positions = computed.take(token_row, axis=1) + column.astype(np.int32)
    decoding = computed + scheduled > prefill_len
    input_ids = _input_ids(states, flat, decoding, last_sampled, draft_tokens, positions, token_row, column)
    return InputBatch(
        handles=order.handles,
        slots=slots,
        flat=flat,
        generation=states.generation.reshape(-1)[flat],
        mirror=mirror,
        computed=computed,
        prefill_len=prefill_len,
        prefilling=mirror < prefill_len,
        scheduled=scheduled,
        draft_count=draft_count,
        last_sampled=last_sampled,
        draft_tokens=draft_tokens,
        input_ids=input_ids,
        positions=positions,
        token_row=token_row,
        row_end=row_end,
        spec_tokens=order.spec_tokens,
    )


def _input_ids(
    states: RequestStates,
    flat: I64,
    decoding: Bool,
    last_sampled: I32,
    draft_tokens: I32,
    positions: I32,
    token_row: I64,
    column: I64,
) -> I32:
    block = np.concatenate([last_sampled[:, :, None], draft_tokens], axis=2)
    width = block.shape[2]
    fed: I32 = block.reshape(states.ranks, -1).take(token_row * width + np.minimum(column, width - 1), axis=1)
    # Only a few of a usual batch's rows prefill: look at the known tokens for those alone.
    rows = ~decoding.all(axis=0)
    tokens = rows.take(token_row).nonzero()[0]
    if not len(tokens):
        return fed
    row = token_row[tokens]
    where = (flat * states.length_max).take(row, axis=1)
    where += np.minimum(positions.take(tokens, axis=1), states.length_max - 1)
    known = states.tokens.reshape(-1).take(where)
    fed[:, tokens] = np.where(decoding.take(row, axis=1), fed.take(tokens, axis=1), known)
    return fed


def dummy_order(spec_tokens: int) -> SchedulerOutput:
    """An iteration without requests: what a warm-up or an idle data-parallel replica runs."""
    empty = np.zeros(0, np.int32)
    return SchedulerOutput(empty, (), empty, empty, empty, empty, spec_tokens)


def dummy_batch(tokens: int, drafts: int) -> InputBatch:
    """A batch of one row of ``tokens`` zeros that belongs to no request, for one rank: what a warm-up runs.

    It writes caches of slot 0 before anybody owns that, and is never recorded.
    """
    zero = np.zeros((1, 1), np.int32)
    positions = np.arange(tokens, dtype=np.int32)[None]
    return InputBatch(
        handles=np.zeros(1, np.int32),
        slots=zero,
        flat=zero.astype(np.int64),
        generation=zero,
        mirror=zero,
        computed=zero,
        prefill_len=np.full((1, 1), tokens, np.int32),
        prefilling=np.ones((1, 1), np.bool_),
        scheduled=np.full(1, tokens, np.int32),
        draft_count=np.zeros(1, np.int32),
        last_sampled=zero,
        draft_tokens=np.zeros((1, 1, drafts), np.int32),
        input_ids=np.zeros((1, tokens), np.int32),
        positions=positions,
        token_row=np.zeros(tokens, np.int64),
        row_end=np.full(1, tokens, np.int64),
        spec_tokens=drafts,
    )


def context_parallel_parts(start: int, length: int, ranks: int = 2) -> list[I32]:
    """Positions of a prefill chunk that each of ``ranks`` context-parallel ranks computes.

    The chunk is cut into 2 * ranks pieces and rank r takes pieces r and 2 * ranks - 1 - r, so that early (cheap)
    and late (dear) positions of causal attention balance. Together the parts are the chunk, each position once.
    What is recorded is the global batch, never a part: parts differ between ranks rightfully.
    """
    if length < 0 or start < 0 or ranks < 1:
        raise ValueError(f"no chunk: start {start}, length {length}, ranks {ranks}")
    pieces = np.array_split(np.arange(start, start + length, dtype=np.int32), 2 * ranks)
    return [np.concatenate([pieces[rank], pieces[2 * ranks - 1 - rank]]) for rank in range(ranks)]
