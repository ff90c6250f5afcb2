"""A small random Llama, or one of its relatives, as a Hugging Face folder, written without transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB = 128
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
NUM_EXPERTS, EXPERT_INNER = 6, 64
EXPERTS = {
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": EXPERT_INNER,
    "norm_topk_prob": True,
}


def write_tiny_llama(
    folder: Path,
    *,
    family: str = "qwen2",
    heads: int = 8,
    kv_heads: int = 4,
    head_dim: int = 16,
    hidden: int = 128,
    inner: int = 192,
    layers: int = 3,
    vocab: int = VOCAB,
    context: int = 512,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
) -> Path:
    """Its own head. Large weights, so that greedy answers wander. `window`: of all layers, for mistral."""
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
            if family == "qwen2":
                tensors[f"{at}self_attn.{name}_proj.bias"] = draw(rows * head_dim)
            elif family.startswith("qwen3") and name != "v":
                tensors[f"{at}self_attn.{name}_norm.weight"] = 1 + draw(head_dim)
        tensors[f"{at}self_attn.o_proj.weight"] = draw(hidden, heads * head_dim)
        tensors |= mlp_tensors(f"{at}mlp.", hidden, inner, draw, is_sparse=family == "qwen3_moe")
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = 1 + draw(hidden)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": [FAMILIES[family]],
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
    } | (EXPERTS if family == "qwen3_moe" else {})
    if family == "mistral":
        config["sliding_window"] = window or None
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def mlp_tensors(
    at: str, hidden: int, inner: int, draw: Callable[..., torch.Tensor], *, is_sparse: bool
) -> dict[str, torch.Tensor]:
    tensors = {f"{at}gate.weight": draw(NUM_EXPERTS, hidden)} if is_sparse else {}
    for part in [f"{at}experts.{number}." for number in range(NUM_EXPERTS)] if is_sparse else [at]:
        own = EXPERT_INNER if is_sparse else inner
        tensors[f"{part}gate_proj.weight"] = draw(own, hidden)
        tensors[f"{part}up_proj.weight"] = draw(own, hidden)
        tensors[f"{part}down_proj.weight"] = draw(hidden, own)
    return tensors
