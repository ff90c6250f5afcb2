"""Bring a network of the library to a GPU, so that no step of it waits for the host."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

GROUPED = "grouped_mm"  # the library's name for one product of all experts, without a loop on the host
CHANGING = "dynamic"  # the kind of rotary frequencies that follow the longest position of a step
UNCHANGED = "default"
ROPE_TYPE = "rope_type"  # the library's name for the kind


def move_network(network: PreTrainedModel, device: torch.device) -> None:
    """Raise torch.OutOfMemoryError if the weights don't fit."""
    torch.nn.Module.to(network, device)  # the library's own `to` hides its arguments from checkers
    network.tie_weights()  # on some devices a moved parameter is a new object
    keep_frequencies(network)
    if has_experts(network):
        network.set_experts_implementation(GROUPED)


def keep_frequencies(network: PreTrainedModel) -> None:
    """Let no rotary embedding ask the device for the longest position: within the context, frequencies never change.

    Those of longrope do, but the library chooses them without a question (see `long_factors`)."""
    for module in network.modules():
        kinds: Any = getattr(module, ROPE_TYPE, None)
        if isinstance(kinds, dict):  # by kind of layer
            setattr(module, ROPE_TYPE, {layer: unchanged(kind) for layer, kind in kinds.items()})
        elif isinstance(kinds, str):
            setattr(module, ROPE_TYPE, unchanged(kinds))


def unchanged(kind: str) -> str:
    return UNCHANGED if kind == CHANGING else kind


def has_experts(network: PreTrainedModel) -> bool:
    """Return whether the network has experts that the library can run by one product."""
    return any(hasattr(module, "_apply_gate") for module in network.modules())
