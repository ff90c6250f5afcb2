"""Take the hidden states of the library's layers, which draft heads read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from shared.core.errors import ConfigError


class HiddenStates:
    """Copies what chosen decoder layers read, or the final hidden states, into one tensor per step."""

    def __init__(self, network: torch.nn.Module, attentions: Sequence[torch.nn.Module], width: int) -> None:
        """`attentions`: one module of each layer, in order. `width`: the number of hidden features."""
        self._network, self._attentions, self._width = network, attentions, width
        self._hooks: list[RemovableHandle] = []
        self._taken = torch.empty(0)

    def watch(self, chosen: Sequence[int]) -> None:
        """Copy the inputs of these layers from the next step on, in this order. Raise ConfigError if they can't be
        found."""
        self._remove_hooks()
        layers = decoder_layers(self._network, self._attentions) if chosen else ()
        self._hooks = [
            layers[layer].register_forward_pre_hook(self._hook_of(place), with_kwargs=True)
            for place, layer in enumerate(chosen)
        ]

    def watch_final(self) -> None:
        """Copy, from the next step on, what the final norm returns: the library's MTP layers read it."""
        self._remove_hooks()
        network: Any = self._network

        def take(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._taken.copy_(output.last_hidden_state[0])

        self._hooks = [network.get_decoder().register_forward_hook(take)]

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def begin_capture(self, num_tokens: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Return the tensor (T, layers * width) that the step fills; None if nothing is watched."""
        if not self._hooks:
            return None
        self._taken = torch.empty(num_tokens, len(self._hooks) * self._width, dtype=dtype, device=device)
        return self._taken

    def _hook_of(self, place: int) -> Any:
        columns = slice(place * self._width, (place + 1) * self._width)

        def take(module: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            hidden = args[0] if args else named["hidden_states"]  # (1, T, width)
            self._taken[:, columns] = hidden[0]

        return take


def decoder_layers(network: torch.nn.Module, attentions: Sequence[torch.nn.Module]) -> Sequence[torch.nn.Module]:
    """Return the layers that hold these modules, one each. Raise ConfigError if they are in no list, or if more than
    one vector per token goes from layer to layer."""
    if getattr(network.config, "hc_mult", 1) > 1:  # hyper-connections
        raise ConfigError("several streams run between its decoder layers, so a draft head can't read between them")
    for layers in network.modules():
        if isinstance(layers, torch.nn.ModuleList) and len(layers) == len(attentions):
            pairs = zip(layers, attentions, strict=True)
            if all(any(one is attention for one in layer.modules()) for layer, attention in pairs):
                return list(layers)
    raise ConfigError("its decoder layers are in no list of its own, so a draft head can't read between them")
