"""Lay out a KV page. The pool is page-major, so each page is contiguous for every transport.

pool:  | page 0 (sink) | page 1 | page 2 | ...
page:  | plane "kv": [layer][k, v][kv_head][slot][head_dim] | plane "draft": ... |

Layers with unlike windows are in page groups: equally many layers each, so that all groups' pages have one size and one
free list. For each page of tokens a row has a page of every group. In a windowed group only the last ones stay.

tokens:              0..15 | 16..31 | 32..47            a row's page list, of two groups, the second one windowed:
layers 0, 2 (all):     7   |   3    |   12              7 0 3 5 12 4
layers 1, 3 (16):      0   |   5    |    4
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """One tensor of a page.

    `slot_dim`: the dimension with one entry per token, counted from the end. `windows`: how many tokens the plane's
    layers attend to in each page group, the newest included; 0 for all. A group that is not listed leaves the plane
    unused.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slot_dim: int = -2
    windows: tuple[int, ...] = (0,)

    @property
    def num_bytes(self) -> int:
        """Return the size, padded to align the next plane."""
        raw = math.prod(self.shape) * self.dtype.itemsize
        return -(-raw // ALIGN_BYTES) * ALIGN_BYTES


def page_bytes(planes: tuple[PlaneSpec, ...]) -> int:
    return sum(plane.num_bytes for plane in planes)


def page_windows(planes: tuple[PlaneSpec, ...]) -> tuple[int, ...]:
    """Return each page group's widest window, in tokens; 0 if any of its planes attends to all tokens."""
    num_groups = max((len(plane.windows) for plane in planes), default=1)
    by_group = [[plane.windows[group] for plane in planes if group < len(plane.windows)] for group in range(num_groups)]
    return tuple(max(windows, default=0) if all(windows) else 0 for windows in by_group)


def num_layers(planes: tuple[PlaneSpec, ...]) -> int:
    """Return how many layers a page holds. A layer is contiguous in a page."""
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
