"""A Llama-family network's weights, fused and laid out for the products of one device. Does no arithmetic with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from shared.kernel.linear import Head, HeadFactory, Linear, LinearFactory
from shared.kernel.rope import inverse_frequencies, rope_tables
from shared.model.config import LlamaConfig


class TensorSource(Protocol):
    """A model on disk. Names: embed, norm, head, rope_factors, layers.<n>.<q, k, v, o, gate, up, down, ...>."""

    config: LlamaConfig

    def has(self, name: str) -> bool: ...
    def tensor(self, name: str) -> torch.Tensor: ...
    def content_hash(self) -> str: ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Norm weights are float32. qkv and gate_up are one product each: fewer, larger calls."""

    attn_norm: torch.Tensor  # (H,)
    qkv: Linear  # H -> heads * D + 2 * kv_heads * D
    q_norm: torch.Tensor | None  # (D,)
    k_norm: torch.Tensor | None  # (D,)
    out: Linear  # heads * D -> H
    mlp_norm: torch.Tensor  # (H,)
    gate_up: Linear  # H -> 2 * I
    down: Linear  # I -> H


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    embed: torch.Tensor  # (vocab, H) in the dtype
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # (H,) float32
    head: Head  # (M, H) in the dtype -> (M, vocab) float32
    rope: tuple[torch.Tensor, torch.Tensor]  # cos, sin (max_context, D // 2) float32


def load_weights(
    source: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
    max_context: int,
    make: LinearFactory,
    make_head: HeadFactory,
) -> LlamaWeights:
    """Reads every tensor once. Peak memory is the result plus one layer, as each layer's source is dropped at once."""
    config = source.config
    embed = source.tensor("embed").to(device, dtype)
    head = source.tensor("head").to(device, dtype) if not config.tie_embeddings else embed
    return LlamaWeights(
        embed=embed,
        layers=tuple(_load_layer(source, n, dtype, device, make) for n in range(config.num_layers)),
        norm=source.tensor("norm").to(device, torch.float32),
        head=make_head(head),
        rope=tuple(table.to(device) for table in rope_of(source, max_context)),
    )


def _load_layer(
    source: TensorSource, n: int, dtype: torch.dtype, device: torch.device, make: LinearFactory
) -> LayerWeights:
    def get(name: str, as_dtype: torch.dtype = dtype) -> torch.Tensor:
        return source.tensor(f"layers.{n}.{name}").to(device, as_dtype)

    def optional(*names: str, as_dtype: torch.dtype = dtype) -> torch.Tensor | None:
        if not source.has(f"layers.{n}.{names[0]}"):
            return None
        return torch.cat([get(name, as_dtype) for name in names])

    return LayerWeights(
        attn_norm=get("attn_norm", torch.float32),
        qkv=make(torch.cat([get("q"), get("k"), get("v")]), optional("q_bias", "k_bias", "v_bias")),
        q_norm=optional("q_norm", as_dtype=torch.float32),
        k_norm=optional("k_norm", as_dtype=torch.float32),
        out=make(get("o"), optional("o_bias")),
        mlp_norm=get("mlp_norm", torch.float32),
        gate_up=make(torch.cat([get("gate"), get("up")]), None),
        down=make(get("down"), None),
    )


def rope_of(source: TensorSource, max_context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, (max_context, D // 2) float32 each."""
    inverse = frequencies_of(source.config)
    if source.has("rope_factors"):  # a GGUF file of a Llama 3 model: the stretch comes as one divisor per frequency
        inverse = inverse / source.tensor("rope_factors").float()
    return rope_tables(inverse, max_context)


def frequencies_of(config: LlamaConfig) -> torch.Tensor:
    """(D // 2,) float32, as the configuration alone says."""
    rope = config.rope
    stretch = (rope.kind, rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_context)
    return inverse_frequencies(config.head_dim, rope.theta, *stretch)


def weights_bytes(config: LlamaConfig, dtype: torch.dtype, max_context: int) -> int:
    """What load_weights keeps at most: parameters, the head's own copy (tied to the embedding or not) as if it were
    float32, and the rotary tables."""
    head = config.vocab_size * config.hidden_size
    in_dtype = config.num_parameters() - (0 if config.tie_embeddings else head)
    tables = max_context * config.head_dim * 4
    return in_dtype * dtype.itemsize + head * 4 + tables
