"""Networks of transformers as GGUF files, written as llama.cpp's converters do: names are the gguf package's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
}


def write_gguf(network: transformers.PreTrainedModel, path: Path, **fields: Any) -> Path:
    """`fields`: more of the architecture's, with __ for a dot; None: leave it out."""
    config = network.config
    arch = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config.model_type]]
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_name("tiny")
    for key, value in (described(config) | {key.replace("__", "."): value for key, value in fields.items()}).items():
        if value is not None:
            add_field(writer, f"{arch}.{key}", value)
    for name, values in tensors_of(network):
        writer.add_tensor(name, np.ascontiguousarray(values.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    add[type(value)](key, value)


def described(config: Any) -> dict[str, Any]:
    ropes = config.rope_parameters
    rope = ropes.get("full_attention", ropes)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.scaling.type": "linear" if rope["rope_type"] == "linear" else None,
        "rope.scaling.factor": float(rope["factor"]) if rope["rope_type"] == "linear" else None,
        "attention.sliding_window": getattr(config, "sliding_window", None),
    }
    if config.model_type == "phi3":
        stretch = config.max_position_embeddings / config.original_max_position_embeddings
        long = rope["rope_type"] == "longrope"
        length = math.sqrt(1 + math.log(stretch) / math.log(config.original_max_position_embeddings)) if long else None
        found |= {"rope.dimension_count": head_dim, "rope.scaling.attn_factor": length}
        return found | {"rope.scaling.original_context_length": config.original_max_position_embeddings}
    return found | {"attention.key_length": head_dim, "attention.value_length": head_dim}


def tensors_of(network: transformers.PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    config = network.config
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    for name, values in network.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
            values = values + 1.0
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        if config.model_type == "llama" and (kind := name.split(".")[-2]) in heads:
            values = pairwise(values, heads[kind])
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        yield found, values
    rope = config.rope_parameters
    for length in ("long", "short"):
        if rope.get("rope_type") == "longrope":
            yield f"rope_factors_{length}.weight", torch.tensor(rope[f"{length}_factor"])


def pairwise(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotary halves of each head, side by side."""
    rows = len(values) // heads
    order = [h * rows + half * rows // 2 + n for h in range(heads) for n in range(rows // 2) for half in (0, 1)]
    return values[order]
