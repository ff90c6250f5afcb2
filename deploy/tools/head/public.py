"""Write heads in the public EAGLE-3 format (arXiv 2503.01840), with SGLang's and vLLM's tensor names.

A head is a folder with config.json and model.safetensors, which shared.model.eagle_file reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from shared.model.config import LlamaConfig, RopeConfig
from shared.model.eagle_file import ARCHITECTURE, HeadConfig, HeadFolder, tensor_shapes

Tensor = torch.Tensor


def import_head(source: Path, folder: Path, target: LlamaConfig, dtype: torch.dtype) -> HeadConfig:
    """Check another tool's head for `target`, and write it under the canonical names.

    Raise ConfigError for a tensor or field that is missing, unknown or of the wrong size.
    """
    found = HeadFolder(source, target)
    weights = {name: found.tensor(name) for name in tensor_shapes(found.config)}
    write_head(folder, found.config, weights, found.draft_ids, dtype)
    return found.config


def write_head(
    folder: Path, config: HeadConfig, weights: Mapping[str, Tensor], draft_ids: Tensor, dtype: torch.dtype
) -> None:
    """Write a head into `folder`. Create a missing folder, and replace existing files.

    `weights`: every tensor of tensor_shapes(config), written in `dtype`. `draft_ids` (draft vocab,) int64.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = torch.zeros(config.layer.vocab_size, dtype=torch.bool)
    known[draft_ids] = True
    tensors = {name: weights[name].detach().to("cpu", dtype).contiguous() for name in tensor_shapes(config)}
    tensors["d2t"] = draft_ids - torch.arange(len(draft_ids))
    tensors["t2d"] = known
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    text = json.dumps(config_json(config, str(dtype).removeprefix("torch.")), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def config_json(config: HeadConfig, dtype: str) -> dict[str, Any]:
    layer = config.layer
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": layer.rms_eps,
        "rope_theta": layer.rope.theta,
        "rope_scaling": rope_json(layer.rope),
        "max_position_embeddings": layer.max_context,
        "vocab_size": layer.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        # The head reads the inputs of `aux_layers`. Public files name the layers before, whose outputs these are.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [n - 1 for n in config.aux_layers]},
    }


def rope_json(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    if rope.kind == "linear":
        return {"rope_type": "linear", "factor": rope.factor}
    if rope.kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": rope.factor,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
            "attention_factor": rope.length,
            "original_max_position_embeddings": rope.original_context,
        }
    return {
        "rope_type": rope.kind,
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_context,
    }
