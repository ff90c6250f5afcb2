"""Write and read a layer's tokens in pages: numbers, or bytes with scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from shared.kernel.code.quantized import quantize
from shared.model.library.attend.layer_places import LayerShape


@dataclass(frozen=True, slots=True)
class ReadKeys:
    """The `num` keys that each of B rows reads. Behind a shorter row's end, its last one is repeated: other slots may
    hold an earlier owner's NaN."""

    pages: torch.Tensor  # (B, num) int64
    slots: torch.Tensor  # (B, num) int64, in the page
    mask: torch.Tensor | None  # (B, 1, Q, num): 0 where a query reads a key, else -inf; None: all read all
    found: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    @property
    def num(self) -> int:
        return self.pages.shape[1]

    def only(self, kept: torch.Tensor, num: int) -> ReadKeys:
        """Return the keys that queries read of these: `num` each, where `kept` (B, Q, num of these) is True."""
        if kept.shape[1] > 1:
            assert self.mask is not None
            return replace(self, mask=self.mask.masked_fill(~kept[:, None], float("-inf")))
        which = kept[:, 0].int().topk(num).indices.sort().values
        mask = None if self.mask is None else self.mask.gather(3, which[:, None, None])
        return ReadKeys(self.pages.gather(1, which), self.slots.gather(1, which), mask)

    def places(self, page: int, token: int) -> torch.Tensor:
        """(B * num,) int64: where keys begin, if pages and tokens begin so far apart. All layers share the result."""
        places = self.found.get((page, token))
        if places is None:
            places = self.found[page, token] = (self.pages * page + self.slots * token).flatten()
        return places


@dataclass(frozen=True, slots=True)
class PagesOfLayer:
    """A layer's part of all pages."""

    layer: LayerShape  # with the heads that this rank has
    group: int  # page group
    planes: tuple[torch.Tensor, ...]  # each (pages, page_size, numbers): of keys and values; a rank's keys, its values
    scales: torch.Tensor | None  # (pages, page_size, 2 * kv_heads) float32 if the one plane holds bytes

    def write(self, page: torch.Tensor, slot: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write T tokens. page, slot: (T,) int64. key, value: (T, kv_heads, size)."""
        if self.scales is not None:
            (key, of_keys), (value, of_values) = (quantize(one, self.planes[0].dtype) for one in (key, value))
            self.scales[page, slot] = torch.cat((of_keys, of_values), dim=1)
        both = torch.cat((key.flatten(1), value.flatten(1)), dim=1)
        for plane, numbers in zip(self.planes, both.split([one.shape[2] for one in self.planes], dim=1), strict=True):
            plane[page, slot] = numbers

    def read(self, keys: ReadKeys, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, each (B, kv_heads, num, size) in `dtype`."""
        k, v = (one.transpose(1, 2) for one in self._by_head(self.read_numbers(keys, dtype)))
        return k, v

    def read_numbers(self, keys: ReadKeys, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return what the planes hold, each (B, num, numbers) in `dtype`."""
        parts = [take_tokens(plane, keys) for plane in self.planes]
        return parts if self.scales is None else [self._widen(parts[0], take_tokens(self.scales, keys)).to(dtype)]

    def _widen(self, data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """(B, num, numbers) bytes, (B, num, 2 * kv_heads) -> the numbers in float32."""
        wide = data.float()
        for part, scale in zip(self._by_head([wide]), scales.split(self.layer.num_kv_heads, dim=2), strict=True):
            part.mul_(scale[..., None])
        return wide

    def _by_head(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return keys, then values: views (B, num, kv_heads, size)."""
        layer, heads = self.layer, self.layer.num_kv_heads
        if len(parts) == 1:
            parts = parts[0].split((heads * layer.key_size, heads * layer.value_size), dim=2)
        return [one.unflatten(2, (heads, -1)) for one in parts]


@dataclass(frozen=True, slots=True)
class PagesOfIndex:
    """A layer's index keys in all pages."""

    keys: torch.Tensor  # (pages, page_size, size)
    scales: torch.Tensor | None  # (pages, page_size, 1) float32 if keys are bytes

    def write(self, page: torch.Tensor, slot: torch.Tensor, keys: torch.Tensor) -> None:
        """Write T tokens. page, slot: (T,) int64. keys: (T, size)."""
        if self.scales is not None:
            keys, scales = quantize(keys, self.keys.dtype)
            self.scales[page, slot] = scales[:, None]
        self.keys[page, slot] = keys

    def read(self, keys: ReadKeys, dtype: torch.dtype) -> torch.Tensor:
        """Return (B, num, size) in `dtype`."""
        found = take_tokens(self.keys, keys)
        return found if self.scales is None else (found.float() * take_tokens(self.scales, keys)).to(dtype)


def take_tokens(plane: torch.Tensor, keys: ReadKeys) -> torch.Tensor:
    """Return (B, num, N) of a layer's plane (pages, page_size, N).

    index_select is several times as fast as indexing by page and slot. So all places where a token may begin become
    rows of one matrix. These rows overlap if a page is not a whole number of tokens."""
    if plane.dtype == torch.float8_e4m3fn:  # not every device selects such numbers
        return take_tokens(plane.view(torch.int8), keys).view(plane.dtype)
    page, token = plane.stride(0), plane.stride(1)
    step = math.gcd(page, token)
    num_rows = ((plane.shape[0] - 1) * page + (plane.shape[1] - 1) * token) // step + 1
    rows = plane.as_strided((num_rows, plane.shape[2]), (step, 1), plane.storage_offset())
    return rows.index_select(0, keys.places(page // step, token // step)).view(*keys.pages.shape, -1)
