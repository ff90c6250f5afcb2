"""Random LoRA adapters for a tiny model's folder, in PEFT's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 10, "bias": "none", "target_modules": ["q_proj"]}


def adapter(
    model: Path, folder: Path, seed: int, targets: tuple[str, ...] = TARGETS, rank: int = 4, **config: Any
) -> Path:
    """Of every layer."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        stem, target = name.removesuffix(".weight"), name.split(".")[-2].removesuffix("_proj")
        if target in targets and name.endswith("_proj.weight"):
            for half, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                tensors[f"base_model.model.{stem}.lora_{half}.weight"] = torch.randn(shape, generator=generator) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | {"r": rank} | config))
    return folder
