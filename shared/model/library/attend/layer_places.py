"""Place a library model's layers in pages: planes by key and value size, page groups by window.

Layers of one size are in page groups (shared/kv/layer_groups.py). Layers of several sizes share one page list, with one
plane for each size. So do layers with indexers, whose keys are in a plane of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.kernel.code.quantized import DTYPES
from shared.kv.layer_groups import LayerPlace, group_layers
from shared.kv.layout import PlaneSpec


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """The heads whose keys and values are made of a layer's latents. A key's rotated part isn't: it is kept."""

    num: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class IndexKey:
    """What a layer's own indexer keeps per token: one vector."""

    size: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer turns products of queries and keys into weights."""

    scale: float
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: torch.Tensor | None = None  # (heads,): a score without a value, in each softmax

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a layer keeps per token, and how many tokens it reads (0: all), its own included.

    `in_chunks`: it reads the tokens of its own chunk, and `window` is the size of chunks. A layer that calls attention
    several times has as many shapes.
    `num_unread`: how many of a row's first keys no other token reads. With `latent`, it keeps a latent in the place of
    one head's key, and the rotated part in the place of its value. `num_chosen`: how many tokens an indexer chooses for
    a query that may read more; 0: there is none. `index`: of the layer's own indexer; without, the last one chooses."""

    num_kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    window: int = 0
    num_unread: int = 0
    latent: LatentHeads | None = None
    num_chosen: int = 0
    index: IndexKey | None = None
    in_chunks: bool = False

    def __str__(self) -> str:
        more = f", and {'chunks' if self.in_chunks else 'a window'} of {self.window}" if self.window else ""
        if self.num_chosen:
            keys = f" by index keys of {self.index.size}" if self.index is not None else " before"
            more += f", of {self.num_chosen} tokens that are chosen{keys}"
        if self.latent is not None:
            return f"latents of {self.key_size} and {self.value_size} for {self.latent.num} heads{more}"
        return f"{self.num_kv_heads} heads of keys of {self.key_size} and values of {self.value_size}{more}"

    @property
    def sizes(self) -> tuple[int, int, int, torch.dtype, bool]:
        return self.num_kv_heads, self.key_size, self.value_size, self.dtype, self.latent is not None

    @property
    def num_parts(self) -> int:
        """Return the number of equal parts in which the layer's work falls: KV heads, or heads that share a latent."""
        return self.num_kv_heads if self.latent is None else self.latent.num

    @property
    def output_size(self) -> int:
        """Return how many numbers a head's output has."""
        return self.value_size if self.latent is None else self.latent.value_size


@dataclass(frozen=True, slots=True)
class ModelPlaces:
    layers: tuple[LayerPlace, ...]
    plane_of: tuple[int, ...]  # each layer's plane
    planes: tuple[tuple[LayerShape, int], ...]  # a layer of each plane, and how many layers a page has room for
    windows: tuple[int, ...]  # of the page groups
    prefix: str = "kv"  # of the planes' names
    index_slots: tuple[int, ...] = ()  # each layer's place in the plane of index keys; -1: it has none
    index: IndexKey | None = None

    def plane_name(self, plane: int) -> str:
        """Return what a fingerprint calls a plane."""
        has_latents = self.planes[plane][0].latent is not None
        return f"{self.prefix}_latents{plane}" if has_latents else f"{self.prefix}{plane}"

    def scales_name(self, plane: int) -> str:
        return f"{self.plane_name(plane)}_scale"

    @property
    def index_name(self) -> str:
        """Return the name of the plane of index keys."""
        return f"{self.prefix}_index"

    @property
    def index_scales_name(self) -> str:
        return f"{self.index_name}_scale"

    def specs(self, page_size: int, kv_dtype: str = "auto") -> tuple[PlaneSpec, ...]:
        """`kv_dtype`: of ModelSpec."""
        planes = []
        for number, (layer, num_slots) in enumerate(self.planes):
            shape = (num_slots, page_size, layer.num_kv_heads * (layer.key_size + layer.value_size))
            dtype = DTYPES.get(kv_dtype, layer.dtype)
            planes.append(PlaneSpec(self.plane_name(number), shape, dtype, windows=self.windows))
            if kv_dtype != "auto":
                scales = (*shape[:2], 2 * layer.num_kv_heads)
                planes.append(PlaneSpec(self.scales_name(number), scales, torch.float32, windows=self.windows))
        if self.index is not None:
            slots = (max(self.index_slots) + 1, page_size)
            dtype = DTYPES.get(kv_dtype, self.index.dtype)
            planes.append(PlaneSpec(self.index_name, (*slots, self.index.size), dtype, windows=self.windows))
            if kv_dtype != "auto":
                planes.append(PlaneSpec(self.index_scales_name, (*slots, 1), torch.float32, windows=self.windows))
        return tuple(planes)


def places_of(layers: Sequence[LayerShape]) -> ModelPlaces:
    if len({layer.sizes for layer in layers}) == 1 and not any(layer.num_chosen for layer in layers):
        groups = group_layers(tuple(layer.window for layer in layers))
        return ModelPlaces(groups.layers, (0,) * len(layers), ((layers[0], groups.num_slots),), groups.windows)
    return in_first_group(layers)


def in_first_group(layers: Sequence[LayerShape], prefix: str = "kv") -> ModelPlaces:
    """Place all layers in the pages of the first group, as those of a draft head are."""
    sizes = list(dict.fromkeys(layer.sizes for layer in layers))
    # only the first plane's layers count as written before a step ends
    planes = [[layer for layer in layers if layer.sizes == of] for of in sizes]
    places, filled = [], [0] * len(planes)
    for layer in layers:
        plane = sizes.index(layer.sizes)
        filled[plane] += 1
        places.append(LayerPlace(0, filled[plane] - 1, filled[0]))
    windows = [layer.window for layer in layers]
    with_index = itertools.count()
    slots = tuple(-1 if layer.index is None else next(with_index) for layer in layers)
    return ModelPlaces(
        tuple(places),
        tuple(sizes.index(layer.sizes) for layer in layers),
        tuple((own[0], len(own)) for own in planes),
        (max(windows) if all(windows) else 0,),
        prefix,
        slots,
        next((layer.index for layer in layers if layer.index is not None), None),
    )
