"""From vLLM's batch objects to record bodies. Reads host state at once, device state through staging.

Names on the engine's side are those of releases 0.23 to 0.33, which `vllm_variants` has verified to exist.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.engines.staging import Gather, Head, Staging, Values
from stagewatch.agents.record import I32, U64, UNKNOWN, Inputs, Payload

if TYPE_CHECKING:
    import torch


KNOWN_MAX: Final = 64
"""Batches whose keys are kept: as many as are in flight come again and again, with the same requests."""


class Rows(msgspec.Struct, frozen=True, gc=False):
    """Which request is in which slot, row by row of one batch; arrays of shape [rows]."""

    request: U64
    slot: I32
    generation: I32


class Keys:
    """Request keys by request id, kept while a request holds a slot."""

    def __init__(self) -> None:
        self._by_id: dict[str, int] = {}
        self._id_of_slot: dict[int, str] = {}
        self._batches: dict[tuple[str, ...], U64] = {}

    def bind(self, request_id: str, slot: int, key: int) -> None:
        """Remember a request until its slot is freed, or taken without that."""
        self.free(slot)
        self._batches.clear()
        self._by_id[request_id] = key
        self._id_of_slot[slot] = request_id

    def free(self, slot: int) -> None:
        """Forget the request of ``slot``."""
        request_id = self._id_of_slot.pop(slot, None)
        if request_id is not None:
            self._batches.clear()
            self._by_id.pop(request_id, None)

    def of(self, request_ids: list[str]) -> U64:
        """Keys of a batch's rows, uint64 [rows], read-only; 0 for a request never bound."""
        batch = tuple(request_ids)
        found = self._batches.get(batch)
        if found is None:
            if len(self._batches) >= KNOWN_MAX:
                self._batches.clear()
            found = np.array([self._by_id.get(request_id, 0) for request_id in batch], np.uint64)
            found.flags.writeable = False
            self._batches[batch] = found
        return found


def rows_of(batch: Any, keys: Keys, generations: NDArray[np.int32]) -> Rows:
    """The rows of ``batch``, with each slot's generation as it is now."""
    slots = batch.idx_mapping_np
    return Rows(keys.of(batch.req_ids), slots.astype(np.int32), generations.take(slots))


class Plan(msgspec.Struct, frozen=True, gc=False):
    """What the scheduler planned for a step; scalars of the inputs record."""

    step: int
    """The step's ordinal."""
    tick: int
    graph_mode: int
    spec_tokens: int


def stage_inputs(
    staging: Staging,
    batch: Any,
    states: Any,
    rows: Rows,
    plan: Plan,
    adaptive: bool,
    publish: Callable[[Inputs, int], None],
) -> None:
    """Bring the inputs of ``batch`` to the host and hand them to ``publish``, with the step's ordinal.

    ``states`` is the engine's RequestState. With ``adaptive`` verification only the device knows how many
    drafts each row got: the host's counts are upper bounds, so the boundaries are read from the device.
    """
    slots, count, tokens = batch.idx_mapping, batch.num_reqs, batch.num_tokens
    host_slots = batch.idx_mapping_np
    starts = batch.query_start_loc_np
    scheduled = starts[1 : count + 1] - starts[:count]
    drafts = batch.num_draft_tokens_per_req
    draft_count = np.zeros(count, np.int32) if drafts is None else drafts
    host = (
        batch.num_computed_tokens_np,
        batch.prefill_len_np,
        states.max_seq_len.take(host_slots),
        batch.is_prefilling_np.view(np.uint8),
    )
    padded = int(batch.num_tokens_after_padding)
    pieces: list[torch.Tensor | Gather | Head] = [
        Gather(states.num_computed_tokens.gpu, slots, host_slots),
        Gather(states.last_sampled_tokens, slots, host_slots),
        Gather(states.draft_tokens, slots, host_slots),
        Head(batch.input_ids, tokens),
        Head(batch.positions, tokens),
    ]
    if adaptive:
        pieces += [Head(batch.query_start_loc, count + 1), Head(batch.cu_num_logits, count + 1)]

    def arrived(values: list[Values]) -> None:
        computed, last, block, ids, positions = values[:5]
        found_scheduled, found_drafts = scheduled, draft_count
        if adaptive:
            found_scheduled = np.diff(values[5])
            found_drafts = np.maximum(np.diff(values[6]) - 1, 0)
            fed = int(values[5][-1])  # the host's total is a bound, too
            ids, positions = ids[:fed], positions[:fed]
        mirror, prefill_len, cap, prefilling = host
        publish(
            Inputs(
                plan.tick,
                plan.graph_mode,
                plan.spec_tokens,
                padded,
                rows.request,
                rows.slot,
                rows.generation,
                mirror,
                computed,
                prefill_len,
                found_scheduled,
                found_drafts,
                cap,
                last,
                block,
                ids,
                positions,
                prefilling,
            ),
            plan.step,
        )

    staging.take(pieces, arrived)


class Deferred(msgspec.Struct, frozen=True):
    """A payload received and not yet consumed, beside the engine's own entry for it."""

    entry: Any
    """The engine's PendingRecv; matched by identity."""
    step: int
    """Ordinal of the step that sent it."""
    rows: Rows


def payload(
    rows: Rows,
    values: list[Values],
    applied: NDArray[np.bool_] | None,
    *,
    at: int = UNKNOWN,
    generation_now: I32 | None = None,
) -> Payload:
    """A payload body from arrays [tokens, num_sampled, num_rejected, drafts?] as they arrived.

    ``applied`` None stands for every row.
    """
    tokens, num_sampled, num_rejected = values[:3]
    count = len(rows.slot)
    return Payload(
        at,
        0,
        rows.request,
        rows.slot,
        rows.generation,
        rows.generation if generation_now is None else generation_now,
        num_sampled,
        num_rejected,
        tokens.reshape(count, -1),
        values[3] if len(values) > 3 else np.zeros((count, 0), np.int32),
        np.ones(count, np.uint8) if applied is None else applied.view(np.uint8),
    )


def skipped(rows: Rows) -> Payload:
    """The payload of a step that broadcast nothing because its mask was None."""
    count = len(rows.slot)
    none, empty = np.zeros(count, np.int32), np.zeros((count, 0), np.int32)
    return Payload(
        UNKNOWN,
        1,
        rows.request,
        rows.slot,
        rows.generation,
        rows.generation,
        none,
        none,
        empty,
        empty,
        np.zeros(count, np.uint8),
    )
