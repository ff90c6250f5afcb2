"""Read T5 from a Hugging Face folder: config.json and *.safetensors."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from shared.config.models.folder_facts import facts_of
from shared.config.models.model_folder import ModelFolder, read_folder
from shared.core.errors import ConfigError
from shared.model.encoder.t5 import Attention, FeedForward, Stack, T5Config, T5Layer, T5Model, T5Weights
from shared.model.formats.hf_config import vocab_size_of
from shared.model.formats.tensor_files import TensorFiles

FEED_FORWARDS = {"relu": (False, False), "gated-relu": (True, False), "gated-gelu": (True, True)}  # (gated, gelu)
# Older files repeat the embedding, and have a bias table for cross-attention that T5 does not use.
NOT_READ = frozenset(
    {
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    }
)
DEFAULT_CONTEXT = 1024  # freely chosen: relative positions have no limit


def load_t5(folder: Path, max_context: int = 0, dtype: torch.dtype = torch.float32) -> T5Model:
    """Load on the CPU. `max_context`: tokens of input and answer together; 0: DEFAULT_CONTEXT. Raises ConfigError."""
    config = config_of(read_folder(folder), max_context or DEFAULT_CONTEXT)
    files = _Taken(TensorFiles(folder), dtype)
    embed = files.take_tensor("shared.weight", config.vocab_size, config.hidden_size)
    head = files.take_tensor("lm_head.weight", *embed.shape) if files.has("lm_head.weight") else embed
    encoder = _stack(files, config, "encoder", config.num_encoder_layers)
    decoder = _stack(files, config, "decoder", config.num_decoder_layers)
    files.require_all_taken(NOT_READ)
    return T5Model(config, T5Weights(embed, head, encoder, decoder), files.content_hash())


def t5_bytes(folder: Path, dtype: torch.dtype) -> int:
    files = TensorFiles(folder)
    return dtype.itemsize * sum(math.prod(files.shape(name)) for name in files.names() - NOT_READ)


def config_of(folder: ModelFolder, max_context: int) -> T5Config:
    """Raise ConfigError for a missing or wrong field."""
    path, raw = folder.path, folder.config
    if raw.get("model_type") != "t5":
        raise ConfigError(f"{path}: model_type is {raw.get('model_type')!r}, not t5")
    kind = raw.get("feed_forward_proj", "relu")
    if kind not in FEED_FORWARDS:
        raise ConfigError(f"{path}: feed_forward_proj is {kind!r}; it must be one of {', '.join(FEED_FORWARDS)}")
    is_gated, is_gelu = FEED_FORWARDS[kind]
    facts = facts_of(folder)
    try:
        return T5Config(
            vocab_size=vocab_size_of(path, facts),
            hidden_size=int(raw["d_model"]),
            num_heads=int(raw["num_heads"]),
            head_dim=int(raw["d_kv"]),
            inner_size=int(raw["d_ff"]),
            num_encoder_layers=int(raw["num_layers"]),
            num_decoder_layers=int(raw.get("num_decoder_layers") or raw["num_layers"]),
            num_buckets=int(raw.get("relative_attention_num_buckets", 32)),
            max_distance=int(raw.get("relative_attention_max_distance", 128)),
            norm_eps=float(raw.get("layer_norm_epsilon", 1e-6)),
            is_gated=is_gated,
            is_gelu=is_gelu,
            # files without this field: outputs are scaled if embeddings are tied, as in T5 but not in v1.1
            scales_outputs=bool(raw.get("scale_decoder_outputs", raw.get("tie_word_embeddings", True))),
            eos_ids=facts.eos_ids,
            max_context=max_context,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: config.json has a missing or wrong field {error}") from error


class _Taken:
    """Checks the tensors' shapes, and remembers which tensors were taken."""

    def __init__(self, files: TensorFiles, dtype: torch.dtype) -> None:
        self._files, self._dtype = files, dtype
        self._names: set[str] = set()

    def take_tensor(self, name: str, *shape: int) -> torch.Tensor:
        self._names.add(name)
        tensor = self._files.tensor(name).to(self._dtype)
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"{self._files.path}: {name} is {tuple(tensor.shape)}, not {shape}")
        return tensor

    def require_all_taken(self, known: frozenset[str]) -> None:
        left = sorted(self._files.names() - self._names - known)
        if left:
            raise ConfigError(f"{self._files.path} has tensors that are not read: {', '.join(left[:5])}")

    def has(self, name: str) -> bool:
        return name in self._files.names()

    def content_hash(self) -> str:
        return self._files.content_hash()


def _stack(files: _Taken, config: T5Config, name: str, num_layers: int) -> Stack:
    layers = tuple(
        _layer(files, config, f"{name}.block.{index}.layer", name == "decoder") for index in range(num_layers)
    )
    table = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    bias = files.take_tensor(table, config.num_buckets, config.num_heads)
    return Stack(layers, bias, files.take_tensor(f"{name}.final_layer_norm.weight", config.hidden_size))


def _layer(files: _Taken, config: T5Config, name: str, is_decoder: bool) -> T5Layer:
    attention = _attention(files, config, f"{name}.0", "SelfAttention")
    cross = _attention(files, config, f"{name}.1", "EncDecAttention") if is_decoder else None
    return T5Layer(attention, cross, _feed_forward(files, config, f"{name}.{2 if is_decoder else 1}"))


def _attention(files: _Taken, config: T5Config, name: str, kind: str) -> Attention:
    width, hidden = config.num_heads * config.head_dim, config.hidden_size
    q, k, v = (files.take_tensor(f"{name}.{kind}.{part}.weight", width, hidden) for part in "qkv")
    out = files.take_tensor(f"{name}.{kind}.o.weight", hidden, width)
    return Attention(files.take_tensor(f"{name}.layer_norm.weight", hidden), q, k, v, out)


def _feed_forward(files: _Taken, config: T5Config, name: str) -> FeedForward:
    hidden, dense = config.hidden_size, f"{name}.DenseReluDense"
    first = "wi_0" if config.is_gated else "wi"
    gate = files.take_tensor(f"{dense}.{first}.weight", config.inner_size, hidden)
    up = files.take_tensor(f"{dense}.wi_1.weight", *gate.shape) if config.is_gated else None
    down = files.take_tensor(f"{dense}.wo.weight", hidden, len(gate))
    return FeedForward(files.take_tensor(f"{name}.layer_norm.weight", hidden), gate, up, down)
