"""Latents: what layers with multi-head latent attention keep (MLA: DeepSeek-V2, arXiv 2405.04434, section 2.1).

    a token in pages     [latent: rank numbers][rotated part of the key: rope numbers], for all heads together
    the key of a head    [its key weight @ latent][rotated part]
    the value of a head  its value weight @ latent

    absorbed    a query is multiplied by its head's key weight, an output by the value weight: the heads attend to
                latents as if these were one head's keys and values
    expanded    the keys and values of all tokens that are read are made again, as the library does

The library makes keys and values in one method, `expand_kv`, of which `keep_latents` makes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from shared.model.library.attend.layer_places import LatentHeads, LayerShape

OWN = "baton_"  # attentions whose names in the library begin so get latents
Pair = tuple[torch.Tensor, torch.Tensor]


def has_latents(attention: nn.Module) -> bool:
    """Return whether a layer's attention makes keys and values of latents as all the library's MLA layers do."""
    weight = getattr(attention, "kv_b_proj", None)
    return hasattr(attention, "expand_kv") and isinstance(weight, nn.Linear) and weight.bias is None


def keep_latents(network: nn.Module) -> None:
    """Let MLA layers give Baton's attentions latents and rotated parts, instead of keys and values."""
    for module in network.modules():
        if has_latents(module):
            own: Any = module
            own.expand_kv = functools.partial(_given, own, own.expand_kv)


def _given(attention: Any, expand: Callable[..., Pair], latent: torch.Tensor, rotated: torch.Tensor) -> Pair:
    """latent: (1, 1, T, rank). rotated: (1, 1, T, rope)."""
    is_own = attention.config._attn_implementation.startswith(OWN)
    return (latent, rotated) if is_own else expand(latent, rotated)


def shape_of_layer(
    attention: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int
) -> LayerShape:
    """Return what a layer keeps that calls attention with these. They are (1, heads or kv_heads, T, size)."""
    latent = None
    if has_latents(attention):
        num_heads, key_size = query.shape[1], query.shape[3] - value.shape[3]
        latent = LatentHeads(num_heads, key_size, len(weight_of(attention)) // num_heads - key_size)
    return LayerShape(key.shape[1], key.shape[3], value.shape[3], key.dtype, window, latent=latent)


def weight_of(attention: nn.Module) -> torch.Tensor:
    """Return the weight (heads * (key_size + value_size), rank) that makes keys and values of latents."""
    return attention.get_parameter("kv_b_proj.weight").detach()


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Of some heads: a view of the library's own weight."""

    numbers: torch.Tensor  # (heads, key_size + value_size, rank)
    key_size: int

    @classmethod
    def of_layer(cls, attention: nn.Module, heads: LatentHeads) -> LatentWeights:
        return cls(weight_of(attention).unflatten(0, (-1, heads.key_size + heads.value_size)), heads.key_size)

    def of_heads(self, first: int, num: int) -> LatentWeights:
        return LatentWeights(self.numbers.narrow(0, first, num), self.key_size)

    def prefers_absorbed(self, num_queries: int, num_tokens: int, rope: int) -> bool:
        """Return whether a row needs fewer products absorbed than expanded: queries of `num_tokens` that it reads.

        Absorbed, a query pays for its weights, and more for each token. Expanded, each token pays for its weights."""
        _, made, rank = self.numbers.shape
        weights, scores = made * rank, 2 * num_queries * num_tokens  # outputs cost what scores do
        absorbed = num_queries * weights + scores * (rank + rope)
        return absorbed <= num_tokens * weights + scores * (self.key_size + rope)

    def absorb(self, queries: torch.Tensor) -> torch.Tensor:
        """(T, heads, key_size + rope) -> (T, heads, rank + rope), which score latents."""
        own, rotated = queries.split((self.key_size, queries.shape[2] - self.key_size), dim=2)
        of_latents = torch.bmm(own.transpose(0, 1), self.numbers[:, : self.key_size])
        return torch.cat((of_latents.transpose(0, 1), rotated), dim=2)

    def values_of(self, outputs: torch.Tensor) -> torch.Tensor:
        """(T, heads, rank + rope) -> (T, heads, value_size)."""
        latents = outputs[..., : self.numbers.shape[2]].transpose(0, 1)
        return torch.bmm(latents, self.numbers[:, self.key_size :].transpose(1, 2)).transpose(0, 1)

    def expanded(self, latents: torch.Tensor, most: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield some heads at a time: about `most` numbers of keys and values, or one head.

        latents: (B, S, rank + rope). Keys are (B, heads, S, key_size + rope), values (B, heads, S, value_size)."""
        num_heads, made, rank = self.numbers.shape
        latent, rotated = latents.split((rank, latents.shape[2] - rank), dim=2)
        at_a_time = max(1, most // (latents[..., 0].numel() * (made + rotated.shape[2])))
        for first in range(0, num_heads, at_a_time):
            heads = slice(first, min(num_heads, first + at_a_time))
            both = linear(latent, self.numbers[heads].flatten(0, 1)).unflatten(2, (-1, made)).transpose(1, 2)
            shared = rotated[:, None].expand(-1, both.shape[1], -1, -1)
            yield heads, torch.cat((both[..., : self.key_size], shared), dim=3), both[..., self.key_size :]
