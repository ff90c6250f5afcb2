"""Divide a model's layers into page groups, by their windows.

window 16:   layers 0 1 . 3 4 . 6        Equally many layers to a page, so that all groups' pages have one size, and
all tokens:         . . 2 . . 5 .        each group's own in the model's order. Here two: 2 5 | 0 3 | 1 4 | 6 .
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

MOST_GROUPS = 8  # each one costs a step a page table, and a place to write and keys to find


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """`slot`: the layer's index in its group's pages. `num_whole`: slots of all pages that are written after it."""

    group: int
    slot: int
    num_whole: int


@dataclass(frozen=True, slots=True)
class LayerGroups:
    layers: tuple[LayerPlace, ...]
    num_slots: int  # how many layers a page has room for
    windows: tuple[int, ...]  # of the groups, in tokens; 0: all

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def last_layer(self, num_slots: int) -> int:
        """Return the layer after which the first `num_slots` slots of all pages are written."""
        return next(index for index, place in enumerate(self.layers) if place.num_whole >= num_slots)


@functools.lru_cache
def group_layers(windows: tuple[int, ...]) -> LayerGroups:
    """`windows`: how many tokens each layer reads, the newest included; 0: all."""
    kinds = sorted(set(windows))
    num_slots = _slots_per_page([windows.count(window) for window in kinds], kinds)
    groups: list[tuple[int, list[int]]] = []  # window, and the layers that have it
    for window in kinds:
        own = [index for index, of in enumerate(windows) if of == window]
        num_groups = -(-len(own) // num_slots)
        groups += [(window, own[group::num_groups]) for group in range(num_groups)]
    if num_slots == len(windows):
        groups = [(kinds[-1] if kinds[0] else 0, list(range(num_slots)))]
    found = {index: (group, slot) for group, (_, own) in enumerate(groups) for slot, index in enumerate(own)}
    ends = [max(own[slot] for _, own in groups if slot < len(own)) for slot in range(num_slots)]
    whole = list(itertools.accumulate(ends, max))  # after which layer each slot is written
    places = [LayerPlace(*found[index], sum(end <= index for end in whole)) for index in range(len(windows))]
    return LayerGroups(tuple(places), num_slots, tuple(window for window, _ in groups))


def _slots_per_page(counts: Sequence[int], windows: Sequence[int]) -> int:
    """Return how many layers a page holds; all if groups don't pay. counts: of the layers with each window, ascending.

    First, layers that read all tokens should leave no slot empty, because their pages stay. Then no others should.
    Then few groups are best.
    """
    choices = [(sum(counts), 0, -sum(counts))]
    for slots in range(1, max(counts) + 1):
        groups = [-(-count // slots) for count in counts]
        if 1 < len(counts) <= sum(groups) <= MOST_GROUPS:
            staying = 0 if windows[0] else groups[0] * slots
            choices.append((staying, sum(groups) * slots, -slots))
    return -min(choices)[2]
