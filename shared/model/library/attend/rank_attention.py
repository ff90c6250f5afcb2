"""The attention of one rank: it writes and reads only its own KV heads of the pages, which all ranks share.

    the plan divides the heads:    q k v of own heads -> own heads of the pages -> output of own heads
    every rank has all of q k v:   own heads of them  -> own heads of the pages -> all ranks' outputs, whole

Latents (latents.py) are of all heads. Each rank writes all of them, the same bytes as the others, and attends with its
own queries. If the number of ranks doesn't divide the heads, rank 0 attends alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from shared.device.group import RankGroup
from shared.model.library.attend.attention import PagedAttention
from shared.model.library.attend.latents import LatentWeights
from shared.model.library.attend.layer_places import LayerShape, Scoring

if TYPE_CHECKING:
    from shared.model.library.attend.compiled_attention import CompiledAttention


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Which of a layer's parts (`num_parts`) a rank has. `arrive_alone`: they come without the others'."""

    first: int
    num: int
    arrive_alone: bool

    def of_heads(self, x: torch.Tensor, dim: int, num_parts: int) -> torch.Tensor:
        """Return the share of a tensor whose dimension `dim` is the layer's heads, which parts divide evenly."""
        group = x.shape[dim] // num_parts
        return x.narrow(dim, self.first * group, self.num * group)


def share_of(layer: LayerShape, alone: bool, group: RankGroup) -> tuple[LayerShape, HeadShare]:
    """Return the layer as pages have it, and the rank's share. `layer`: as it asks, with own heads if `alone`."""
    num = layer.num_parts
    if alone:
        return resized(layer, num * group.size), HeadShare(group.rank * num, num, True)
    if num % group.size:
        return layer, HeadShare(0, 0 if group.rank else num, False)
    own = num // group.size
    return layer, HeadShare(group.rank * own, own, False)


def resized(layer: LayerShape, num: int) -> LayerShape:
    if layer.latent is None:
        return replace(layer, num_kv_heads=num)
    return replace(layer, latent=replace(layer.latent, num=num))


class RankAttention(PagedAttention):
    """All ranks call it together. `layers`: as pages have them."""

    is_divided = True

    def __init__(
        self,
        layers: Sequence[LayerShape],
        shares: Sequence[HeadShare],
        group: RankGroup,
        compiled: CompiledAttention | None = None,
        called: Sequence[int] | None = None,
    ) -> None:
        super().__init__(layers, compiled=compiled, called=called)
        self._shares, self._group = tuple(shares), group
        self._own = tuple(resized(layer, share.num) for layer, share in zip(layers, shares, strict=True))
        self._columns = tuple(columns_of(layer, share) for layer, share in zip(layers, shares, strict=True))
        # Only when the next layer begins have all ranks written this one: they have exchanged outputs in between.
        self._marked_late = 1

    def _answer(
        self,
        module: torch.nn.Module,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        share, layer = self._shares[index], self.layers[index]
        if share.arrive_alone:
            return super()._answer(module, index, query, key, value, scoring)
        if not share.num:
            whole = query.new_zeros(1, query.shape[2], query.shape[1], layer.output_size)
            return self._group.stack(whole)[0]
        query = share.of_heads(query, 1, layer.num_parts)
        if layer.latent is None:
            key, value = (share.of_heads(x, 1, layer.num_parts) for x in (key, value))
        sinks = None if scoring.sinks is None else share.of_heads(scoring.sinks, 0, layer.num_parts)
        out = super()._answer(module, index, query, key, value, replace(scoring, sinks=sinks))
        outputs = self._group.stack(out)
        return outputs[0] if share.num == layer.num_parts else torch.cat(list(outputs), dim=2)

    def _weights_of(self, module: torch.nn.Module, index: int) -> LatentWeights:
        weights, share = super()._weights_of(module, index), self._shares[index]
        return weights if share.arrive_alone else weights.of_heads(share.first, share.num)


def columns_of(layer: LayerShape, share: HeadShare) -> tuple[slice, ...]:
    """Return where a token's keys and values of the share are in the layer's page."""
    if layer.latent is not None:
        return (slice(None),)
    end_of_keys = layer.num_kv_heads * layer.key_size
    sizes = ((0, layer.key_size), (end_of_keys, layer.value_size))
    keys, values = (
        slice(begin + share.first * size, begin + (share.first + share.num) * size) for begin, size in sizes
    )
    return keys, values
