"""Write a tiny random Llama and an EAGLE drafter for it: ``python make_models.py DIRECTORY``.

The drafter repeats its input's prediction: its projection passes the target's hidden state through and its one
layer adds nothing, so it proposes, k times over, the token the target just chose. Drafts are then
accepted where the output repeats itself and rejected elsewhere: random weights give both.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN = 128


def main(directory: Path) -> None:
    """Make ``directory``/target and ``directory``/eagle."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    target, eagle = directory / "target", directory / "eagle"
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(target)
    weights = load_file(target / "model.safetensors")
    drafter = {
        "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        "fc.weight": torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], dim=1),
    }
    first_layer = {
        n: w for n, w in weights.items() if n.startswith("model.layers.0.") and "input_layernorm" not in n
    }
    for name, weight in first_layer.items():
        adds_nothing = "o_proj" in name or "down_proj" in name
        drafter[name.removeprefix("model.")] = torch.zeros_like(weight) if adds_nothing else weight.clone()
    eagle.mkdir(parents=True, exist_ok=True)
    settings = json.loads((target / "config.json").read_text())
    (eagle / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 1}))
    save_file(drafter, eagle / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
