"""Write a tiny model as a Hugging Face folder and serve it: python examples/tiny_model.py FOLDER [FLAGS of baton up]

The model is random, so its answers are nonsense. FOLDER gets the three files that Baton needs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

import baton_serve

baton_serve.put_code_first()  # Baton's packages, such as `deploy`, can be imported from here on

from deploy import cli

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # two query heads share one KV head
    "head_dim": 16,
    "vocab_size": 257,
    "max_position_embeddings": 512,  # most tokens of prompt and answer together
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 256,
}


def write_weights(folder: Path) -> None:
    """Write tensors of shape (outputs, inputs), as in torch's Linear. Baton refuses wrong, extra or missing tensors."""
    generator = torch.Generator().manual_seed(1)
    hidden, inner, kv = 64, 128, 2 * 16

    def draw(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=generator) * 0.2

    tensors = {"model.embed_tokens.weight": draw(257, hidden), "lm_head.weight": draw(257, hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden)
    for number in range(2):
        at = f"model.layers.{number}"
        tensors[f"{at}.input_layernorm.weight"] = torch.ones(hidden)
        tensors[f"{at}.post_attention_layernorm.weight"] = torch.ones(hidden)
        for name, outputs in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            tensors[f"{at}.self_attn.{name}_proj.weight"] = draw(outputs, hidden)
        tensors[f"{at}.mlp.gate_proj.weight"] = draw(inner, hidden)
        tensors[f"{at}.mlp.up_proj.weight"] = draw(inner, hidden)
        tensors[f"{at}.mlp.down_proj.weight"] = draw(hidden, inner)
    save_file(tensors, folder / "model.safetensors")


def write_tokenizer(folder: Path) -> None:
    """Write a vocabulary of one token per byte, and one token that ends the answer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    inner.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(CONFIG, indent=1))
    write_weights(place)
    write_tokenizer(place)
    sys.exit(cli.main(["up", "--model", str(place), "--served-model-name", "tiny", *sys.argv[2:]]))
