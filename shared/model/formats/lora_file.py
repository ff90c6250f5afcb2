"""Read a LoRA adapter as PEFT writes it: adapter_config.json and *.safetensors (arXiv 2106.09685).

As in hf_config.py, each field and tensor is used, known to be harmless, or refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shared.core.errors import ConfigError
from shared.model.formats.gguf_file import hash_files
from shared.model.formats.tensor_files import TensorFiles
from shared.model.math.config import LlamaConfig, read_json

CONFIG_NAME = "adapter_config.json"
USED = frozenset(["peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "init_lora_weights", "bias"])
_NO_MATTER = (
    "auto_mapping base_model_name_or_path exclude_modules inference_mode layers_pattern layers_to_transform "
    "loftq_config lora_dropout megatron_core peft_version qalora_group_size revision target_modules task_type"
)
NO_MATTER = frozenset(_NO_MATTER.split())
# Other values of init_lora_weights change the base model's weights, which all adapters share.
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
TENSOR = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)_proj\.lora_([AB])\.weight")


@dataclass(frozen=True, slots=True)
class LoraPair:
    """What an adapter adds to one product: `scale` B A x."""

    layer: int
    target: str  # q, k, v, o, gate, up or down
    down: torch.Tensor  # A (r, in)
    up: torch.Tensor  # B (out, r)
    scale: float


class LoraFolder:
    def __init__(self, folder: Path, model: LlamaConfig) -> None:
        self.path = folder
        self._raw = read_json(folder / CONFIG_NAME)
        check_config(folder, self._raw)
        self._files = TensorFiles(folder)
        self._model = model
        self._files.check_floats(self._files.names())
        self.pairs = tuple(self._pair(layer, target) for layer, target in self._targets())
        self.digest = digest_of(folder)

    def _targets(self) -> list[tuple[int, str]]:
        found: dict[tuple[int, str], set[str]] = {}
        for name in sorted(self._files.names()):
            match = TENSOR.fullmatch(name)
            if match is None:
                raise ConfigError(f"{self.path}: tensor {name} is not one that an adapter here may have")
            found.setdefault((int(match[1]), match[2]), set()).add(match[3])
        for (layer, target), halves in found.items():
            if layer >= self._model.num_layers or target not in shapes(self._model, layer):
                raise ConfigError(f"{self.path}: {self._model.name} has no {target}_proj in layer {layer} to adapt")
            if halves != {"A", "B"}:
                raise ConfigError(f"{self.path}: layer {layer} {target}_proj has only half of an adapter")
        return list(found)

    def _pair(self, layer: int, target: str) -> LoraPair:
        block = "self_attn" if target in ("q", "k", "v", "o") else "mlp"
        name = f"base_model.model.model.layers.{layer}.{block}.{target}_proj.lora_"
        down, up = (self._files.tensor(f"{name}{half}.weight") for half in "AB")
        rank, (wide, narrow) = up.shape[-1] if up.ndim else 0, shapes(self._model, layer)[target]
        if rank < 1 or tuple(down.shape) != (rank, narrow) or tuple(up.shape) != (wide, rank):
            raise ConfigError(
                f"{self.path}: layer {layer} {target}_proj is {tuple(up.shape)} x {tuple(down.shape)}; "
                f"{self._model.name} needs ({wide}, r) x (r, {narrow})"
            )
        if rank != self._raw["r"] and not self._raw.get("rank_pattern"):
            raise ConfigError(f"{self.path}: r is {self._raw['r']}, but layer {layer} {target}_proj has rank {rank}")
        alpha = float(self._raw["lora_alpha"])
        return LoraPair(layer, target, down, up, alpha / (math.sqrt(rank) if self._raw.get("use_rslora") else rank))


def digest_of(folder: Path) -> str:
    return hash_files((folder / CONFIG_NAME, *sorted(folder.glob("*.safetensors"))))


def shapes(model: LlamaConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Return (out, in) of each product that an adapter may change. It may not change experts."""
    hidden, inner = model.hidden_size, model.intermediate_size
    attention = {
        "q": (model.q_size, hidden),
        "k": (model.kv_size, hidden),
        "v": (model.kv_size, hidden),
        "o": (hidden, model.q_size),
    }
    if model.has_experts(layer):
        return attention
    return attention | {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}


def check_config(folder: Path, raw: Mapping[str, Any]) -> None:
    if raw.get("peft_type") != "LORA":
        raise ConfigError(f"{folder}: peft_type {raw.get('peft_type')!r} is not supported, only LORA")
    if raw.get("bias", "none") != "none":
        raise ConfigError(f"{folder}: bias {raw['bias']!r} is not supported, only none")
    if raw.get("init_lora_weights", True) not in PLAIN_STARTS:
        raise ConfigError(f"{folder}: init_lora_weights {raw['init_lora_weights']!r} changes the base's weights")
    for name in ("r", "lora_alpha"):
        if not isinstance(raw.get(name), int | float) or not math.isfinite(raw[name]):
            raise ConfigError(f"{folder}: {name} is missing or not a number")
    known = USED | NO_MATTER
    strange = sorted(name for name, value in raw.items() if name not in known and value not in (None, False, [], {}))
    if strange:
        raise ConfigError(f"{folder / CONFIG_NAME}: not supported: {', '.join(strange)}")
