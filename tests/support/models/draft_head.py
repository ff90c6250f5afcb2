"""A tiny Llama with an EAGLE-3 head of random weights on disk, and the head once more in a few lines of plain torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

VOCAB, DRAFT_VOCAB, LAYERS = 97, 37, 8
AUX_LAYERS = (2, 4, 5)
# Every product has whole tiles of 64 columns, so that a step is one program of compiled tasks; "odd" ones have not.
TARGET = {
    "whole": {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4},
    "odd": {"hidden_size": 96, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 2},
}
HEAD = {
    "whole": {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "odd": {"intermediate_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
}
Tensors = dict[str, torch.Tensor]


def save_target(
    folder: Path, kind: str = "whole", layers: int = LAYERS, head_dim: int = 16
) -> transformers.PreTrainedModel:
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        **TARGET[kind], vocab_size=VOCAB, num_hidden_layers=layers, head_dim=head_dim, max_position_embeddings=256
    )
    network = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, value in network.named_parameters():
            if "norm" in name:
                value.add_(torch.randn_like(value) * 0.3)
            else:
                value.mul_(4.0)
    network.save_pretrained(folder)
    return network


def head_config(kind: str = "whole", vocab: int = VOCAB, draft_vocab: int = DRAFT_VOCAB) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": TARGET[kind]["hidden_size"],
        **HEAD[kind],
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
    }


def head_tensors(kind: str = "whole", vocab: int = VOCAB, draft_vocab: int = DRAFT_VOCAB) -> Tensors:
    hidden, sizes = TARGET[kind]["hidden_size"], HEAD[kind]
    inner, dim = sizes["intermediate_size"], sizes["head_dim"]
    q, kv = sizes["num_attention_heads"] * dim, sizes["num_key_value_heads"] * dim
    draw = torch.Generator().manual_seed(11)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draw) * 1.5 * columns**-0.5

    def norm() -> torch.Tensor:
        return 1 + 0.3 * torch.randn(hidden, generator=draw)

    ids = torch.randperm(vocab, generator=draw)[:draft_vocab].sort().values
    return {
        "fc.weight": matrix(hidden, 3 * hidden),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": matrix(q, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": matrix(kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": matrix(kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": matrix(hidden, q),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.mlp.gate_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.up_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.down_proj.weight": matrix(hidden, inner),
        "norm.weight": norm(),
        "lm_head.weight": matrix(draft_vocab, hidden),
        "d2t": ids - torch.arange(draft_vocab),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True),
    }


def save_head(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class PlainHead:
    """One sequence in float32 and in one causal pass: no pages, no cache, no kernels of ours."""

    def __init__(self, tensors: Tensors, config: Mapping[str, Any], embed: torch.Tensor) -> None:
        self._tensors, self._config, self._embed = tensors, config, embed.float()

    def features(self, aux: torch.Tensor) -> torch.Tensor:
        return self._product(aux, "fc")

    def hidden(self, next_ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """g of all slots, (n, H)."""
        embedded = self._norm(self._embed[next_ids], "midlayer.input_layernorm")
        x = torch.cat((embedded, self._norm(features, "midlayer.hidden_norm")), dim=-1)
        q, k, v = (self._heads(x, name) for name in "qkv")
        q, k = self._turned(q), self._turned(k)
        group = self._config["num_attention_heads"] // self._config["num_key_value_heads"]
        k, v = (part.repeat_interleave(group, dim=0) for part in (k, v))
        scores = q @ k.transpose(1, 2) * self._config["head_dim"] ** -0.5
        ahead = torch.ones_like(scores, dtype=torch.bool).triu(1)
        attended = scores.masked_fill(ahead, float("-inf")).softmax(dim=-1) @ v
        residual = features + self._product(attended.transpose(0, 1).flatten(1), "midlayer.self_attn.o_proj")
        normed = self._norm(residual, "midlayer.post_attention_layernorm")
        gate, up = (self._product(normed, f"midlayer.mlp.{name}_proj") for name in ("gate", "up"))
        return residual + self._product(torch.nn.functional.silu(gate) * up, "midlayer.mlp.down_proj")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._product(self._norm(hidden, "norm"), "lm_head")

    def _heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """(heads, n, D)"""
        flat = self._product(x, f"midlayer.self_attn.{name}_proj")
        return flat.view(len(x), -1, self._config["head_dim"]).transpose(0, 1)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        dim = x.shape[-1]
        steps = self._config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.outer(torch.arange(x.shape[1]), steps)
        whole = torch.polar(torch.ones_like(angles), angles) * torch.complex(*x.chunk(2, dim=-1))
        return torch.cat((whole.real, whole.imag), dim=-1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._tensors[f"{name}.weight"]
        return torch.nn.functional.rms_norm(x, weight.shape, weight, self._config["rms_norm_eps"])

    def _product(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self._tensors[f"{name}.weight"].T
