"""Make a head's first weights, mostly copies, to shorten the training.

`fc` passes on only the hidden state of the highest of the three layers. The layer is a copy of the target's last
layer, and the output rows are copies of the target's. Attention weights for the embedding half of the input begin small
and random.
"""

from __future__ import annotations

import dataclasses

import torch

from shared.model.config import LlamaConfig
from shared.model.eagle_file import HeadConfig, default_aux_layers
from shared.model.weights import TensorSource

Tensor = torch.Tensor
SMALL = 0.02
ATTENTION, MLP = "midlayer.self_attn", "midlayer.mlp"


def head_config(target: LlamaConfig, draft_vocab_size: int) -> HeadConfig:
    layer = dataclasses.replace(target, family="llama", num_layers=1, tie_embeddings=False)
    return HeadConfig(layer, draft_vocab_size, default_aux_layers(target.num_layers))


def first_weights(source: TensorSource, draft_ids: Tensor, seed: int) -> dict[str, Tensor]:
    """Return float32 weights on the CPU, determined by the seed."""
    config, random = source.config, torch.Generator().manual_seed(seed)
    hidden = config.hidden_size

    def layer(name: str) -> Tensor:
        return source.tensor(f"layers.{config.num_layers - 1}.{name}").float()

    def widened(name: str) -> Tensor:
        own = layer(name)
        return torch.cat([SMALL * torch.randn(len(own), hidden, generator=random), own], dim=1)

    return {
        "fc.weight": torch.cat([torch.zeros(hidden, 2 * hidden), torch.eye(hidden)], dim=1),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.hidden_norm.weight": layer("attn_norm"),
        **{f"{ATTENTION}.{name}_proj.weight": widened(name) for name in "qkv"},
        f"{ATTENTION}.o_proj.weight": layer("o"),
        "midlayer.post_attention_layernorm.weight": layer("mlp_norm"),
        **{f"{MLP}.{name}_proj.weight": layer(name) for name in ("gate", "up", "down")},
        "norm.weight": source.tensor("norm").float(),
        "lm_head.weight": source.tensor("embed" if config.tie_embeddings else "head").float()[draft_ids],
    }
