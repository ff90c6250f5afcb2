"""Layout of one KV page: page-major, so that a page is one contiguous block on every transport.

pool:  | page 0 (sink) | page 1 | page 2 | ...
page:  | plane "kv": [layer][k, v][kv_head][slot][head_dim] | plane "draft": ... |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """One tensor of a page. `shape` is that of a single page, without the page dimension; `slot_dim`, counted from its
    end, is the dimension that has one entry per token. `window`: its layers read so many tokens back, their own
    included; 0: all."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slot_dim: int = -2
    window: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes in one page, padded so that the next plane is aligned."""
        raw = math.prod(self.shape) * self.dtype.itemsize
        return -(-raw // ALIGN_BYTES) * ALIGN_BYTES


def page_bytes(planes: tuple[PlaneSpec, ...]) -> int:
    return sum(plane.num_bytes for plane in planes)


def pool_window(planes: tuple[PlaneSpec, ...]) -> int:
    """How many tokens, the newest included, a pool of these planes must keep: those of its widest window; 0: all."""
    windows = [plane.window for plane in planes]
    return max(windows) if windows and all(windows) else 0


def num_layers(planes: tuple[PlaneSpec, ...]) -> int:
    """Of the first plane, which is the model's: its first dimension. A layer is a contiguous part of a page."""
    return planes[0].shape[0]


def layer_ends(planes: tuple[PlaneSpec, ...], num_parts: int) -> tuple[int, ...]:
    """Where all but the last of so many parts of a page end, in layers. The last is one layer, for while it travels
    nothing is computed; the others are about equal."""
    ahead = num_layers(planes) - 1
    parts = min(num_parts - 1, ahead)
    return tuple(ahead * part // parts for part in range(1, parts + 1))


def layer_bytes(planes: tuple[PlaneSpec, ...]) -> int:
    """Bytes of one layer in one page."""
    return math.prod(planes[0].shape[1:]) * planes[0].dtype.itemsize
