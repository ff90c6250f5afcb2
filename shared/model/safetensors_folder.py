"""Tensors of a Hugging Face folder (config.json and *.safetensors) under our own names."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from shared.core.errors import ConfigError
from shared.model.config import LlamaConfig, config_from_hf
from shared.model.gguf_file import hash_files

LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
MODEL_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "rope_factors": "rope_factors",
}


class TensorFiles:
    """All *.safetensors of a folder under the names in them, found by their own headers: no index file is needed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._files = tuple(sorted(folder.glob("*.safetensors")))
        if not self._files:
            raise ConfigError(f"{folder} has no *.safetensors file")
        self._where: dict[str, Path] = {}
        for path in self._files:
            try:
                with safe_open(path, framework="pt") as shard:
                    self._where.update(dict.fromkeys(shard.keys(), path))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"can't read {path}: {error}") from error

    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is there, from the file's header."""
        with safe_open(self._where[name], framework="pt") as shard:
            return tuple(shard.get_slice(name).get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        """In the dtype of the file, rows first (out, in)."""
        if name not in self._where:
            raise ConfigError(f"{self.path} has no tensor {name}")
        with safe_open(self._where[name], framework="pt") as shard:
            return shard.get_tensor(name)

    def content_hash(self) -> str:
        """Of config.json too."""
        return hash_files((self.path / "config.json", *self._files))


class SafetensorsFolder:
    """A TensorSource over one folder."""

    def __init__(self, folder: Path) -> None:
        self.config: LlamaConfig = config_from_hf(folder)
        self._files = TensorFiles(folder)

    def has(self, name: str) -> bool:
        return hf_name(name) in self._files.names()

    def tensor(self, name: str) -> torch.Tensor:
        """In the dtype of the file, rows first (out, in)."""
        return self._files.tensor(hf_name(name))

    def content_hash(self) -> str:
        return self._files.content_hash()


def hf_name(name: str) -> str:
    """ "embed" -> model.embed_tokens.weight, "layers.3.q" -> model.layers.3.self_attn.q_proj.weight."""
    if not name.startswith("layers."):
        return MODEL_NAMES[name]
    _, layer, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}"
