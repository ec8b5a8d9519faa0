"""What a rank's hooks record, and when. One `RankHooks` per armed worker.

The wrappers sit on the worker's own objects (its runner, request states and handler), not on vLLM's classes,
so that they see whatever else was patched before and vanish with the worker. Two module functions cannot be
reached that way: the mask and ``torch.distributed.broadcast``, which is watched for one group only.
"""

import functools
import inspect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.engines import vllm_batch
from stagewatch.agents.engines.staging import Gather, Staging, Values
from stagewatch.agents.engines.vllm_batch import Deferred, Keys, Plan, Rows
from stagewatch.agents.engines.vllm_mask import sound_mask
from stagewatch.agents.engines.vllm_variants import Finding
from stagewatch.agents.engines.wrapping import Args, Kwargs, Wrapping, argument, is_watched
from stagewatch.agents.errors import StagewatchError
from stagewatch.agents.mask import BoolArray, has_any
from stagewatch.agents.probe import Probe
from stagewatch.agents.record import I32, UNKNOWN, Kind, request_key

_SEND_NAMES: Final = ("isend_tensor_dict", "send_tensor_dict")
_RECEIVE_NAMES: Final = ("irecv_tensor_dict", "recv_tensor_dict")
_DRAFTS_AT: Final = 3


@dataclass(slots=True)
class _Sent:
    """The last stage's payload of a step while its parts come in."""

    step: int
    rows: Rows
    applied: BoolArray | None
    values: list[Values] = field(default_factory=list)

    def add(self, values: list[Values]) -> None:
        """Keep what arrived until the rest has."""
        self.values += [value.copy() for value in values]


class RankHooks:
    """Hooks of one worker.

    ``runner`` is the V2 GPUModelRunner with its request states and handler; ``pp_utils`` the module of the
    mask; ``distributed`` is ``torch.distributed``; ``pp_group`` the pipeline's GroupCoordinator.
    """

    def __init__(
        self,
        probe: Probe,
        finding: Finding,
        staging: Staging,
        *,
        runner: Any,
        pp_utils: Any,
        distributed: Any,
        pp_group: Any,
    ) -> None:
        self._probe = probe
        self._finding = finding
        self._staging = staging
        self._runner = runner
        self._states = runner.req_states
        self._handler = runner.pp_handler
        self._pp_utils = pp_utils
        self._distributed = distributed
        self._pp_group = pp_group
        self._keys = Keys()
        self._tick = 0
        self._mask_step = -1
        self._mask: BoolArray | None = None
        self._sent: _Sent | None = None
        self._batch_slots: NDArray[np.integer] | None = None
        self._batch_rows: Rows | None = None
        self._dummy_at = _position(runner.execute_model, "dummy_run")
        self._descriptor_at = _position(runner.prepare_inputs, "batch_desc")
        self._deferred: deque[Deferred] = deque()
        self._group = pp_group.world_size
        self._wrapping = Wrapping(probe)

    @property
    def suspended(self) -> bool:
        """True while the engine runs batches that belong to no request: profiling and warm-up."""
        return self._wrapping.suspended

    @suspended.setter
    def suspended(self, suspended: bool) -> None:
        self._wrapping.suspended = suspended

    def install(self) -> None:
        """Put the wrappers in place.

        With none left in place, raises AttributeError where one has nothing to wrap and StagewatchError where this
        process has an armed worker already: two would see each other's masks and broadcasts.
        """
        if is_watched(self._pp_utils.compute_need_sampled_mask):
            raise StagewatchError("another worker of this process is armed: a process has one rank to watch")
        wrap = self._wrapping.wrap
        try:
            wrap(self._runner, "execute_model", self._execute)
            wrap(self._runner, "prepare_inputs", None, self._prepared)
            wrap(self._states, "add_request", None, self._added)
            wrap(self._handler, "on_req_idx_freed", self._freed)
            if self._handler.is_last_rank:
                wrap(self._handler, "broadcast", None, self._broadcast)
                if self._finding.relay:
                    wrap(self._handler, self._finding.relay, None, self._relayed)
                    wrap(self._runner, "sample_tokens", None, self._sampled)
            else:
                wrap(self._handler, "receive", None, self._received)
                wrap(self._handler, "get_prev_sampled_outputs", self._consuming, self._consumed)
            wrap(self._pp_utils, "compute_need_sampled_mask", None, self._masked)
            wrap(self._distributed, "broadcast", self._collective)
            wrap(self._pp_group, _present(self._pp_group, _SEND_NAMES), self._sending)
            wrap(self._pp_group, _present(self._pp_group, _RECEIVE_NAMES), self._receiving)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Take the wrappers off, and let go of what belongs to the engine."""
        self._wrapping.remove()
        self._deferred.clear()
        self._staging.forget()
        self._sent = self._batch_slots = self._batch_rows = None

    def _execute(self, args: Args, kwargs: Kwargs) -> None:
        if not argument(args, kwargs, self._dummy_at, "dummy_run"):
            self._wrapping.settle()
            self._tick += 1
            self._staging.poll()

    def _prepared(self, _: Any, batch: Any, args: Args, kwargs: Kwargs) -> None:
        manager = getattr(self._runner, "pcp_manager", None)
        if manager is not None:
            # This rank feeds a part of the batch; all decisions are taken on the whole of it.
            batch = getattr(manager, "global_batch", None) or manager._global_batch
        descriptor = argument(args, kwargs, self._descriptor_at, "batch_desc")
        graph_mode = getattr(getattr(descriptor, "cg_mode", None), "value", None)
        scheduled = argument(args, kwargs, 0, "scheduler_output")
        planned = getattr(scheduled, "num_spec_tokens_to_schedule", None)
        plan = Plan(
            self._probe.begin(),
            self._tick,
            graph_mode if isinstance(graph_mode, int) else UNKNOWN,
            planned if isinstance(planned, int) else UNKNOWN,
        )
        rows = vllm_batch.rows_of(batch, self._keys, self._handler.req_idx_gen_np)
        self._batch_slots, self._batch_rows = batch.idx_mapping_np, rows
        adaptive = getattr(self._runner, "adaptive_verification", None) is not None
        vllm_batch.stage_inputs(self._staging, batch, self._states, rows, plan, adaptive, self._probe.inputs)

    def _rows(self, batch: Any) -> Rows:
        """Rows of ``batch``: those of the step's inputs where it is the same batch, with their generations now."""
        known, generations = self._batch_rows, self._handler.req_idx_gen_np
        if known is None or batch.idx_mapping_np is not self._batch_slots:
            return vllm_batch.rows_of(batch, self._keys, generations)
        return Rows(known.request, known.slot, generations.take(known.slot))

    def _masked(self, _: Any, mask: BoolArray | None, args: Args, kwargs: Kwargs) -> None:
        if self._mask_step == self._probe.step:
            return  # the last stage computes it once per broadcast
        self._mask_step, self._mask = self._probe.step, mask
        batch = argument(args, kwargs, 0, "input_batch")
        # Only a row that is prefilling can be refined away, and most batches have none.
        refined = self._finding.refined and has_any(batch.is_prefilling_np)
        caps = self._states.max_seq_len.take(batch.idx_mapping_np) if refined else None
        fixed = sound_mask(batch, refined=refined, max_seq_len=caps)
        self._probe.mask(mask, fixed, batch.num_reqs)

    def _broadcast(self, _: Any, __: Any, args: Args, kwargs: Kwargs) -> None:
        rows = self._rows(argument(args, kwargs, 3, "input_batch"))
        step = self._probe.step
        known = self._mask_step == step
        if known and self._mask is None:
            self._staging.take([], functools.partial(self._skipped, Kind.SENT, step, rows))
            return
        self._sent = sent = _Sent(step, rows, self._mask if known else None)
        names = ("sampled_token_ids", "num_sampled", "num_rejected")
        tensors = [argument(args, kwargs, position, name) for position, name in enumerate(names)]
        self._staging.take(tensors, sent.add)
        if not self._finding.relay:
            self._flush_sent()

    def _relayed(self, _: Any, __: Any, args: Args, kwargs: Kwargs) -> None:
        drafts = argument(args, kwargs, 0, "draft_tokens")
        if drafts is None:
            drafts = argument(args, kwargs, 0, "draft_table")
        sent = self._sent
        if sent is None:
            return
        if self._finding.relays_table:
            batch = argument(args, kwargs, 1, "input_batch")
            drafts = Gather(drafts, batch.idx_mapping, batch.idx_mapping_np)
        self._staging.take([drafts], sent.add)
        self._flush_sent()

    def _sampled(self, _: Any, __: Any, args: Args, kwargs: Kwargs) -> None:
        self._flush_sent()  # a step whose drafts were not relayed

    def _flush_sent(self) -> None:
        sent, self._sent = self._sent, None
        if sent is None:
            return
        probe = self._probe

        def arrived(_: list[Values]) -> None:
            if len(sent.values) >= _DRAFTS_AT:  # else its copy was given up, and counted
                probe.payload(Kind.SENT, sent.step, vllm_batch.payload(sent.rows, sent.values, sent.applied))

        self._staging.take([], arrived)

    def _received(self, _: Any, __: Any, args: Args, kwargs: Kwargs) -> None:
        batch = argument(args, kwargs, 0, "input_batch")
        queue = self._handler.queue
        entry = queue[-1]
        probe, step = self._probe, self._probe.step
        if entry is None:
            self._staging.take([], functools.partial(self._skipped, Kind.RECEIVED, step, self._rows(batch)))
            return
        if self._deferred and self._deferred[-1].entry is entry:
            probe.dropped()  # received into no place of its own: whose values these are is not known
            return
        rows = self._rows_received(batch, entry)
        self._deferred.append(Deferred(entry, step, rows))
        while len(self._deferred) > len(queue):
            self._deferred.popleft()  # the engine has let go of it without consuming it
            probe.dropped()
        applied = entry.need_sampled_mask

        def arrived(values: list[Values]) -> None:
            probe.payload(Kind.RECEIVED, step, vllm_batch.payload(rows, values, applied))

        self._staging.take(_tensors(entry), arrived, after=entry.event)

    def _rows_received(self, batch: Any, entry: Any) -> Rows:
        """Rows of ``batch`` as the engine's ``entry`` has them: its slots and its generations."""
        known = self._batch_rows
        if known is not None and entry.idx_mapping_np is batch.idx_mapping_np is self._batch_slots:
            return Rows(known.request, known.slot, entry.gen_at_receive_np.astype(np.int32))
        return Rows(
            self._keys.of(batch.req_ids),
            entry.idx_mapping_np.astype(np.int32),
            entry.gen_at_receive_np.astype(np.int32),
        )

    def _skipped(self, kind: Kind, step: int, rows: Rows, _: list[Values]) -> None:
        """The step broadcasts nothing. Called in turn: payloads of earlier steps may still be on their way."""
        self._probe.payload(kind, step, vllm_batch.skipped(rows))

    def _consuming(self, args: Args, kwargs: Kwargs) -> tuple[Any, I32 | None]:
        queue = self._handler.queue
        entry = queue[0] if queue else None
        if entry is None:
            return None, None
        return entry, self._handler.req_idx_gen_np.take(entry.idx_mapping_np)

    def _consumed(
        self, seen: tuple[Any, I32 | None] | None, outputs: Any, args: Args, kwargs: Kwargs
    ) -> None:
        entry, generation_now = seen or (None, None)
        if entry is None or generation_now is None:
            return
        deferred = self._take_deferred(entry)
        if deferred is None:
            return  # received while nothing was recorded: at warm-up
        probe, at = self._probe, self._probe.step + 1
        tensors = _tensors(entry)
        if outputs is not None:
            tensors[:_DRAFTS_AT] = [
                outputs[name] for name in ("sampled_tokens", "num_sampled", "num_rejected")
            ]
            if outputs.get("draft_tokens") is not None:
                tensors[_DRAFTS_AT:] = [outputs["draft_tokens"]]
            tensors.append(outputs["idx_mapping"])

        def arrived(values: list[Values]) -> None:
            applied = np.zeros(len(deferred.rows.slot), np.bool_)
            if outputs is not None:
                applied = values.pop() >= 0
            body = vllm_batch.payload(deferred.rows, values, applied, at=at, generation_now=generation_now)
            probe.payload(Kind.CONSUMED, deferred.step, body)

        # An engine that applies nothing does not wait for the values to arrive.
        self._staging.take(tensors, arrived, after=entry.event if outputs is None else None)

    def _take_deferred(self, entry: Any) -> Deferred | None:
        """What was noted of ``entry`` when it was received. Those before it were passed over, and are counted."""
        if all(found.entry is not entry for found in self._deferred):
            return None
        while (found := self._deferred.popleft()).entry is not entry:
            self._probe.dropped()
        return found

    def _added(self, _: Any, __: Any, args: Args, kwargs: Kwargs) -> None:
        request_id = argument(args, kwargs, 0, "req_id")
        states = self._states
        slot = states.req_id_to_index[request_id]
        self._keys.bind(request_id, slot, request_key(request_id))
        generation = int(self._handler.req_idx_gen_np[slot])
        self._probe.bind(
            request_id, slot, generation, int(states.prompt_len.np[slot]), int(states.max_seq_len[slot])
        )

    def _freed(self, args: Args, kwargs: Kwargs) -> None:
        slot = argument(args, kwargs, 0, "req_idx")
        self._keys.free(slot)
        self._probe.free(slot, int(self._handler.req_idx_gen_np[slot]))

    def _collective(self, args: Args, kwargs: Kwargs) -> None:
        group = argument(args, kwargs, 2, "group")
        if group is None or group is not self._handler.broadcast_group:
            return
        tensor = argument(args, kwargs, 0, "tensor")
        self._probe.collective("pp_broadcast", "broadcast", _dtype(tensor), tensor.numel(), self._group)

    def _sending(self, args: Args, kwargs: Kwargs) -> None:
        tensors = [t for t in argument(args, kwargs, 0, "tensor_dict").values() if hasattr(t, "numel")]
        dtype = _dtype(tensors[0]) if tensors else "none"
        numel = sum(tensor.numel() for tensor in tensors)
        self._probe.collective("pp_p2p", "send", dtype, numel, self._group)

    def _receiving(self, args: Args, kwargs: Kwargs) -> None:
        # The receiver learns dtype and size from the sender. It receives before it prepares its step's inputs.
        step = self._probe.step + 1
        self._probe.collective("pp_p2p", "receive", "unknown", UNKNOWN, self._group, step)


def _tensors(entry: Any) -> list[Any]:
    found = [entry.sampled_tokens, entry.num_sampled, entry.num_rejected]
    drafts = getattr(entry, "draft_tokens", None)
    return found if drafts is None else [*found, drafts]


def _position(function: Callable[..., Any], name: str) -> int:
    """Place of a parameter among the arguments of a bound method."""
    return list(inspect.signature(function).parameters).index(name)


def _present(target: Any, names: tuple[str, ...]) -> str:
    return next((name for name in names if hasattr(target, name)), names[0])


@functools.cache
def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(tensor: Any) -> str:
    return _dtype_name(tensor.dtype)
