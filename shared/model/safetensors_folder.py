"""Read tensors of a Hugging Face folder (config.json and *.safetensors) under our own names."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from shared.core.errors import ConfigError
from shared.kernel.block_weights import BlockWeights
from shared.model.config import LlamaConfig
from shared.model.gguf_file import hash_files
from shared.model.hf_config import config_from_hf
from shared.model.tensor_shapes import check_tensors, tensor_shapes

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
    "router": "mlp.gate.weight",
}
# Gemma 3 also normalizes each half's output, and renames the norm before the second half.
GEMMA_NAMES = {
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
FLOATS = frozenset(["F32", "F16", "BF16", "F64"])
NOT_WEIGHTS = "rotary_emb.inv_freq"  # a table in older files
MODEL_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "rope_factors": "rope_factors",
}


class TensorFiles:
    """A folder's tensors by name.

    The safetensors library checks that tensors lie in their files and don't overlap.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._files = tuple(sorted(folder.glob("*.safetensors")))
        if not self._files:
            raise ConfigError(f"{folder} has no *.safetensors file")
        self._where: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._formats: dict[str, str] = {}
        for path in self._files:
            try:
                self._read_header(path)
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"can't read {path}: {error}") from error

    def _read_header(self, path: Path) -> None:
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118, not a dictionary
                if name in self._where:
                    raise ConfigError(f"{self.path}: tensor {name} is in {self._where[name].name} and in {path.name}")
                header = shard.get_slice(name)
                self._where[name], self._shapes[name] = path, tuple(header.get_shape())
                self._formats[name] = header.get_dtype()

    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def num_numbers(self) -> int:
        """Return how many numbers all tensors hold together."""
        return sum(map(math.prod, self._shapes.values()))

    def check_floats(self, names: Iterable[str]) -> None:
        """Raise ConfigError for tensors of integers or bytes, because their scales are not read."""
        for name in sorted(names):
            if self._formats[name] not in FLOATS:
                raise ConfigError(f"{self.path}: tensor {name} is {self._formats[name]}, only floats are supported")

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in the file's dtype, rows first (out, in). Raises ConfigError."""
        if name not in self._where:
            raise ConfigError(f"{self.path} has no tensor {name}")
        with safe_open(self._where[name], framework="pt") as shard:
            tensor: torch.Tensor = shard.get_tensor(name)
        return tensor

    def content_hash(self) -> str:
        """Hash the tensors, config.json, and generation_config.json, which may set stop ids."""
        described = (self.path / name for name in ("config.json", "generation_config.json"))
        return hash_files((*filter(Path.is_file, described), *self._files))


class SafetensorsFolder:
    """A TensorSource over one folder. Raises ConfigError for an unknown tensor."""

    def __init__(self, folder: Path) -> None:
        self.config: LlamaConfig = config_from_hf(folder)
        self._files = TensorFiles(folder)
        self._check_tensors()

    def has(self, name: str) -> bool:
        return hf_name(name, self.config.family) in self._files.names()

    def tensor(self, name: str) -> torch.Tensor:
        return self._files.tensor(hf_name(name, self.config.family))

    def blocks(self, name: str) -> BlockWeights | None:
        return None

    def content_hash(self) -> str:
        return self._files.content_hash()

    def _check_tensors(self) -> None:
        family = self.config.family
        wanted = {hf_name(name, family): shape for name, shape in tensor_shapes(self.config).items()}
        there = {name for name in self._files.names() if not name.endswith(NOT_WEIGHTS)}
        if self.config.tie_embeddings:
            self._check_tied()
            there.discard(MODEL_NAMES["head"])
        check_tensors(self._files.path, family, wanted, {name: self._files.shape(name) for name in there})
        self._files.check_floats(there)

    def _check_tied(self) -> None:
        if MODEL_NAMES["head"] not in self._files.names():
            return
        head, embed = (self._files.tensor(MODEL_NAMES[name]) for name in ("head", "embed"))
        if not torch.equal(head, embed):
            raise ConfigError(f"{self._files.path}: tie_word_embeddings, but lm_head.weight is not the embedding")


def hf_name(name: str, family: str = "llama") -> str:
    """Return a tensor's name in the folder.

    embed                 model.embed_tokens.weight
    layers.3.q            model.layers.3.self_attn.q_proj.weight
    layers.3.experts.5.up model.layers.3.mlp.experts.5.up_proj.weight
    """
    if not name.startswith("layers."):
        return MODEL_NAMES[name]
    _, layer, *rest = name.split(".")
    if rest[0] == "experts":
        return f"model.layers.{layer}.mlp.experts.{rest[1]}.{rest[2]}_proj.weight"
    names = LAYER_NAMES | GEMMA_NAMES if family == "gemma3" else LAYER_NAMES
    return f"model.layers.{layer}.{names[rest[0]]}"
