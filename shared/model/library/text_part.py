"""The text part of a network that also sees images or hears: the rest is neither made nor read.

    wrapper -> model -> language_model    stays, with the embedding and the head
                     -> vision_tower      goes, and so do projectors

The wrapper's own forward still runs, so its text answers are the wrapper's. Without a part that it needs, it fails.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

# What a text goes through beside: embeddings of tokens that stand for pieces of images and of sounds
ALSO = {"gemma3n": ("model.embed_vision", "model.embed_audio")}


class NoTower(PreTrainedModel):
    """Stands for a tower of the package timm, which so need not be installed. A text never gets there."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.post_init()


for tower, made_by in MODEL_MAPPING_NAMES.items():
    if made_by == "TimmWrapperModel":
        described = CONFIG_MAPPING[tower]
        AutoModel.register(described, type("NoTower", (NoTower,), {"config_class": described}), exist_ok=True)


def text_only(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a class whose networks have only what a text goes through, so that the library loads no more."""

    def make(network: PreTrainedModel, config: PreTrainedConfig, *given: Any, **more: Any) -> None:
        kind.__init__(network, config, *given, **more)
        ends = (network.get_decoder(), network.get_input_embeddings(), network.get_output_embeddings())
        kept = {end for end in ends if end is not None}
        kept |= {network.get_submodule(path) for path in ALSO.get(config.model_type, ())}
        keep_only(kept, network)
        inner = answering(network, kept)
        if inner is not network:
            network.forward = inner.forward

    return type(kind.__name__, (kind,), {"__init__": make, "__module__": kind.__module__})


def keep_only(kept: set[nn.Module], module: nn.Module) -> None:
    """Remove the modules that are, hold and lie in none of `kept`."""
    if module in kept:
        return
    for name, child in list(module.named_children()):
        if kept.isdisjoint(child.modules()):
            delattr(module, name)
        else:
            keep_only(kept, child)


def answering(network: PreTrainedModel, kept: set[nn.Module]) -> PreTrainedModel:
    """Return the innermost network that holds all of `kept` and makes texts: around it is nothing that a text needs."""
    holders = [one for one in network.modules() if isinstance(one, PreTrainedModel) and kept <= {*one.modules()}]
    return [one for one in holders if one.can_generate()][-1]
