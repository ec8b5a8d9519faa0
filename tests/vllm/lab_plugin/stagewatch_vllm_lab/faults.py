# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202  # signatures are those of vLLM and Triton, which are loose
"""Faults put into the real engine at run time, by name.

They patch vLLM's classes when the plugin is loaded, so before any worker exists. Each stands for a bug
that was once public; the invariant it breaks is the test's business.
"""

from functools import wraps

import numpy as np


def old_mask():
    """Leave rows out of the broadcast that are *predicted* to finish, as vLLM 0.23 to 0.29 did (PR 54436)."""
    from vllm.v1.worker.gpu import pp_utils
    from vllm.v1.worker.gpu.states import RequestState

    states = []
    init = RequestState.__init__

    @wraps(init)
    def remember(self, *args, **kwargs):
        init(self, *args, **kwargs)
        states[:] = [self]

    def compute_need_sampled_mask(input_batch):
        computed, prefill = input_batch.num_computed_tokens_np, input_batch.prefill_len_np
        # Later releases fill the batch's caps only where a row is prefilling.
        cap = input_batch.max_seq_len_np
        if cap is None:
            cap = states[0].max_seq_len[input_batch.idx_mapping_np]
        yields = computed + input_batch.num_scheduled_tokens >= prefill
        mask = yields & (np.maximum(computed, prefill) + 1 < cap)
        return mask if mask.any() else None

    RequestState.__init__ = remember
    pp_utils.compute_need_sampled_mask = compute_need_sampled_mask


def drafts_not_relayed():
    """The last stage keeps its drafts to itself; earlier stages expect none (vLLM issue 52295)."""
    from vllm.v1.worker.gpu.pp_utils import PPHandler

    init = PPHandler.__init__

    @wraps(init)
    def expect_no_drafts(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.num_speculative_steps = 0

    PPHandler.__init__ = expect_no_drafts
    PPHandler.broadcast_drafts = lambda self, draft_tokens, input_batch: None


def rejection_not_subtracted():
    """Stage 0 takes every draft for accepted (vLLM RFC 44697, item 1)."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    postprocess = GPUModelRunner.postprocess_sampled

    @wraps(postprocess)
    def postprocess_sampled(self, idx_mapping, sampled_tokens, num_sampled, num_rejected, *args, **kwargs):
        if self.is_first_pp_rank:
            num_rejected = num_rejected * 0
        return postprocess(self, idx_mapping, sampled_tokens, num_sampled, num_rejected, *args, **kwargs)

    GPUModelRunner.postprocess_sampled = postprocess_sampled


PAYLOAD_ALTERED_AT = 4
"""Which payload of stage 0 is altered, counted from 1 among those it consumes."""


def payload_altered():
    """A received payload changes before stage 0 consumes it, as where its buffer is reused too early."""
    from vllm.v1.worker.gpu.pp_utils import PPHandler

    consume = PPHandler.get_prev_sampled_outputs
    seen = []

    @wraps(consume)
    def get_prev_sampled_outputs(self, *args, **kwargs):
        entry = self.queue[0] if self.queue else None
        if entry is not None and _is_first_stage():
            seen.append(entry)
            if len(seen) == PAYLOAD_ALTERED_AT:
                entry.sampled_tokens[0, int(entry.num_sampled[0]) - 1] ^= 1
        return consume(self, *args, **kwargs)

    PPHandler.get_prev_sampled_outputs = get_prev_sampled_outputs


def stale_write():
    """Stage 0 writes a payload into its slots though they were freed and taken again since it was received."""
    from vllm.v1.worker.gpu.pp_utils import PPHandler

    consume = PPHandler.get_prev_sampled_outputs

    @wraps(consume)
    def get_prev_sampled_outputs(self, *args, **kwargs):
        entry = self.queue[0] if self.queue else None
        if entry is not None and _is_first_stage():
            entry.gen_at_receive_np = self.req_idx_gen_np[entry.idx_mapping_np]
        return consume(self, *args, **kwargs)

    PPHandler.get_prev_sampled_outputs = get_prev_sampled_outputs


def allow_pp():
    """Lift the boot check that refuses pipeline stages for this drafter, as forks do. Needed by 0.29."""
    from vllm.model_executor.models.registry import ModelRegistry

    type(ModelRegistry).is_pp_supported_model = lambda self, *args, **kwargs: True


def budget_of_nothing():
    """Stage 0's probe may take next to nothing of a step, and is judged after a few of them."""
    from stagewatch.agents import arming
    from stagewatch.agents.budget import Budget

    made = arming.Probe

    def probe(ring, identity, *, heartbeat_s, budget_share):
        return made(
            ring,
            identity,
            heartbeat_s=heartbeat_s,
            budget_share=1e-9 if identity.rank.pp == 0 else budget_share,
        )

    Budget.WINDOW = 8
    arming.Probe = probe


def hook_raises():
    """A hook of the last stage's fails in mid-run, with what is hardest to handle."""
    from stagewatch.agents.engines.vllm_hooks import RankHooks

    relayed = RankHooks._relayed
    calls = []

    def fails(self, *args):
        calls.append(None)
        if len(calls) == HOOK_RAISES_AT:
            raise MemoryError
        relayed(self, *args)

    RankHooks._relayed = fails


HOOK_RAISES_AT = 9


def _is_first_stage():
    from vllm.distributed.parallel_state import get_pp_group

    return get_pp_group().is_first_rank


FAULTS = {
    "old-mask": old_mask,
    "drafts-not-relayed": drafts_not_relayed,
    "rejection-not-subtracted": rejection_not_subtracted,
    "payload-altered": payload_altered,
    "stale-write": stale_write,
    "allow-pp": allow_pp,
    "budget-of-nothing": budget_of_nothing,
    "hook-raises": hook_raises,
}
