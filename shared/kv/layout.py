"""Lay out a KV page. The pool is page-major, so each page is contiguous for every transport.

pool:  | page 0 (sink) | page 1 | page 2 | ...
page:  | plane "kv": [layer][k, v][kv_head][slot][head_dim] | plane "draft": ... |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

ALIGN_BYTES = 64
KIND_WHOLE, KIND_WINDOW = "whole", "window"  # GroupSpec.kind


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """One tensor of a page.

    `slot_dim`: the dimension with one entry per token, counted from the end. `window`: how many tokens the plane's
    layers attend to, the newest included; 0 for all.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slot_dim: int = -2
    window: int = 0

    @property
    def num_bytes(self) -> int:
        """Return the size, padded to align the next plane."""
        raw = math.prod(self.shape) * self.dtype.itemsize
        return -(-raw // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers whose KV has one shape, and the planes that hold it. So far all groups of a model share a page list."""

    planes: tuple[PlaneSpec, ...]
    window: int  # how many tokens the widest layer attends to, the newest included; 0 for all
    kind: str  # KIND_WHOLE, or KIND_WINDOW if all layers have a window


def page_bytes(planes: tuple[PlaneSpec, ...]) -> int:
    return sum(plane.num_bytes for plane in planes)


def pool_window(planes: tuple[PlaneSpec, ...]) -> int:
    """Return the widest window, in tokens; 0 if any plane attends to all tokens."""
    windows = [plane.window for plane in planes]
    return max(windows) if windows and all(windows) else 0


def num_layers(planes: tuple[PlaneSpec, ...]) -> int:
    """A layer is contiguous in a page."""
    return planes[0].shape[0]


def layer_ends(planes: tuple[PlaneSpec, ...], num_parts: int) -> tuple[int, ...]:
    """Divide a page's layers into at most `num_parts` parts, and return where each part except the last ends.

    The ends are exclusive. The last part is a single layer, because no computation hides its transfer.
    """
    ahead = num_layers(planes) - 1
    parts = min(num_parts - 1, ahead)
    return tuple(ahead * part // parts for part in range(1, parts + 1))


def layer_bytes(planes: tuple[PlaneSpec, ...]) -> int:
    return math.prod(planes[0].shape[1:]) * planes[0].dtype.itemsize
