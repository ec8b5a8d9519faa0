"""Who a vLLM worker is, and the parts of its configuration that must be equal on all ranks."""

import importlib
import os
import socket
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Final

from stagewatch.agents.engines.vllm_variants import Finding
from stagewatch.agents.identity import Fingerprint, Identity, Rank, Sizes

_INSTANCE: Final = "stagewatch/instance"


def instance_of(config: Any, store: Callable[[], Any]) -> str:
    """Name of this life of the engine, the same on all its ranks.

    It is `VllmConfig.instance_id`. Data parallel replicas of a dense model are engines of their own that were given
    one configuration and no rank among each other, only an index: all but the first have it in their name. Where an
    engine spans nodes that each make a configuration of their own, so also an id of their own, ranks take the first
    one that reaches the process group's ``store``: one atomic compare-and-set, after the group was made, which
    nothing waits for.
    """
    parallel = config.parallel_config
    own = "".join(c if c.isalnum() or c in "-_" else "-" for c in str(config.instance_id)) or "unnamed"
    replica = getattr(parallel, "data_parallel_index", 0)
    if replica and parallel.data_parallel_size == 1:
        own = f"{own}-replica{replica}"
    if getattr(parallel, "nnodes", 1) == 1:
        return own
    return bytes(store().compare_set(_INSTANCE, "", own)).decode()


def identity_of(
    config: Any, runner: Any, finding: Finding, parallel_state: Any, *, deployment: str, instance: str
) -> Identity:
    """Identity of the worker that runs ``runner`` under the VllmConfig ``config``.

    Ranks of prefill context parallelism hold the same batch as their tensor parallel peers, so they count
    as more of those.
    """
    parallel = config.parallel_config
    pp, tp = parallel_state.get_pp_group(), parallel_state.get_tp_group()
    pcp_size = getattr(parallel, "prefill_context_parallel_size", 1)
    pcp_rank = parallel_state.get_pcp_group().rank_in_group if pcp_size > 1 else 0
    return Identity(
        deployment=deployment,
        instance=instance,
        rank=Rank(parallel.data_parallel_rank, pp.rank_in_group, pcp_rank * tp.world_size + tp.rank_in_group),
        sizes=Sizes(parallel.data_parallel_size, pp.world_size, tp.world_size * pcp_size),
        host=socket.gethostname(),
        pid=os.getpid(),
        engine="vllm",
        engine_version=str(importlib.import_module("vllm").__version__),
        variant=finding.variant,
        spec_tokens=runner.num_speculative_steps,
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        started_ns=time.time_ns(),
        config=tuple(
            Fingerprint(name, value) for name, value in sorted(fingerprints(config, runner).items())
        ),
    )


def fingerprints(config: Any, runner: Any) -> dict[str, str]:
    """Configuration that must be equal on all ranks of an engine, by name.

    Names of models and paths can be secret, so they are hashed. What differs by design is left out:
    devices, layers held, per-rank seeds.
    """
    model, scheduler, cache = config.model_config, config.scheduler_config, config.cache_config
    spec = config.speculative_config
    found = {
        "model": _hashed(model.model, getattr(model, "revision", None)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "block_size": str(cache.block_size),
        "prefix_caching": str(cache.enable_prefix_caching),
        "max_num_seqs": str(scheduler.max_num_seqs),
        "max_num_batched_tokens": str(scheduler.max_num_batched_tokens),
        "async_scheduling": str(scheduler.async_scheduling),
        "vocab_size": str(runner.vocab_size),
        "spec_tokens": str(runner.num_speculative_steps),
        "spec_method": str(spec.method) if spec is not None else "none",
        "layer_partition": os.environ.get("VLLM_PP_LAYER_PARTITION", "default"),
        "torch": str(importlib.import_module("torch").__version__),
        "engine": str(importlib.import_module("vllm").__version__),
    }
    draft = getattr(spec, "draft_model_config", None)
    if draft is not None:
        found["draft_model"] = _hashed(draft.model, getattr(draft, "revision", None))
    layout = draft_layout(runner)
    if layout:
        found["draft_layout"] = layout
    configured, loaded = draft_facts(runner, draft)
    if configured:
        found["draft_configured"], found["draft_loaded"] = configured, loaded
    return found


def draft_layout(runner: Any) -> str:
    """How the drafter of ``runner`` lies in memory, as loaded; empty on a rank that has none, or does not show it.

    Only the last stage drafts, so this is compared between its tensor parallel peers, which must have built the
    same drafter (vLLM PR 50280).
    """
    try:
        model = runner.get_draft_model()
        shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
        embedding = getattr(getattr(model, "model", model), "embed_tokens", None)
        head = getattr(model, "lm_head", None)
        weight = getattr(embedding, "weight", None)
        tied = "tied" if weight is not None and getattr(head, "weight", None) is weight else "not tied"
    except Exception:  # noqa: BLE001  # a drafter of another kind is no reason not to arm
        return ""
    return f"{type(model).__name__}, {len(shapes)} tensors {_hashed(shapes)}, {tied}"


def draft_facts(runner: Any, draft: Any) -> tuple[str, str]:
    """What the configuration ``draft`` (a ModelConfig) says of the drafter of ``runner``, and what was loaded.

    Both in the same words, so that they are equal unless they contradict each other; empty on a rank without drafter,
    and where neither can be told. Loading a drafter may change its configuration, on the last stage alone, so it is
    the one as of now. A drafter may share embeddings or its head with its target, whatever its configuration says:
    then only what both must have in common is told.
    """
    try:
        model = runner.get_draft_model()
        said = getattr(draft, "hf_text_config", None) or draft.hf_config
        weight = getattr(model, "model", model).embed_tokens.weight
        head = getattr(getattr(model, "lm_head", None), "weight", None)
        target = {id(parameter) for parameter in runner.model.parameters()}
        facts = [("hidden size", said.hidden_size, weight.shape[1])]
        if id(weight) not in target and head is not None and id(head) not in target:
            facts.append(("tied embeddings", bool(said.tie_word_embeddings), head is weight))
    except Exception:  # noqa: BLE001  # a drafter of another kind is no reason not to arm
        return "", ""
    configured, loaded = (", ".join(f"{fact[0]} {fact[place]}" for fact in facts) for place in (1, 2))
    return configured, loaded


def _hashed(*parts: object) -> str:
    return blake2b("\0".join(map(str, parts)).encode(), digest_size=8).hexdigest()
