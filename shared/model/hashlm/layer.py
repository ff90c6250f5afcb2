"""Run one layer of HashLM, whole or a rank's part. Each token stores its value, then sums the values that it may read.

    slot of t = mix(given[t], position)      out[t] = sum over the slots that t reads of their value * weight(position)

With the window STATE a layer is a recurrence instead. It has a state after each token, and reads the last one only:

    slot of t = out[t] = mix(slot of t - 1 ^ given[t], position)

Sums wrap at 64 bits, so order does not matter. A value has four lanes of 16 bits. A rank owns neighbouring
lanes, and writes only these. In its sums, the other lanes are 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shared.kernel.code.jit import kernel
from shared.kernel.sampling.noise_numba import exact
from shared.kv.pool import KVPool
from shared.model.math.interface import ModelInputs

STATE = -1  # a window: the layer is a recurrence
STATE_WINDOW = 2  # its pages are kept as those of a layer that reads its own token and the one before
NUM_LANES = 4
LANE_BITS = 16

_u64 = np.uint64
# inlined, because passing arrays costs more than the sum
part = kernel(fastmath=False, forceinline=True)
Longs = npt.NDArray[np.int64]
Ints = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]
Lanes = npt.NDArray[np.uint16]


@exact
def mix(value: np.uint64, position: int) -> np.uint64:
    mixed = _u64(value * _u64(0x9E3779B97F4A7C15)) ^ _u64(_u64(position) * _u64(0xC2B2AE3D27D4EB4F))
    mixed = _u64(mixed ^ (mixed >> _u64(30))) * _u64(0xBF58476D1CE4E5B9)
    mixed = _u64(mixed ^ (mixed >> _u64(27))) * _u64(0x94D049BB133111EB)
    return mixed ^ (mixed >> _u64(31))


@exact
def odd_weight(position: int) -> np.uint64:
    return mix(_u64(0x5DEECE66D), position) | _u64(1)


@exact
def window_begin(slots: Longs, visible: Longs) -> int:
    """Return the first slot of the draft tree."""
    begin = int(slots[0])
    while visible[0] >> (slots[0] - begin + 1) != 0:
        begin -= 1
    return begin


@part
def _sum_span(words: Words, mask: np.uint64, pages: Ints, begin: int, end: int) -> np.uint64:
    """Sum the slots at positions [begin, end) page by page, because a division costs as much as a few additions."""
    page_size, total, position = words.shape[1], _u64(0), begin
    index, slot = begin // page_size, begin % page_size
    while position < end:
        page = pages[index]
        for place in range(slot, min(page_size, slot + end - position)):
            total += (words[page, place] & mask) * odd_weight(position)
            position += 1
        index, slot = index + 1, 0
    return total


@exact
def _sum_row(positions: Longs, pages: Ints, words: Words, mask: np.uint64, window: int, out: Words) -> None:
    """For each of the ascending `positions`, sum the last `window` slots up to it. `window` 0: all slots."""
    total, begin, end = _u64(0), 0, 0  # total: the sum over slots [begin, end)
    for t in range(positions.shape[0]):
        past = int(positions[t]) + 1
        oldest = max(0, past - window) if window > 0 else 0
        if oldest > begin:
            total, begin, end = _u64(0), oldest, oldest
        total += _sum_span(words, mask, pages, end, past)
        out[t], end = total, past


@exact
def _sum_window(
    positions: Longs, slots: Longs, visible: Longs, pages: Ints, words: Words, mask: np.uint64, out: Words
) -> None:
    """Sum what each token of a draft tree reads: slots before the tree, ancestors' slots and its own."""
    page_size, begin = words.shape[1], window_begin(slots, visible)
    before = _sum_span(words, mask, pages, 0, begin)
    for t in range(positions.shape[0]):
        total, position = before, begin
        for slot in range(begin, slots[t] + 1):
            is_own = slot == slots[t]
            if is_own or (visible[t] >> (slot - begin)) & 1:
                weight = odd_weight(positions[t] if is_own else position)
                total += (words[pages[slot // page_size], slot % page_size] & mask) * weight
                position += 1
        out[t] = total


@exact
def _state_row(given: Words, positions: Longs, pages: Ints, words: Words, out: Words) -> None:
    """Write the state after each of a row's neighbouring tokens."""
    page_size = words.shape[1]
    for t in range(given.shape[0]):
        before, state = int(positions[t]) - 1, _u64(0)
        if before >= 0:
            state = words[pages[before // page_size], before % page_size]
        out[t] = mix(state ^ given[t], positions[t])
        words[pages[positions[t] // page_size], positions[t] % page_size] = out[t]


@exact
def layer_row(
    given: Words,
    positions: Longs,
    slots: Longs,
    visible: Longs,
    pages: Ints,
    words: Words,
    lanes: Lanes,
    first: int,
    window: int,
    out: Words,
) -> None:
    """Process one row. `words` (num_pages, page_size) and `lanes` (num_pages, page_size, lanes) are views of the pool.

    `first`: the first lane's number.
    """
    page_size, mask = words.shape[1], _u64(0)
    for lane in range(lanes.shape[2]):
        mask |= _u64(0xFFFF) << _u64(LANE_BITS * (first + lane))
    for t in range(given.shape[0]):
        value, page, slot = mix(given[t], positions[t]), pages[slots[t] // page_size], slots[t] % page_size
        for lane in range(lanes.shape[2]):
            lanes[page, slot, lane] = np.uint16((value >> _u64(LANE_BITS * (first + lane))) & _u64(0xFFFF))
    if given.shape[0] > 0 and visible[0] >= 0:
        _sum_window(positions, slots, visible, pages, words, mask, out)
    else:
        _sum_row(positions, pages, words, mask, window, out)


@exact
def _layer(
    given: Words,
    positions: Longs,
    slots: Longs,
    visible: Longs,
    begins: Ints,
    ends: Ints,
    page_table: Ints,
    words: Words,
    lanes: Lanes,
    first: int,
    window: int,
    out: Words,
) -> None:
    for row in range(begins.shape[0]):
        begin, end = begins[row], ends[row]
        own, sums, pages = given[begin:end], out[begin:end], page_table[row]
        at, nodes, seen = positions[begin:end], slots[begin:end], visible[begin:end]
        if window == STATE:
            _state_row(own, at, pages, words, sums)
        else:
            layer_row(own, at, nodes, seen, pages, words, lanes, first, window, sums)


class LayerStep(NamedTuple):
    positions: Longs
    slots: Longs
    visible: Longs
    begins: Ints  # each row's first token
    ends: Ints
    page_table: Ints


class LayerPages(NamedTuple):
    """One layer's values in a pool: whole (`words`), and this rank's lanes."""

    words: Words
    lanes: Lanes
    first: int  # this rank's first lane


def arrays_of(inputs: ModelInputs, group: int = 0) -> LayerStep:
    """`group`: the layer's page group."""
    positions, bounds = inputs.positions.contiguous().numpy(), inputs.layout.cu_q_lens.contiguous().numpy()
    return LayerStep(
        positions,
        positions if inputs.slots is None else inputs.slots.contiguous().numpy(),
        np.full_like(positions, -1) if inputs.visible is None else inputs.visible.contiguous().numpy(),
        bounds[:-1],
        bounds[1:],
        inputs.layout.page_tables[group].contiguous().numpy(),
    )


def layers_of(kv: KVPool, first: int = 0, num_lanes: int = NUM_LANES) -> tuple[LayerPages, LayerPages]:
    """Return both layers' pages. Layers in page groups of their own have the same place in these groups' pages.

    Lanes are least significant first, as in the machine's integers."""
    words: Words = kv.plane("kv").numpy().view(np.uint64)
    lanes: Lanes = words.view(np.uint16).reshape(*words.shape, NUM_LANES)[..., first : first + num_lanes]
    return LayerPages(words[:, 0], lanes[:, 0], first), LayerPages(words[:, -1], lanes[:, -1], first)


def run_layer(step: LayerStep, given: Words, pages: LayerPages, window: int = 0) -> Words:
    """Turn (T,) values into (T,) sums. A token without a row gets 0."""
    out = np.zeros(len(given), np.uint64)
    _layer(given, *step, *pages, window, out)
    return out


def words_of(values: torch.Tensor) -> Words:
    """`values`: (T,) int64."""
    words: Words = values.contiguous().numpy().view(np.uint64)
    return words
