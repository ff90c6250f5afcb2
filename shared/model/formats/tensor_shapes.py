"""List the names and shapes of a Llama-family network's tensors.

A file must have exactly these tensors. An unread tensor would change answers. Kernels would read past the end of a
tensor that is too small.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shared.core.errors import ConfigError
from shared.model.math.config import LlamaConfig

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(config: LlamaConfig) -> Shapes:
    """Return shapes by TensorSource name; a matrix is (out, in)."""
    shapes: Shapes = {"embed": (config.vocab_size, config.hidden_size), "norm": (config.hidden_size,)}
    if not config.tie_embeddings:
        shapes["head"] = shapes["embed"]
    for layer in range(config.num_layers):
        parts = _attention_shapes(config) | _inner_shapes(config, layer)
        shapes |= {f"layers.{layer}.{part}": shape for part, shape in parts.items()}
    return shapes


def _attention_shapes(config: LlamaConfig) -> Shapes:
    hidden, rows = config.hidden_size, {"q": config.q_size, "k": config.kv_size, "v": config.kv_size}
    shapes: Shapes = {name: (size, hidden) for name, size in rows.items()}
    shapes |= {"o": (hidden, config.q_size), "attn_norm": (hidden,), "mlp_norm": (hidden,)}
    shapes |= {f"{name}_bias": ((rows | {"o": hidden})[name],) for name in config.biases}
    if config.qk_norm:
        shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    if config.style.post_norms:
        shapes |= {"attn_post_norm": (hidden,), "mlp_post_norm": (hidden,)}
    return shapes


def _inner_shapes(config: LlamaConfig, layer: int) -> Shapes:
    if config.experts is None or not config.has_experts(layer):
        return _gated(config.hidden_size, config.intermediate_size)
    shapes: Shapes = {"router": (config.experts.count, config.hidden_size)}
    for expert in range(config.experts.count):
        parts = _gated(config.hidden_size, config.experts.intermediate_size)
        shapes |= {f"experts.{expert}.{part}": shape for part, shape in parts.items()}
    return shapes


def _gated(hidden: int, inner: int) -> Shapes:
    return {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}


def check_tensors(path: Path, family: str, wanted: Mapping[str, tuple[int, ...]], found: Shapes) -> None:
    """Compare shapes by the file's names. Raises ConfigError for a missing, extra or misshapen tensor."""
    if missing := wanted.keys() - found.keys():
        raise ConfigError(f"{path} has no tensor {first_of(missing)}")
    if strange := found.keys() - wanted.keys():
        raise ConfigError(f"{path}: {family} has no tensor {first_of(strange)}; answers would differ without it")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ConfigError(f"{path}: tensor {name} is {found[name]}, and the configuration says {shape}")


def first_of(names: set[str]) -> str:
    first, *more = sorted(names)
    return f"{first} (and {len(more)} more)" if more else first
