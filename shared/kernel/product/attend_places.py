"""A run's tokens, and where the keys and values that they read lie in pages: for attend_numba.py and attend_bytes.py.

Each function is inlined into a compiled task."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from shared.kernel.code.attention_words import (
    PAGE_BYTES,
    PAGE_SIZE,
    ROWS,
    RUNS,
    SCALE_PAGE_BYTES,
    SCALE_SLOT_BYTES,
    SLOT_BYTES,
    SLOTS,
    TABLE,
    TABLE_STRIDE,
    VISIBLE,
)
from shared.kernel.code.items import Items
from shared.kernel.code.jit import inlined, ints_at, longs_at, prefetch

CACHE_LINE = 64
SCALE_BYTES = 4
FIRST_WITH_SCALES = int(Items.INT8)


class Run(NamedTuple):
    """Tokens [first, first + length) of one row. Token i of the run reads num_keys + i keys.

    All tokens of the run read keys [shared, end), in whole blocks."""

    first: int
    length: int
    table: int  # address of the row's page numbers
    num_keys: int
    window: int  # 0: no window
    num_unread: int  # of a row's first keys: none is read by another token
    shared: int
    end: int
    tree_start: int  # a draft tree's token reads all slots before this slot, then the slots of `seen`'s set bits
    seen: int


class KvSide(NamedTuple):
    """Addresses of a kv head's key (or value) and its scale: in slot 0 of page 0, or in slot_at's slot."""

    items: int
    scales: int
    slot_bytes: int  # from a slot's key to the next slot's
    scale_bytes: int  # from a slot's scale to the next slot's


@inlined
def run_at(step: Any, window: int, num_unread: int, index: int, lanes: int) -> Run:
    bounds = longs_at(step[RUNS])
    first, length = bounds[index], bounds[index + 1] - bounds[index]
    table = step[TABLE] + longs_at(step[ROWS])[first] * step[TABLE_STRIDE] * 4
    num_keys = longs_at(step[SLOTS])[first] + 1
    tree_start, seen = num_keys, 0
    if step[VISIBLE] != 0 and longs_at(step[VISIBLE])[first] >= 0:
        seen = longs_at(step[VISIBLE])[first]
        tree_start, num_keys = _window_of(seen, num_keys)
    shared = oldest_of(num_keys + length - 1, window, num_unread)
    whole = max(0, num_keys - shared) // lanes if length > 1 else 0
    return Run(first, length, table, num_keys, window, num_unread, shared, shared + whole * lanes, tree_start, seen)


@inlined
def oldest_of(num_keys: int, window: int, num_unread: int) -> int:
    """Return the first of a token's `num_keys` keys that it reads. It always reads its own."""
    oldest = max(0, num_keys - window) if window != 0 else 0
    return max(oldest, min(num_unread, num_keys - 1))


@inlined
def side_at(items: int, scales: int, head: int, row_bytes: int, by_token: bool, step: Any) -> KvSide:
    """Return a kv head's side. `items`, `scales`: addresses of head 0 in slot 0 of page 0. `by_token`: whether pages
    hold one token after another, with all its heads, instead of one head after another, with all its slots."""
    if by_token:
        own = items + head * row_bytes, scales + head * SCALE_BYTES
        return KvSide(own[0], own[1], step[SLOT_BYTES], step[SCALE_SLOT_BYTES])
    rows = head * step[PAGE_SIZE]
    return KvSide(items + rows * row_bytes, scales + rows * SCALE_BYTES, row_bytes, SCALE_BYTES)


@inlined
def slot_at(side: KvSide, table: int, page: int, slot: int, step: Any) -> KvSide:
    number = np.int64(ints_at(table)[page])
    items = side.items + number * step[PAGE_BYTES] + slot * side.slot_bytes
    scales = side.scales + number * step[SCALE_PAGE_BYTES] + slot * side.scale_bytes
    return KvSide(items, scales, side.slot_bytes, side.scale_bytes)


@inlined
def locate(
    items_at: int, scales_at: int, side: KvSide, table: int, start: int, stop: int, step: Any, items: int, lanes: int
) -> None:
    """Store the addresses of keys [start, start + lanes), and of their scales.

    Lanes at `stop` and beyond repeat the last address: their weight is 0."""
    page_size = step[PAGE_SIZE]
    page, slot = start // page_size, start % page_size
    at = slot_at(side, table, page, slot, step)
    for lane in range(lanes):
        if lane > 0 and start + lane < stop:
            slot += 1
            at = KvSide(at.items + side.slot_bytes, at.scales + side.scale_bytes, side.slot_bytes, side.scale_bytes)
            if slot == page_size:
                page, slot = page + 1, 0
                at = slot_at(side, table, page, 0, step)
        longs_at(items_at)[lane] = at.items
        if items >= FIRST_WITH_SCALES:
            longs_at(scales_at)[lane] = at.scales


@inlined
def _window_of(seen: int, end: int) -> tuple[int, int]:
    """Return a draft tree's first slot, and how many keys the token of `seen` reads."""
    width, count = 0, 0
    while seen >> width != 0:
        count += (seen >> width) & 1
        width += 1
    return end - width, end - width + count


@inlined
def locate_seen(items_at: int, scales_at: int, side: KvSide, run: Run, start: int, step: Any, lanes: int) -> None:
    """Store, for a draft tree's keys, the addresses of the slots that the token sees.

    Repeat the last address in the remaining lanes."""
    page_size = step[PAGE_SIZE]
    key, slot, at, seen = run.tree_start, run.tree_start, side, run.seen
    while seen != 0:
        if seen & 1:
            at = slot_at(side, run.table, slot // page_size, slot % page_size, step)
            if start <= key < start + lanes:
                longs_at(items_at)[key - start] = at.items
                longs_at(scales_at)[key - start] = at.scales
            key += 1
        seen >>= 1
        slot += 1
    for lane in range(key - start, lanes):
        longs_at(items_at)[lane] = at.items
        longs_at(scales_at)[lane] = at.scales


@inlined
def fetch(side: KvSide, table: int, start: int, stop: int, step: Any, items: int, row_bytes: int, lanes: int) -> None:
    """Prefetch scattered pages, which the hardware prefetcher does not find."""
    if start >= stop:
        return
    page_size = step[PAGE_SIZE]
    page, slot = start // page_size, start % page_size
    for _ in range(min(lanes, stop - start)):
        if slot == page_size:
            page, slot = page + 1, 0
        at = slot_at(side, table, page, slot, step)
        for line in range(0, row_bytes, CACHE_LINE):
            prefetch(at.items + line)
        if items >= FIRST_WITH_SCALES:
            prefetch(at.scales)
        slot += 1
