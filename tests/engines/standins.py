"""Stand-ins with the shapes of vLLM's pipeline broadcast path, one per variant, small enough to run in one process.

They share vLLM's names and signatures, which is what the adapter inspects and wraps; the bodies are our own and do
the least that makes two stages agree: a target whose next token is a function of token and position, a drafter
that is wrong now and then, deferred consumption through a queue, slots with generations.
"""

import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from stagewatch.agents.engines.vllm_variants import Engine

VARIANTS = ("A1", "A2", "A+relay", "B", "C", "D")
RELAYING = ("A+relay", "B", "C", "D")
VOCAB = 211
SLOTS = 4
MODEL_LEN = 64

_PENDING = [
    "event",
    "sampled_tokens",
    "num_sampled",
    "num_rejected",
    "idx_mapping",
    "idx_mapping_np",
    "need_sampled_mask",
    "gen_at_receive_np",
]
_BATCH = [
    "req_ids",
    "num_reqs",
    "idx_mapping",
    "idx_mapping_np",
    "num_scheduled_tokens",
    "num_tokens",
    "num_tokens_after_padding",
    "num_draft_tokens",
    "num_draft_tokens_per_req",
    "query_start_loc",
    "query_start_loc_np",
    "cu_num_logits",
    "num_computed_tokens_np",
    "prefill_len_np",
    "is_prefilling_np",
    "input_ids",
    "positions",
]


def next_token(token: int, position: int) -> int:
    """The target model."""
    return (token * 31 + position * 7 + 1) % VOCAB


@dataclass
class Wire:
    """What was broadcast and not yet received. A width that differs is delivered as gloo does: flat, from the front."""

    sent: deque[torch.Tensor] = field(default_factory=deque)


@dataclass
class Group:
    """A stage's end of the broadcast group."""

    wire: Wire
    is_sender: bool


def broadcast(tensor: torch.Tensor, src: int | None = None, group: Group | None = None) -> None:
    """`torch.distributed.broadcast` over a `Wire`."""
    assert group is not None
    if group.is_sender:
        group.wire.sent.append(tensor.clone())
        return
    arrived = group.wire.sent.popleft().reshape(-1)
    tensor.reshape(-1)[: len(arrived)] = arrived[: tensor.numel()]


def faulty(batch: Any) -> np.ndarray | None:
    """The mask of A."""
    computed, prefill = batch.num_computed_tokens_np, batch.prefill_len_np
    mask = (computed + batch.num_scheduled_tokens >= prefill) & (
        np.maximum(computed, prefill) + 1 < batch.max_seq_len_np
    )
    return mask if mask.any() else None


def plain(batch: Any) -> np.ndarray | None:
    """The mask of B."""
    mask = batch.num_computed_tokens_np + batch.num_scheduled_tokens >= batch.prefill_len_np
    return mask if mask.any() else None


def refined(batch: Any) -> np.ndarray | None:
    """The mask of C and D."""
    mask = batch.num_computed_tokens_np + batch.num_scheduled_tokens >= batch.prefill_len_np
    if batch.max_seq_len_np is not None:
        mask = mask & ~(batch.is_prefilling_np & (batch.prefill_len_np + 1 >= batch.max_seq_len_np))
    return mask if mask.any() else None


MASKS = {"A1": faulty, "A2": faulty, "A+relay": faulty, "B": plain, "C": refined, "D": refined}


class Array:
    """A per-slot value with its host and device faces."""

    def __init__(self, dtype: torch.dtype = torch.int32) -> None:
        self.gpu = torch.zeros(SLOTS, dtype=dtype)
        self.np = self.gpu.numpy()


class RequestState:
    """Request states by slot."""

    def __init__(self, drafts: int) -> None:
        self.req_id_to_index: dict[str, int] = {}
        self.free_indices = list(range(SLOTS))
        self.prompt_len, self.prefill_len = Array(), Array()
        self.num_computed_tokens = Array()
        self.num_computed_tokens_np = np.zeros(SLOTS, np.int32)
        self.max_seq_len = np.zeros(SLOTS, np.int32)
        self.last_sampled_tokens = torch.zeros(SLOTS, 1, dtype=torch.int64)
        self.draft_tokens = torch.zeros(SLOTS, drafts, dtype=torch.int64)
        self.prompts: dict[int, list[int]] = {}

    def add_request(
        self,
        req_id: str,
        prompt_len: int,
        all_token_ids: list[int],
        num_computed_tokens: int,
        max_tokens: int,
    ) -> None:
        """Take a slot."""
        slot = self.free_indices.pop()
        self.req_id_to_index[req_id] = slot
        self.prompt_len.np[slot] = prompt_len
        self.prefill_len.np[slot] = len(all_token_ids)
        self.num_computed_tokens.np[slot] = self.num_computed_tokens_np[slot] = num_computed_tokens
        self.max_seq_len[slot] = prompt_len + max_tokens
        self.draft_tokens[slot] = 0
        self.prompts[slot] = all_token_ids

    def remove_request(self, req_id: str) -> int | None:
        """Give a slot back."""
        slot = self.req_id_to_index.pop(req_id, None)
        if slot is not None:
            self.free_indices.append(slot)
        return slot


def make_pp_utils(variant: str) -> ModuleType:
    """The module with mask, pending entry and handler of ``variant``."""
    module = ModuleType("pp_utils")
    relays = variant in RELAYING
    fields: list[Any] = [(name, Any) for name in _PENDING]
    if relays:
        fields.append(("draft_tokens", Any, None))
    module.PendingRecv = dataclasses.make_dataclass("PendingRecv", fields)  # type: ignore[attr-defined]
    module.compute_need_sampled_mask = lambda input_batch: MASKS[variant](input_batch)  # type: ignore[attr-defined]
    if variant != "A1":
        module.current_platform = object()  # type: ignore[attr-defined]

    class Base:
        def __init__(self, rank: "Rank") -> None:
            self.is_last_rank = rank.is_last
            self.num_speculative_steps = rank.drafts
            self.queue: deque[Any] = deque() if rank.is_last else deque([None, None])
            self.req_idx_gen_np = np.zeros(SLOTS, np.int32)
            self.broadcast_group = Group(rank.wire, rank.is_last)
            self._distributed = rank.distributed

        def on_req_idx_freed(self, req_idx: int) -> None:
            self.req_idx_gen_np[req_idx] += 1

        def broadcast(
            self, sampled_token_ids: Any, num_sampled: Any, num_rejected: Any, input_batch: Any
        ) -> None:
            if module.compute_need_sampled_mask(input_batch) is None:  # type: ignore[attr-defined]
                return
            if variant not in ("A1", "A2"):
                missing = self._width(input_batch) - sampled_token_ids.shape[1]
                sampled_token_ids = torch.nn.functional.pad(sampled_token_ids, (0, missing))
            self._put(sampled_token_ids)
            self._put(torch.stack((num_sampled, num_rejected)))

        def _width(self, input_batch: Any) -> int:
            return self.num_speculative_steps + 1

        def _put(self, tensor: Any) -> None:
            self._distributed.broadcast(tensor, src=1, group=self.broadcast_group)

        def _receive(self, input_batch: Any, drafts: bool) -> bool:
            mask = module.compute_need_sampled_mask(input_batch)  # type: ignore[attr-defined]
            if mask is None:
                return False
            rows, k = input_batch.num_reqs, self.num_speculative_steps
            tokens = torch.zeros(rows, self._width(input_batch), dtype=torch.int64)
            counts = torch.zeros(2, rows, dtype=torch.int32)
            self._put(tokens)
            self._put(counts)
            slots = input_batch.idx_mapping_np
            entry = [object(), tokens, counts[0], counts[1], input_batch.idx_mapping, slots, mask]
            entry.append(self.req_idx_gen_np[slots])
            if drafts:
                block = torch.zeros(rows, k, dtype=torch.int64)
                self._put(block)
                entry.append(block)
            self.queue[-1] = module.PendingRecv(*entry)  # type: ignore[attr-defined]
            return bool(mask.all())

        def _consume(self) -> tuple[Any, Any] | None:
            if not self.queue:
                return None
            entry = self.queue.popleft()
            self.queue.append(None)
            if entry is None:
                return None
            freed = self.req_idx_gen_np[entry.idx_mapping_np] != entry.gen_at_receive_np
            out = freed | ~entry.need_sampled_mask
            if out.all():
                return None
            return entry, torch.from_numpy(np.where(out, -1, entry.idx_mapping_np))

        def _outputs(self, found: tuple[Any, Any] | None) -> dict[str, Any] | None:
            if found is None:
                return None
            entry, slots = found
            names = ("sampled_tokens", "num_sampled", "num_rejected")
            return {name: getattr(entry, name) for name in names} | {"idx_mapping": slots}

    class WithoutRelay(Base):
        def receive(self, input_batch: Any) -> bool:
            return self._receive(input_batch, relays)

        def get_prev_sampled_outputs(self) -> dict[str, Any] | None:
            return self._outputs(self._consume())

    class ForkRelay(WithoutRelay):
        def broadcast_draft(self, draft_tokens: Any, input_batch: Any) -> None:
            if module.compute_need_sampled_mask(input_batch) is not None:  # type: ignore[attr-defined]
                self._put(draft_tokens)

        def get_prev_sampled_outputs(self) -> dict[str, Any] | None:
            found = self._consume()
            outputs = self._outputs(found)
            return outputs and outputs | {"draft_tokens": found[0].draft_tokens}  # type: ignore[index]

    class TableRelay(Base):
        def broadcast_drafts(self, draft_tokens: Any, input_batch: Any) -> None:
            if module.compute_need_sampled_mask(input_batch) is not None:  # type: ignore[attr-defined]
                self._put(draft_tokens[input_batch.idx_mapping])

        def receive(self, input_batch: Any) -> bool:
            return self._receive(input_batch, True)

        def get_prev_sampled_outputs(self, draft_tokens_to_update: Any = None) -> dict[str, Any] | None:
            found = self._consume()
            if found is not None and draft_tokens_to_update is not None:
                entry, slots = found
                keep = slots >= 0
                draft_tokens_to_update[slots[keep]] = entry.draft_tokens[keep]
            return self._outputs(found)

    class VariableWidth(Base):
        def _width(self, input_batch: Any) -> int:
            return self.num_speculative_steps + 1 if input_batch.num_draft_tokens else 1

        def broadcast_drafts(self, draft_tokens: Any) -> None:
            self._put(draft_tokens)

        def receive(self, input_batch: Any, recv_drafts: bool) -> bool:
            return self._receive(input_batch, recv_drafts)

        def get_prev_sampled_outputs(self) -> dict[str, Any] | None:
            found = self._consume()
            outputs = self._outputs(found)
            return outputs and outputs | {"draft_tokens": found[0].draft_tokens}  # type: ignore[index]

    kinds = {"A1": WithoutRelay, "A2": WithoutRelay, "A+relay": ForkRelay, "B": TableRelay, "C": TableRelay}
    module.PPHandler = kinds.get(variant, VariableWidth)  # type: ignore[attr-defined]
    return module


class Rank:
    """One stage with everything a process of its own would have."""

    def __init__(self, variant: str, wire: Wire, is_last: bool, drafts: int = 3) -> None:
        self.variant, self.wire, self.is_last, self.drafts = variant, wire, is_last, drafts
        self.distributed = SimpleNamespace(broadcast=broadcast)
        self.pp_utils = make_pp_utils(variant)
        self.engine = make_engine(variant, self.pp_utils)
        self.pp_group = SimpleNamespace(
            world_size=2,
            isend_tensor_dict=lambda tensor_dict, **_: [],
            irecv_tensor_dict=lambda **_: ({}, [], []),
        )
        self.runner = self.engine.runner(self)


class GPUModelRunner:
    """The runner: the same steps on both stages, sampling on the last."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.req_states = RequestState(rank.drafts)
        self.pp_handler = rank.pp_utils.PPHandler(rank)
        self.served: dict[str, list[int]] = {}
        self.max_num_reqs, self.max_num_tokens, self.device = SLOTS, SLOTS * MODEL_LEN, torch.device("cpu")
        self.num_speculative_steps, self.vocab_size, self.max_model_len = rank.drafts, VOCAB, MODEL_LEN
        self._batch: Any = None
        self._planned = 0

    def update_pp_decode_requests(self) -> None:
        """Consume what was received two steps ago."""
        handler, states = self.pp_handler, self.req_states
        if self._rank.variant in ("B", "C"):
            outputs = handler.get_prev_sampled_outputs(states.draft_tokens)
        else:
            outputs = handler.get_prev_sampled_outputs()
        if outputs is None:
            return
        for row, slot in enumerate(outputs["idx_mapping"].tolist()):
            if slot < 0:
                continue
            count = int(outputs["num_sampled"][row])
            if count:
                states.last_sampled_tokens[slot, 0] = outputs["sampled_tokens"][row, count - 1]
            states.num_computed_tokens.gpu[slot] -= outputs["num_rejected"][row]
            if "draft_tokens" in outputs and outputs["draft_tokens"] is not None:
                states.draft_tokens[slot] = outputs["draft_tokens"][row]

    def execute_model(
        self, scheduler_output: Any, intermediate_tensors: Any = None, dummy_run: bool = False
    ) -> None:
        """One step up to the forward pass."""
        if dummy_run:
            return
        self.update_pp_decode_requests()
        for name in sorted(scheduler_output.finished):
            slot = self.req_states.remove_request(name)
            if slot is not None:
                self.pp_handler.on_req_idx_freed(slot)
        for request in scheduler_output.new:
            self.req_states.add_request(
                req_id=request.name,
                prompt_len=len(request.prompt),
                all_token_ids=request.prompt,
                num_computed_tokens=0,
                max_tokens=request.max_tokens,
            )
        for name, computed in scheduler_output.computed.items():
            self.req_states.num_computed_tokens_np[self.req_states.req_id_to_index[name]] = computed
        self._planned = scheduler_output.num_spec_tokens_to_schedule
        if scheduler_output.num_scheduled_tokens:
            self._batch = self.prepare_inputs(scheduler_output, batch_desc=SimpleNamespace(cg_mode=None))

    def prepare_inputs(self, scheduler_output: Any, batch_desc: Any) -> Any:
        """The batch: what this stage feeds."""
        states, drafts = self.req_states, scheduler_output.drafts
        names = sorted(
            scheduler_output.num_scheduled_tokens, key=scheduler_output.num_scheduled_tokens.__getitem__
        )
        slots = np.array([states.req_id_to_index[name] for name in names], np.int64)
        scheduled = np.array([scheduler_output.num_scheduled_tokens[name] for name in names], np.int32)
        starts = np.concatenate([[0], np.cumsum(scheduled)]).astype(np.int32)
        counts = np.array([drafts.get(name, 0) for name in names], np.int32)
        mirror = states.num_computed_tokens_np[slots]
        prefill = states.prefill_len.np[slots]
        ids, positions = [], []
        for slot, count in zip(slots.tolist(), scheduled.tolist(), strict=True):
            at = int(states.num_computed_tokens.gpu[slot])
            positions += range(at, at + count)
            if at < int(states.prefill_len.np[slot]):
                ids += states.prompts[slot][at : at + count]
            else:
                block = [int(states.last_sampled_tokens[slot, 0]), *states.draft_tokens[slot].tolist()]
                ids += block[:count]
        fields = {
            "req_ids": names,
            "num_reqs": len(names),
            "idx_mapping": torch.from_numpy(slots),
            "idx_mapping_np": slots,
            "num_scheduled_tokens": scheduled,
            "num_tokens": len(ids),
            "num_tokens_after_padding": len(ids),
            "num_draft_tokens": int(counts.sum()),
            "num_draft_tokens_per_req": counts if counts.any() else None,
            "query_start_loc": torch.from_numpy(starts),
            "query_start_loc_np": starts,
            "cu_num_logits": torch.from_numpy(np.concatenate([[0], np.cumsum(counts + 1)])),
            "num_computed_tokens_np": mirror,
            "prefill_len_np": prefill,
            "is_prefilling_np": mirror < prefill,
            "input_ids": torch.tensor(ids, dtype=torch.int32),
            "positions": torch.tensor(positions, dtype=torch.int64),
        }
        if self._rank.variant != "B":
            fields["max_seq_len_np"] = states.max_seq_len[slots]
        return self._rank.engine.batch(**fields)

    def sample_tokens(self, grammar_output: Any = None) -> None:
        """The rest of the step."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        if self._rank.is_last:
            self._sample(batch)
            return
        if self._rank.variant == "D":
            self.pp_handler.receive(batch, self._planned > 0)
        else:
            self.pp_handler.receive(batch)
        for slot, count in zip(batch.idx_mapping_np, batch.num_scheduled_tokens, strict=True):
            self.req_states.num_computed_tokens.gpu[int(slot)] += int(count)

    def _sample(self, batch: Any) -> None:
        states, k = self.req_states, self._rank.drafts
        rows = [self._verify(batch, row) for row in range(batch.num_reqs)]
        width = k + 1 if batch.num_draft_tokens_per_req is not None else 1
        tokens = torch.full(
            (batch.num_reqs, width), 1 << 40, dtype=torch.int64
        )  # undefined beyond num_sampled
        for row, sampled in enumerate(rows):
            tokens[row, : len(sampled)] = torch.tensor(sampled, dtype=torch.int64)
        sampled_counts = torch.tensor([len(sampled) for sampled in rows], dtype=torch.int32)
        drafts = (
            batch.num_draft_tokens_per_req
            if batch.num_draft_tokens_per_req is not None
            else np.zeros(len(rows))
        )
        rejected = torch.tensor(
            [
                0 if not sampled else int(d) + 1 - len(sampled)
                for sampled, d in zip(rows, drafts, strict=True)
            ],
            dtype=torch.int32,
        )
        self.pp_handler.broadcast(tokens, sampled_counts, rejected, batch)
        block = torch.zeros(batch.num_reqs, k, dtype=torch.int64)
        for row, sampled in enumerate(rows):
            slot = int(batch.idx_mapping_np[row])
            states.num_computed_tokens.gpu[slot] += int(batch.num_scheduled_tokens[row]) - int(rejected[row])
            if sampled:
                states.last_sampled_tokens[slot, 0] = sampled[-1]
                block[row] = self._propose(sampled[-1], int(states.num_computed_tokens.gpu[slot]))
                self.served.setdefault(batch.req_ids[row], []).extend(sampled)
        block[:, self._planned :] = -1
        states.draft_tokens[batch.idx_mapping] = block
        if self._rank.variant == "D":
            if self._planned and self._rank.pp_utils.compute_need_sampled_mask(batch) is not None:
                self.pp_handler.broadcast_drafts(block)
        elif self._rank.variant == "B":
            self.pp_handler.broadcast_drafts(states.draft_tokens[:], batch)  # the table, by another object
        elif self._rank.variant == "C":
            self.pp_handler.broadcast_drafts(states.draft_tokens, batch)
        elif self._rank.variant == "A+relay":
            self.pp_handler.broadcast_draft(block, batch)

    def _verify(self, batch: Any, row: int) -> list[int]:
        first, end = batch.query_start_loc_np[row : row + 2]
        ids, positions = batch.input_ids[first:end].tolist(), batch.positions[first:end].tolist()
        if positions[-1] + 1 < batch.prefill_len_np[row]:
            return []
        if batch.num_computed_tokens_np[row] < batch.prefill_len_np[row]:
            return [next_token(ids[-1], positions[-1])]
        sampled = [next_token(ids[0], positions[0])]
        for draft, position in zip(ids[1:], positions[1:], strict=True):
            if draft != sampled[-1]:
                break
            sampled.append(next_token(draft, position))
        return sampled

    def _propose(self, token: int, position: int) -> torch.Tensor:
        block = []
        for offset in range(self._rank.drafts):
            token = next_token(token, position + offset)
            if (position + offset) % 5 == 3:
                token = (token + 1) % VOCAB  # wrong now and then
            block.append(token)
        return torch.tensor(block, dtype=torch.int64)


def make_engine(variant: str, pp_utils: ModuleType | None = None) -> Engine:
    """The parts of a vLLM of ``variant``, as `load_engine` would find them."""
    fields: list[Any] = [(name, Any) for name in _BATCH]
    if variant != "B":
        fields.append(("max_seq_len_np", Any, None))
    batch = dataclasses.make_dataclass("InputBatch", fields)
    return Engine(pp_utils or make_pp_utils(variant), None, GPUModelRunner, batch, RequestState)


@dataclass
class Request:
    """A request of the harness."""

    name: str
    prompt: list[int]
    max_tokens: int
    arrives: int = 0
    aborted: int = -1
    drafts_max: int = 1 << 30
    """Most drafts of this request that are verified in a step, as where a grammar refuses the rest."""


class Pipeline:
    """Two stages and a scheduler that spaces a request's decodes by two steps and mirrors progress optimistically."""

    def __init__(self, variant: str, drafts: int = 3) -> None:
        self.wire = Wire()
        self.drafts = drafts
        self.ranks = [Rank(variant, self.wire, is_last=last, drafts=drafts) for last in (False, True)]
        self.planned: Callable[[int], int] = lambda step: drafts
        """Draft tokens to propose at a step."""
        self.between: Callable[[int], None] = lambda step: None
        """Called before each step."""

    def serve(self, requests: list[Request], chunk: int = 4) -> dict[str, list[int]]:
        """Run all requests to their end."""
        first, last = (rank.runner for rank in self.ranks)
        mirror: dict[str, int] = {}
        eligible: dict[str, int] = {}
        running: dict[str, Request] = {}
        waiting = list(requests)
        finished: set[str] = set()
        step = 0
        drafted: dict[str, int] = {}
        while waiting or running or finished:
            self.between(step)
            new = [request for request in waiting if request.arrives <= step and len(running) < SLOTS]
            for request in new:
                waiting.remove(request)
                last.served.pop(request.name, None)
                running[request.name], mirror[request.name], eligible[request.name] = request, 0, step
            for request in [r for r in running.values() if r.aborted == step]:
                finished.add(request.name)
                del running[request.name]
            plan = SimpleNamespace(
                num_scheduled_tokens={},
                drafts={},
                new=new,
                finished=finished,
                computed={},
                total=0,
                num_spec_tokens_to_schedule=self.planned(step),
            )
            for name, request in running.items():
                if eligible[name] > step:
                    continue
                done, prompt = mirror[name], len(request.prompt)
                if done < prompt:
                    count = min(chunk, prompt - done)
                else:
                    # The mirror is the device's own count once the row's last step has been verified.
                    done = int(last.req_states.num_computed_tokens.gpu[last.req_states.req_id_to_index[name]])
                    plan.drafts[name] = min(drafted[name], request.drafts_max)
                    count = plan.drafts[name] + 1
                plan.num_scheduled_tokens[name] = count
                plan.computed[name] = done
                mirror[name] = done + count
                if mirror[name] >= prompt:
                    eligible[name] = step + 2
                    drafted[name] = plan.num_spec_tokens_to_schedule
            if plan.num_scheduled_tokens:
                self.ranks[1].pp_group.irecv_tensor_dict()
            for runner in (first, last):
                runner.execute_model(plan)
            if plan.num_scheduled_tokens:
                self.ranks[0].pp_group.isend_tensor_dict({"hidden_states": torch.zeros(2), "step": step})
            last.sample_tokens(None)
            first.sample_tokens(None)
            finished = set()
            for name, request in list(running.items()):
                if len(last.served.get(name, ())) >= request.max_tokens:
                    finished.add(name)
                    del running[name]
            step += 1
        return dict(last.served)


def expected_text(request: Request) -> list[int]:
    """What a request is answered by the target alone."""
    token, position, found = request.prompt[-1], len(request.prompt) - 1, []
    while len(found) < request.max_tokens:
        token = next_token(token, position)
        position += 1
        found.append(token)
    return found
