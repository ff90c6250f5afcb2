"""A small random Llama as a Hugging Face folder, written without transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB = 128


def write_tiny_llama(
    folder: Path,
    *,
    heads: int = 8,
    kv_heads: int = 4,
    head_dim: int = 16,
    hidden: int = 128,
    inner: int = 192,
    layers: int = 3,
    vocab: int = VOCAB,
    context: int = 512,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Biases on q, k and v, its own head. Large weights, so that greedy answers wander."""
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int, scale: float = 0.15) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    tensors = {
        "model.embed_tokens.weight": draw(vocab, hidden, scale=1.0),
        "model.norm.weight": 1 + draw(hidden),
        "lm_head.weight": draw(vocab, hidden, scale=0.5),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = draw(rows * head_dim, hidden)
            tensors[f"{at}self_attn.{name}_proj.bias"] = draw(rows * head_dim)
        tensors[f"{at}self_attn.o_proj.weight"] = draw(hidden, heads * head_dim)
        tensors[f"{at}mlp.gate_proj.weight"] = draw(inner, hidden)
        tensors[f"{at}mlp.up_proj.weight"] = draw(inner, hidden)
        tensors[f"{at}mlp.down_proj.weight"] = draw(hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = 1 + draw(hidden)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": context,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
