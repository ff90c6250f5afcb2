"""Read a GGUF header as a LlamaConfig.

A key of the architecture that is not known here could change answers, so it is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.config.models.vocabulary import gguf_eos_ids
from shared.core.errors import ConfigError
from shared.model.math.config import MOST_PARTS, LayerStyle, LlamaConfig, RopeConfig

_FIELDS = (
    "attention.head_count attention.head_count_kv attention.key_length attention.layer_norm_rms_epsilon "
    "attention.sliding_window attention.value_length block_count context_length embedding_length feed_forward_length "
    "rope.dimension_count rope.freq_base rope.scaling.factor rope.scaling.finetuned "
    "rope.scaling.original_context_length rope.scaling.type vocab_size"
)
FIELDS = frozenset(_FIELDS.split())
FAMILY_FIELDS = {
    "llama": "",
    "qwen2": "",
    "qwen3": "",
    "gemma3": "attention.sliding_window_pattern final_logit_softcapping rope.freq_base_swa",
    "phi3": "rope.scaling.attn_factor",
}
GGUF_ARCHITECTURES = tuple(FAMILY_FIELDS)
# Gemma 3's files do not say these: every sixth layer has no window, and the other layers' rope has its own base
GEMMA_PERIOD, GEMMA_LOCAL_THETA = 6, 10000.0
GEMMA_27B_LAYERS = 62  # only the 27B scales scores by hidden size / heads instead of the size of a head


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What the tensors say, and the header does not."""

    vocab_size: int
    tied: bool
    biases: tuple[str, ...]


class _Header:
    """One architecture's fields. Raises ConfigError for a missing field, and for one with a value per layer."""

    def __init__(self, fields: Mapping[str, Any], arch: str) -> None:
        self._fields, self._arch = fields, arch

    def get(self, key: str, default: Any = None) -> Any:
        value = self._fields.get(f"{self._arch}.{key}", default)
        if value is None:
            raise ConfigError(f"the GGUF header lacks {self._arch}.{key}")
        if isinstance(value, list):
            raise ConfigError(f"{self._arch}.{key} differs between layers, which is not supported")
        return value

    def windows(self, num_layers: int, context: int) -> tuple[int, ...]:
        """Return the layers' windows; a window that holds the whole context is none."""
        if self._arch != "gemma3":
            window = int(self.get("attention.sliding_window", 0))
            return (window,) * num_layers if 0 < window < context else ()
        window = int(self.get("attention.sliding_window"))  # needed, because it also chooses the layers' rotation
        if window <= 0:
            return ()
        pattern = self._fields.get(f"{self._arch}.attention.sliding_window_pattern", GEMMA_PERIOD)
        if not isinstance(pattern, list):
            pattern = [(layer + 1) % int(pattern) != 0 for layer in range(num_layers)]
        if len(pattern) != num_layers:
            raise ConfigError(f"{self._arch}.attention.sliding_window_pattern is of {len(pattern)} layers")
        return tuple(window * bool(has_window) for has_window in pattern)

    def rope(self, context: int) -> RopeConfig:
        kind = self.get("rope.scaling.type", "none")
        if kind not in ("none", "longrope" if self._arch == "phi3" else "linear"):
            raise ConfigError(f"rope scaling {kind!r} in a GGUF file is not supported")
        return RopeConfig(
            theta=float(self.get("rope.freq_base", 10000.0)),
            kind="linear" if kind == "linear" else "default",
            factor=float(self.get("rope.scaling.factor", 1.0)),
            original_context=int(self.get("rope.scaling.original_context_length", context)),
            length=float(self.get("rope.scaling.attn_factor", 1.0)),
        )


def config_from_gguf(fields: Mapping[str, Any], facts: FileFacts) -> LlamaConfig:
    """Make a config from GGUF fields. Raises ConfigError."""
    arch = str(fields.get("general.architecture"))
    _check_fields(fields, arch)
    header = _Header(fields, arch)
    get = header.get
    heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
    head_dim = int(get("attention.key_length", hidden // heads))
    if int(get("attention.value_length", head_dim)) != head_dim:
        raise ConfigError("values of another length than keys are not supported")
    if int(get("rope.dimension_count", head_dim)) != head_dim:
        raise ConfigError("rotating only a part of each head is not supported")
    num_layers, context = int(get("block_count")), int(get("context_length"))
    if num_layers > MOST_PARTS:
        raise ConfigError(f"{arch}.block_count is {num_layers}")
    is_gemma, windows = arch == "gemma3", header.windows(num_layers, context)
    shared_by = hidden // heads if num_layers == GEMMA_27B_LAYERS else head_dim
    return LlamaConfig(
        name=str(fields.get("general.name") or arch),
        family=arch,
        vocab_size=facts.vocab_size,
        hidden_size=hidden,
        intermediate_size=int(get("feed_forward_length")),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        rms_eps=float(get("attention.layer_norm_rms_epsilon")),
        rope=header.rope(context),
        max_context=context,
        tie_embeddings=facts.tied,
        eos_ids=tuple(sorted(gguf_eos_ids(fields))),
        windows=windows,
        local_rope=RopeConfig(float(get("rope.freq_base_swa", GEMMA_LOCAL_THETA))) if is_gemma and windows else None,
        score_scale=float(shared_by) ** -0.5 if is_gemma else 0.0,
        style=_gemma_style(header, hidden) if is_gemma else LayerStyle(),
        biases=facts.biases,
    )


def _check_fields(fields: Mapping[str, Any], arch: str) -> None:
    if arch not in FAMILY_FIELDS:
        raise ConfigError(f"GGUF architecture {arch!r} is not supported, only {', '.join(GGUF_ARCHITECTURES)}")
    known = {f"{arch}.{name}" for name in FIELDS | set(FAMILY_FIELDS[arch].split())}
    strange = sorted(key for key, value in fields.items() if key.startswith(f"{arch}.") and value and key not in known)
    if strange:
        told = ", ".join(f"{key} {fields[key]!r}"[:80] for key in strange)
        raise ConfigError(f"not supported in a GGUF header: {told}")


def _gemma_style(header: _Header, hidden: int) -> LayerStyle:
    """Files have norm weights with the 1 added, which folders lack."""
    return LayerStyle(
        gate="gelu_tanh",
        post_norms=True,
        embed_scale=float(hidden) ** 0.5,
        logit_cap=float(header.get("final_logit_softcapping", 0.0)),
    )
