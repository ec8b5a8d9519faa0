"""Run the real engine through one scenario, print what it served as one JSON line, and end.

``python driver.py SCENARIO MODELS PP DRAFTS``. Run with the engine environment's interpreter. The engine core
runs in this process, so that requests arrive, and are aborted, at engine steps a scenario names.
"""

import json
import os
import sys
from dataclasses import dataclass, field, replace
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM, SamplingParams

PROMPTS = ([1, 2, 3, 4, 5], [7, 8, 9], [11] * 9)


@dataclass
class Request:
    """One request: when it arrives, and when it is aborted, in engine steps of this process."""

    name: str
    prompt: list[int]
    max_tokens: int
    arrives: int = 0
    aborted: int = -1


@dataclass
class Scenario:
    """Requests, and the engine arguments that make them meet."""

    requests: list[Request]
    engine: dict[str, Any] = field(default_factory=dict)


def _basic(tokens: int) -> list[Request]:
    return [Request(f"r{index}", list(prompt), tokens) for index, prompt in enumerate(PROMPTS)]


SCENARIOS = {
    # Three greedy requests side by side.
    "basic": Scenario(_basic(40)),
    # The same, arriving one by one: no batch of prefills alone has two rows.
    "staggered": Scenario([replace(r, arrives=index) for index, r in enumerate(_basic(40))]),
    # Enough to see every rank of a larger engine agree.
    "few": Scenario(_basic(12)),
    # Enough work to be killed in the middle of.
    "endless": Scenario(_basic(400)),
    # Chunked prefill, mixed batches, an abort, a slot taken again, and too few blocks for everybody.
    "mixed": Scenario(
        [
            Request("short", [1, 2, 3, 4, 5], 30),
            Request("long", list(range(20, 90)), 24),
            Request("aborted", [7, 8, 9], 60, aborted=14),
            Request("later", [11] * 9, 20, arrives=6),
            Request("latest", list(range(100, 140)), 16, arrives=10),
            Request("one", [5, 6], 1, arrives=12),
        ],
        {
            "max_num_batched_tokens": 32,
            "max_num_seqs": 4,
            "max_model_len": 128,
            "block_size": 32,
            "num_gpu_blocks_override": 6,
            "enable_prefix_caching": False,
        },
    ),
    # A slot that is freed by an abort is taken again while the payload of its former owner is in flight.
    "reuse": Scenario(
        [
            Request("stays", [1, 2, 3, 4, 5], 40),
            Request("aborted", [7, 8, 9], 60, aborted=10),
            Request("heir", [11] * 9, 24),
        ],
        {"max_num_seqs": 2},
    ),
}


def build(scenario: Scenario, models: str, pp: int, drafts: int) -> LLM:
    """Start the engine; ``STAGEWATCH_LAB_TP`` is its tensor parallel size."""
    tp = int(os.environ.get("STAGEWATCH_LAB_TP", "1"))
    arguments = {
        "model": f"{models}/target",
        "skip_tokenizer_init": True,
        "pipeline_parallel_size": pp,
        "tensor_parallel_size": tp,
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 64 << 20,
        "async_scheduling": True,
        "disable_log_stats": True,
    }
    if drafts:
        arguments["speculative_config"] = {
            "method": "eagle",
            "model": f"{models}/eagle",
            "num_speculative_tokens": drafts,
            "draft_tensor_parallel_size": tp,
        }
    return LLM(**arguments | scenario.engine)


def serve(engine: Any, requests: list[Request]) -> dict[str, list[int]]:
    """Serve ``requests``; returns token ids by name."""
    outputs, waiting, step = {}, list(requests), 0
    while waiting or engine.has_unfinished_requests():
        for request in [r for r in waiting if r.arrives <= step]:
            waiting.remove(request)
            params = SamplingParams(
                max_tokens=request.max_tokens, temperature=0, ignore_eos=True, detokenize=False
            )
            engine.add_request(request.name, {"prompt_token_ids": request.prompt}, params)
        for request in requests:
            if request.aborted == step:
                engine.abort_request([request.name])
        for output in engine.step():
            outputs[output.request_id] = list(output.outputs[0].token_ids)
            print(f"SERVED {output.request_id} {len(outputs[output.request_id])}", flush=True)
        step += 1
    return outputs


def main() -> None:
    """Run the scenario that the command line names."""
    name, models, pp, drafts = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    scenario = SCENARIOS[name]
    llm = build(scenario, models, pp, drafts)
    outputs = serve(llm.llm_engine, scenario.requests)
    print("OUTPUTS", json.dumps(outputs), flush=True)


if __name__ == "__main__":
    main()
