"""What a Llama-family network looks like, read from a GGUF header or a Hugging Face config.json. Holds no tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.core.errors import ConfigError

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `kind` is "default", "linear" (positions / factor) or "llama3" (low frequencies stretched)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    name: str
    family: str  # llama | mistral | qwen2 | qwen3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeConfig
    max_context: int
    tie_embeddings: bool
    eos_ids: tuple[int, ...]

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def num_parameters(self) -> int:
        """Biases and per-head norms left out: they are below a thousandth."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size


def config_from_gguf(fields: Mapping[str, Any], vocab_size: int, tied: bool) -> LlamaConfig:
    """`fields` are the GGUF key/value pairs as plain Python values; `vocab_size` is the embedding's row count."""
    arch = fields.get("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        raise ConfigError(f"GGUF architecture {arch!r} is not supported, only {', '.join(GGUF_ARCHITECTURES)}")

    def get(key: str, default: Any = None) -> Any:
        value = fields.get(f"{arch}.{key}", default)
        if value is None:
            raise ConfigError(f"the GGUF header lacks {arch}.{key}")
        return value

    if get("rope.scaling.type", "none") not in ("none", "linear"):
        raise ConfigError(f"rope scaling {get('rope.scaling.type')!r} in a GGUF file is not supported")
    linear = get("rope.scaling.type", "none") == "linear"
    heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
    head_dim = int(get("attention.key_length", hidden // heads))
    if int(get("rope.dimension_count", head_dim)) != head_dim:
        raise ConfigError("rotating only a part of each head is not supported")
    context = int(get("context_length"))
    eos = fields.get("tokenizer.ggml.eos_token_id")
    eot = fields.get("tokenizer.ggml.eot_token_id")
    return LlamaConfig(
        name=str(fields.get("general.name") or arch),
        family=arch,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=int(get("feed_forward_length")),
        num_layers=int(get("block_count")),
        num_heads=heads,
        num_kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        rms_eps=float(get("attention.layer_norm_rms_epsilon")),
        rope=RopeConfig(
            theta=float(get("rope.freq_base", 10000.0)),
            kind="linear" if linear else "default",
            factor=float(get("rope.scaling.factor", 1.0)),
        ),
        max_context=min(context, int(get("attention.sliding_window", 0)) or context),
        tie_embeddings=tied,
        eos_ids=tuple(sorted({int(i) for i in (eos, eot) if i is not None})),
    )


def config_from_hf(folder: Path) -> LlamaConfig:
    """Reads config.json (and generation_config.json for the ids that end an answer)."""
    raw = read_json(folder / "config.json")
    arch = (raw.get("architectures") or ["?"])[0]
    if arch not in HF_ARCHITECTURES:
        raise ConfigError(f"{folder}: architecture {arch!r} is not supported, only {', '.join(HF_ARCHITECTURES)}")
    if raw.get("hidden_act", "silu") != "silu" or raw.get("mlp_bias"):
        raise ConfigError(f"{folder}: only SwiGLU layers without biases are supported")
    if raw.get("quantization_config"):
        raise ConfigError(f"{folder}: quantised folders are not supported; use the original one, or a GGUF file")
    try:
        return _from_hf(folder, raw, HF_ARCHITECTURES[arch])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder / 'config.json'}: missing or wrong field {error}") from error


def _from_hf(folder: Path, raw: Mapping[str, Any], family: str) -> LlamaConfig:
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    return LlamaConfig(
        name=folder.resolve().name,
        family=family,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        rms_eps=float(raw["rms_norm_eps"]),
        rope=rope_from_hf(folder, raw),
        max_context=_context(raw),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_ids=_ids(raw.get("eos_token_id") if eos is None else eos),
    )


def _context(raw: Mapping[str, Any]) -> int:
    """Attention here is never windowed, so a window bounds the context: inside it both are the same."""
    context = int(raw["max_position_embeddings"])
    windowed = raw.get("use_sliding_window", raw.get("model_type") == "mistral")
    window = raw.get("sliding_window") if windowed else None
    return min(context, int(window)) if window else context


def rope_from_hf(folder: Path, raw: Mapping[str, Any]) -> RopeConfig:
    """Older files have rope_theta and rope_scaling, newer ones a single rope_parameters."""
    scaling: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(f"{folder}: rope scaling {kind!r} is not supported, only default, linear and llama3")
    if float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigError(f"{folder}: rotating only a part of each head is not supported")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_context=int(scaling.get("original_max_position_embeddings", 8192)),
    )


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(i) for i in value) if isinstance(value, list) else (int(value),)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; ConfigError says what is wrong with it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value
