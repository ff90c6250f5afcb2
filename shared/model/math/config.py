"""Describe the shape of a Llama-family network."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.core.errors import ConfigError
from shared.kv.layer_groups import LayerGroups, group_layers

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "max_context",
)  # fmt: skip
MOST_PARTS = 4096  # no network has more layers or experts


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary embedding of one `kind`:

    - "default"
    - "linear": positions / factor
    - "llama3": low frequencies / factor
    - "yarn": a factor per frequency; rotated vectors become longer
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    length: float = 1.0  # factor for rotated vectors' length


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """Each token passes through `top_k` of `count` small networks."""

    count: int
    top_k: int
    intermediate_size: int
    normalise: bool  # whether the chosen experts' weights are scaled to a sum of 1
    dense_layers: tuple[int, ...] = ()  # indices of layers with a plain network instead of experts


@dataclass(frozen=True, slots=True)
class LayerStyle:
    """How Gemma 3 differs from the rest of the family."""

    gate: str = "silu"  # activation function: silu or gelu_tanh
    norm_offset: float = 0.0  # added to a file's norm weights
    post_norms: bool = False  # whether each half of a layer also normalizes its output
    embed_scale: float = 1.0  # factor for embeddings, rounded to the dtype
    logit_cap: float = 0.0  # the cap in cap * tanh(logits / cap); 0: no cap


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """A model of the Llama kind. It has many fields because families differ in each of them."""

    name: str
    family: str  # llama | mistral | qwen2 | qwen3 | qwen3_moe | gemma3 | phi3
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
    windows: tuple[int, ...] = ()  # per layer, as in AttentionShape.windows
    local_rope: RopeConfig | None = None  # rope of layers with a window, if different
    score_scale: float = 0.0  # as in AttentionShape.scale
    experts: ExpertConfig | None = None
    style: LayerStyle = LayerStyle()
    biases: tuple[str, ...] = ()  # which of q, k, v, o have a bias

    def __post_init__(self) -> None:
        """Raise ConfigError for impossible numbers, because kernels trust them."""
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ConfigError(f"{self.name}: {name} is {getattr(self, name)}")
        if max(self.num_layers, self.experts.count if self.experts else 0) > MOST_PARTS:
            raise ConfigError(f"{self.name}: more than {MOST_PARTS} layers or experts")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{self.name}: {self.num_heads} heads can't share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ConfigError(f"{self.name}: heads of {self.head_dim} can't be rotated by halves")
        if not 0.0 <= self.rms_eps < math.inf:
            raise ConfigError(f"{self.name}: rms_eps is {self.rms_eps}")
        for rope in (self.rope, self.local_rope or self.rope):
            if not (0.0 < rope.theta < math.inf and 0.0 < rope.factor < math.inf):
                raise ConfigError(f"{self.name}: rope of base {rope.theta}, stretched {rope.factor} times")

    @property
    def groups(self) -> LayerGroups:
        return group_layers(self.windows or (0,) * self.num_layers)

    @property
    def qk_norm(self) -> bool:
        return self.family in ("qwen3", "qwen3_moe", "gemma3")

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def num_parameters(self) -> int:
        """Count parameters, except biases, per-head norms and expert routers (below 0.1 %)."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        inner = sum(self._inner_size(layer) for layer in range(self.num_layers))
        layers = self.num_layers * (attention + 2 * self.hidden_size) + 3 * self.hidden_size * inner
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return layers + embeddings + self.hidden_size

    def _inner_size(self, layer: int) -> int:
        if self.experts is None or not self.has_experts(layer):
            return self.intermediate_size
        return self.experts.count * self.experts.intermediate_size


def read_json(path: Path) -> dict[str, Any]:
    """Raise ConfigError if the file holds no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"can't read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value
