"""Read an EAGLE-3 head in the public format of arXiv 2503.01840: config.json and *.safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from shared.core.errors import ConfigError
from shared.model.formats.hf_rope import rope_from_hf
from shared.model.formats.tensor_files import TensorFiles
from shared.model.math.config import LlamaConfig, read_json

ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_AUX = 3
LEFT_OUT = {"embed_tokens.weight"}  # some files repeat the target's embedding


class HeadFit(Protocol):
    """What a head's folder is compared with: facts about its target."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def max_context(self) -> int: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class HeadConfig:
    layer: LlamaConfig  # the head's layer, with the target's vocabulary and context
    draft_vocab_size: int
    aux_layers: tuple[int, ...]  # `fc` reads the target's residual before these layers


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    if num_layers < NUM_AUX:
        raise ConfigError(f"an EAGLE-3 head reads {NUM_AUX} layers of its target, which has {num_layers}")
    middle = num_layers // 2
    return (2, middle, num_layers - 3) if num_layers > 6 else (0, middle, num_layers - 1)


def tensor_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Return all float tensors' shapes by public name, rows first (out, in)."""
    layer = config.layer
    hidden, inner, q, kv = layer.hidden_size, layer.intermediate_size, layer.q_size, layer.kv_size
    return {
        "fc.weight": (hidden, NUM_AUX * hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, q),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }


class HeadFolder:
    """A head's folder. Opening it checks all names and shapes, and the vocabulary map. Weights are read on demand."""

    def __init__(self, folder: Path, target: HeadFit) -> None:
        self.path = folder
        self.config = head_config(folder, target)
        self._files = TensorFiles(folder)
        self._names = self._public_names()
        for name, shape in tensor_shapes(self.config).items():
            self._check_shape(name, shape)
        self.draft_ids = self._draft_ids()  # (Vd,) int64: each draft id's target id

    def tensor(self, name: str) -> torch.Tensor:
        value = self._files.tensor(self._names[name])
        if not value.is_floating_point():
            raise ConfigError(f"{self.path}: tensor {name} is {value.dtype}, not of a float type")
        return value

    def content_hash(self) -> str:
        return self._files.content_hash()

    def _public_names(self) -> dict[str, str]:
        names = {public_name(name): name for name in sorted(self._files.names())}
        known = {*tensor_shapes(self.config), "d2t", "t2d"} | LEFT_OUT
        unknown = sorted(names[name] for name in names.keys() - known)
        if unknown:
            raise ConfigError(f"{self.path}: an EAGLE-3 head has no tensor {', '.join(unknown)}")
        return names

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._names:
            raise ConfigError(f"{self.path} has no tensor {name}")
        found = self._files.shape(self._names[name])
        if found != shape:
            raise ConfigError(f"{self.path}: tensor {name} is {found}; it must be {shape}")

    def _draft_ids(self) -> torch.Tensor:
        """Return target ids: d + d2t[d] for draft id d. Without d2t the vocabularies are equal."""
        size, vocab_size = self.config.draft_vocab_size, self.config.layer.vocab_size
        if "d2t" not in self._names and size == vocab_size:
            return torch.arange(size)
        self._check_shape("d2t", (size,))
        offsets = self._files.tensor(self._names["d2t"])
        if offsets.is_floating_point() or offsets.dtype == torch.bool:
            raise ConfigError(f"{self.path}: tensor d2t is {offsets.dtype}, not of whole numbers")
        ids = torch.arange(size) + offsets
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= vocab_size:
            raise ConfigError(f"{self.path}: d2t maps to ids {low}..{high} of a vocabulary of {vocab_size}")
        if len(ids.unique()) != size:
            raise ConfigError(f"{self.path}: d2t maps two draft ids to one id")
        self._check_known(ids)
        return ids

    def _check_known(self, ids: torch.Tensor) -> None:
        """Check t2d, which is true for each target id with a draft id."""
        if "t2d" not in self._names:
            return
        self._check_shape("t2d", (self.config.layer.vocab_size,))
        known = self._files.tensor(self._names["t2d"]).bool()
        if not known[ids].all() or int(known.sum()) != len(ids):
            raise ConfigError(f"{self.path}: t2d marks other ids than d2t maps to")


def public_name(name: str) -> str:
    """Some files have layers.0 for midlayer, or the prefix `model.`."""
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def head_config(folder: Path, target: HeadFit) -> HeadConfig:
    """Raise ConfigError for an unsupported or unsuitable field."""
    raw = read_json(folder / "config.json")
    architecture = (raw.get("architectures") or ["?"])[0]
    if architecture != ARCHITECTURE:
        raise ConfigError(f"{folder}: {architecture!r} is not a supported head, only {ARCHITECTURE}")
    if raw.get("hidden_act", "silu") != "silu" or raw.get("sliding_window") or raw.get("quantization_config"):
        raise ConfigError(f"{folder}: hidden_act, sliding_window or quantization_config is not supported in a head")
    try:
        config = _config(folder, raw, target)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder / 'config.json'}: missing or wrong field {error}") from error
    for field in ("hidden_size", "vocab_size"):
        asked, there = int(raw[field]), getattr(target, field)
        if asked != there:
            raise ConfigError(f"{folder}: a head for {field} {asked} does not fit {target.name}, which has {there}")
    return config


def _config(folder: Path, raw: Mapping[str, Any], target: HeadFit) -> HeadConfig:
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    layer = LlamaConfig(
        name=folder.resolve().name,
        family="llama",
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=1,
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        rms_eps=float(raw["rms_norm_eps"]),
        rope=rope_from_hf(folder, raw),
        max_context=target.max_context,
        tie_embeddings=False,
        eos_ids=target.eos_ids,
    )
    return HeadConfig(layer, int(raw.get("draft_vocab_size") or raw["vocab_size"]), _aux_layers(raw, target))


def _aux_layers(raw: Mapping[str, Any], target: HeadFit) -> tuple[int, ...]:
    """Return the target's layers whose inputs `fc` reads.

    Number n in the file means the output of layer n, which is the input of layer n + 1.
    """
    asked = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    layers = tuple(int(n) + 1 for n in asked) if asked else default_aux_layers(target.num_layers)
    if len(layers) != NUM_AUX or sorted({*layers}) != list(layers) or not layers[-1] < target.num_layers:
        raise ValueError(f"eagle_aux_hidden_state_layer_ids: {asked} of {target.num_layers} layers")
    return layers
