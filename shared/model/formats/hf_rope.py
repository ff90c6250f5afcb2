"""Read the rotary part of a Hugging Face config.json.

Older files have rope_theta and rope_scaling, newer files rope_parameters. Gemma 3 has one set of values for each
kind of layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.core.errors import ConfigError
from shared.model.formats.config_fields import NotOurs
from shared.model.math.config import RopeConfig

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
FIELDS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"},
}
ALWAYS = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "original_max_position_embeddings"}
THETA, GEMMA_THETA, GEMMA_LOCAL_THETA = 10000.0, 1_000_000.0, 10000.0


def rope_from_hf(folder: Path, raw: Mapping[str, Any]) -> RopeConfig:
    _check_one_of_two(folder, raw)
    return _one_rope(folder, raw, raw.get("rope_parameters") or raw.get("rope_scaling") or {}, THETA)


def ropes_by_layer(folder: Path, raw: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """Return the rope of layers without a window, and the rope of layers with a window."""
    _check_one_of_two(folder, raw)
    both = raw.get("rope_parameters") or {}
    if not {*both} <= {"full_attention", "sliding_attention"}:
        raise ConfigError(f"{folder}: rope_parameters of Gemma 3 must have full_attention and sliding_attention")
    whole = both.get("full_attention") or raw.get("rope_scaling") or {}
    local = both.get("sliding_attention") or {"rope_theta": raw.get("rope_local_base_freq", GEMMA_LOCAL_THETA)}
    return _one_rope(folder, raw, whole, GEMMA_THETA), _one_rope(folder, {}, local, GEMMA_LOCAL_THETA)


def _check_one_of_two(folder: Path, raw: Mapping[str, Any]) -> None:
    """Refuse rope_parameters beside rope_scaling, because programs differ in which one they use."""
    if raw.get("rope_parameters") and raw.get("rope_scaling"):
        raise ConfigError(f"{folder}: both rope_parameters and rope_scaling; remove the wrong one")


def _one_rope(folder: Path, raw: Mapping[str, Any], scaling: Mapping[str, Any], theta: float) -> RopeConfig:
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in KINDS:
        raise NotOurs(folder, f"rope scaling {kind!r} is not supported, only {', '.join(KINDS)}")
    strange = sorted(name for name, value in scaling.items() if name not in FIELDS[kind] | ALWAYS and value is not None)
    if strange:
        raise NotOurs(folder, f"rope scaling {kind!r} with {', '.join(strange)} is not supported")
    if float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise NotOurs(folder, "rotating only a part of each head is not supported (partial_rotary_factor)")
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or theta)
    if kind in ("default", "dynamic"):  # "dynamic" stretches only contexts above max_position_embeddings: none here
        return RopeConfig(theta=theta)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_context=_original_context(raw, scaling),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        truncate=bool(scaling.get("truncate", True)),
        length=_length(scaling) if kind == "yarn" else 1.0,
    )


def _original_context(raw: Mapping[str, Any], scaling: Mapping[str, Any]) -> int:
    return int(scaling.get("original_max_position_embeddings") or raw.get("max_position_embeddings") or 8192)


def _length(scaling: Mapping[str, Any]) -> float:
    """Return yarn's factor for the length of rotated vectors (arXiv 2309.00071), by default 0.1 ln(factor) + 1."""
    given, factor = scaling.get("attention_factor"), float(scaling["factor"])
    if given is not None:
        return float(given)
    above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if above and below:
        return _growth(factor, float(above)) / _growth(factor, float(below))
    return _growth(factor, 1.0)


def _growth(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0
