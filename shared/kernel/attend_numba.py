"""Computes softmax(scale q k) v over paged KV: attention_numba.py's second task.

Neighbouring tokens of a row form a run. If all tokens of a run read a block, the block is loaded once:

    token 0 of the run    | early | shared, in whole blocks | its own |
    token 1                 |early| shared                  | its own   |
    last token                    | shared                  | its own     |

Keys are "early" only with a sliding window. In a draft tree or a decode row, each token forms a run, whose keys are all
"its own".
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from shared.kernel.attention_words import (
    KEY_SCALES,
    KEYS,
    NUM_RUNS,
    OUT,
    PAGE_BYTES,
    PAGE_SIZE,
    QUERIES,
    ROWS,
    RUN_TOKENS,
    RUNS,
    SCALE_PAGE_BYTES,
    SCORE_BYTES,
    SCRATCH,
    SCRATCH_BYTES,
    SLOTS,
    STEP,
    TABLE,
    TABLE_STRIDE,
    VALUE_SCALES,
    VALUES,
    VISIBLE,
    WINDOW,
)
from shared.kernel.items import Items
from shared.kernel.jit import (
    NUM_SHARES,
    compile_task,
    copied,
    exp32,
    floats_at,
    inlined,
    ints_at,
    longs_at,
    prefetch,
    store,
)
from shared.kernel.simd import copy_block, narrow_weights, score_block, score_transposed, sum_block, transpose_block
from shared.kernel.sums import sum_of
from shared.kernel.vectors import block_lanes, number_bytes_of

CACHE_LINE = 64
SCALE_BYTES = 4
FIRST_WITH_SCALES = int(Items.INT8)
FETCH_AHEAD = 64  # keys
MOST_RUN_TOKENS = 16
MOST_SCRATCH = 1 << 19  # limit of a run's scratch in bytes, to fit a core's own cache
_f32 = np.float32


def score_row(num_keys: int, head_dim: int) -> int:
    """Return the length of a query's row of float32 scores, with a spare block.

    The number of vectors is odd, to spread rows over cache sets."""
    lanes = block_lanes(head_dim)
    return (-(-num_keys // lanes) + 1 | 1) * lanes


def run_bytes(num_tokens: int, row: int, group: int, head_dim: int) -> int:
    lanes = block_lanes(head_dim)
    return 4 * (4 * lanes + lanes * head_dim + group * lanes + num_tokens * group * (head_dim + lanes + row))


def most_run_tokens(row: int, group: int, head_dim: int) -> int:
    """Return a run's largest length, a power of two."""
    lanes = block_lanes(head_dim)
    fixed, per_token = 4 * (4 + head_dim + group) * lanes, 4 * group * (head_dim + lanes + row)
    fitting = min(MOST_RUN_TOKENS, max(1, (MOST_SCRATCH - fixed) // per_token))
    return 1 << fitting.bit_length() - 1


class RunSizes(NamedTuple):
    most_tokens: int
    score_bytes: int  # of a query's row of scores
    scratch_bytes: int


def run_sizes(num_keys: int, num_tokens: int, group: int, head_dim: int) -> RunSizes:
    """`num_keys`, `num_tokens`: of the step's longest row."""
    sizes = score_row(num_keys, head_dim), group, head_dim
    tokens = min(most_run_tokens(*sizes), num_tokens)
    return RunSizes(tokens, 4 * sizes[0], run_bytes(tokens, *sizes))


class Run(NamedTuple):
    """Tokens [first, first + length) of one row. Token i of the run reads num_keys + i keys.

    All tokens of the run read keys [shared, end), in whole blocks."""

    first: int
    length: int
    table: int  # address of the row's page numbers
    num_keys: int
    window: int  # 0: no window
    shared: int
    end: int
    tree_start: int  # a draft tree's token reads all slots before this slot, then the slots of `seen`'s set bits
    seen: int


class KvSide(NamedTuple):
    """Addresses of a kv head's key (or value) and its scale: in slot 0 of page 0, or in slot_at's slot."""

    items: int
    scales: int


class RunRoom(NamedTuple):
    """Addresses in a thread's scratch. R: a run's largest length. G: queries per kv head."""

    items: int  # (lanes,) int64: addresses of a block's keys or values
    scales: int  # (lanes,) int64: addresses of their scales
    block: int  # what transpose_block or copy_block wrote
    edge: int  # (G, lanes) float32: weights of a partial block
    sums: int  # (R, G, D) float32: weighted values
    tops: int  # (R, G, lanes) float32: largest scores
    scores: int  # (R, G, row) float32, in the order of a token's keys; then what narrow_weights made of them


@functools.cache
def make_attend(
    num_heads: int, num_kv_heads: int, head_dim: int, is_half: bool, page_items: Items, scale: float
) -> Any:
    """Compile the task. Pages before the window are never read: they may have been reused."""
    lanes, group, items = block_lanes(head_dim), num_heads // num_kv_heads, int(page_items)
    row_bytes, out_bytes = head_dim * page_items.num_bytes, head_dim * (2 if is_half else 4)
    number_bytes = number_bytes_of(page_items)
    group_bytes, token_bytes = group * head_dim * number_bytes, num_heads * head_dim * number_bytes

    def attend(words: Any, share: int, worker: int) -> None:
        step = longs_at(words[STEP])
        stride = step[SCORE_BYTES]
        memory = step[SCRATCH] + worker * step[SCRATCH_BYTES]
        room = _room_at(memory, step[RUN_TOKENS], group, head_dim, lanes)
        for index in range(share, step[NUM_RUNS] * num_kv_heads, words[NUM_SHARES]):
            run, head = run_at(step, words[WINDOW], index // num_kv_heads, lanes), index % num_kv_heads
            rows = head * step[PAGE_SIZE]
            keys = KvSide(words[KEYS] + rows * row_bytes, words[KEY_SCALES] + rows * SCALE_BYTES)
            values = KvSide(words[VALUES] + rows * row_bytes, words[VALUE_SCALES] + rows * SCALE_BYTES)
            queries = step[QUERIES] + run.first * token_bytes + head * group_bytes
            fill(room.tops, run.length * group * lanes, _f32(-np.inf))
            _score_own(group, head_dim, items, lanes, row_bytes, step, run, room, keys, values, queries, token_bytes)
            for start in range(run.shared, run.end, lanes):
                _fetch(keys, run.table, start + lanes, run.end, step, items, row_bytes, lanes)
                _locate(room.items, room.scales, keys, run.table, start, run.end, step, items, row_bytes, lanes)
                transpose_block(head_dim, items, room.items, room.scales, room.block)
                for i in range(run.length):
                    found = room.scores + i * group * stride + (start - _oldest(run.num_keys + i, run.window)) * 4
                    tops = room.tops + i * group * lanes * 4
                    score_transposed(group, head_dim, items, queries + i * token_bytes, room.block, found, stride, tops)
            _soften_run(items, room, run, stride, group, lanes, scale)
            fill(room.sums, run.length * group * head_dim, _f32(0.0))
            _sum_own(group, head_dim, items, number_bytes, lanes, row_bytes, step, run, room, values, True)
            for start in range(run.shared, run.end, lanes):
                _fetch(values, run.table, start + lanes, run.end, step, items, row_bytes, lanes)
                _locate(room.items, room.scales, values, run.table, start, run.end, step, items, row_bytes, lanes)
                copy_block(head_dim, items, room.items, room.scales, room.block)
                for i in range(run.length):
                    oldest = _oldest(run.num_keys + i, run.window)
                    weights = room.scores + i * group * stride + (start - oldest) * number_bytes
                    sums = room.sums + i * group * head_dim * 4
                    sum_block(group, head_dim, items, True, weights, stride, room.block, 0, sums)
            _sum_own(group, head_dim, items, number_bytes, lanes, row_bytes, step, run, room, values, False)
            out = words[OUT] + (run.first * num_heads + head * group) * out_bytes
            store_run(run, room.sums, room.tops, lanes * 4, out, num_heads * out_bytes, group, head_dim, is_half)

    return compile_task(attend)


@inlined
def _room_at(memory: int, run_tokens: int, group: int, head_dim: int, lanes: int) -> RunRoom:
    scales = memory + lanes * 8
    block = scales + lanes * 8
    edge = block + lanes * head_dim * 4
    sums = edge + group * lanes * 4
    tops = sums + run_tokens * group * head_dim * 4
    return RunRoom(memory, scales, block, edge, sums, tops, tops + run_tokens * group * lanes * 4)


@inlined
def run_at(step: Any, window: int, index: int, lanes: int) -> Run:
    bounds = longs_at(step[RUNS])
    first, length = bounds[index], bounds[index + 1] - bounds[index]
    table = step[TABLE] + longs_at(step[ROWS])[first] * step[TABLE_STRIDE] * 4
    num_keys = longs_at(step[SLOTS])[first] + 1
    tree_start, seen = num_keys, 0
    if step[VISIBLE] != 0 and longs_at(step[VISIBLE])[first] >= 0:
        seen = longs_at(step[VISIBLE])[first]
        tree_start, num_keys = _window_of(seen, num_keys)
    shared = _oldest(num_keys + length - 1, window)
    whole = max(0, num_keys - shared) // lanes if length > 1 else 0
    return Run(first, length, table, num_keys, window, shared, shared + whole * lanes, tree_start, seen)


@inlined
def _oldest(num_keys: int, window: int) -> int:
    return max(0, num_keys - window) if window != 0 else 0


@copied
def _score_own(
    group: int, head_dim: int, items: int, lanes: int, row_bytes: int, step: Any, run: Run, room: RunRoom, keys: KvSide,
    values: KvSide, queries: int, token_bytes: int,
) -> None:  # fmt: skip
    """Score the keys outside the shared blocks. A partial block's spare lanes are overwritten later."""
    if run.length == 1:
        for start in range(run.shared, run.shared + FETCH_AHEAD, lanes):
            _fetch(keys, run.table, start, run.num_keys, step, items, row_bytes, lanes)
    for i in range(run.length):
        num_keys = run.num_keys + i
        oldest, early = _oldest(num_keys, run.window), min(run.shared, num_keys)
        rows, tops = room.scores + i * group * step[SCORE_BYTES], room.tops + i * group * lanes * 4
        start = oldest if oldest < early else run.end
        while start < num_keys:
            if run.length == 1:
                _fetch(keys, run.table, start + FETCH_AHEAD, num_keys, step, items, row_bytes, lanes)
                _fetch(values, run.table, start, num_keys, step, items, row_bytes, lanes)
            stop = early if start < early else num_keys
            _locate(room.items, room.scales, keys, run.table, start, stop, step, items, row_bytes, lanes)
            if run.seen != 0 and start + lanes > run.tree_start:
                locate_seen(room.items, room.scales, keys, run, start, step, row_bytes, lanes)
            found = rows + (start - oldest) * 4
            asked = queries + i * token_bytes
            score_block(group, head_dim, items, asked, room.items, room.scales, found, step[SCORE_BYTES], tops)
            start = run.end if start < early <= start + lanes else start + lanes


@copied
def _sum_own(
    group: int, head_dim: int, items: int, number_bytes: int, lanes: int, row_bytes: int, step: Any, run: Run,
    room: RunRoom, values: KvSide, is_early: bool,
) -> None:  # fmt: skip
    """Add weighted values in the keys' order: before the shared blocks (`is_early`), or after them."""
    stride = step[SCORE_BYTES]
    for i in range(run.length):
        num_keys = run.num_keys + i
        oldest = _oldest(num_keys, run.window)
        first, stop = (oldest, min(run.shared, num_keys)) if is_early else (run.end, num_keys)
        for start in range(first, stop, lanes):
            _locate(room.items, room.scales, values, run.table, start, stop, step, items, row_bytes, lanes)
            if run.seen != 0 and start + lanes > run.tree_start:
                locate_seen(room.items, room.scales, values, run, start, step, row_bytes, lanes)
            weights, row = room.scores + i * group * stride + (start - oldest) * number_bytes, stride
            if is_early:  # copy them: the row continues with other keys' weights
                _copy_edge(weights, stride, room.edge, stop - start, group, lanes)
                weights, row = room.edge, lanes * 4
            sums = room.sums + i * group * head_dim * 4
            sum_block(group, head_dim, items, False, weights, row, room.items, room.scales, sums)


@inlined
def _copy_edge(weights: int, stride: int, edge: int, count: int, group: int, lanes: int) -> None:
    for g in range(group):
        for lane in range(lanes):
            weight = floats_at(weights + g * stride)[lane] if lane < count else _f32(0.0)
            floats_at(edge)[g * lanes + lane] = weight


@copied
def _soften_run(items: int, room: RunRoom, run: Run, stride: int, group: int, lanes: int, scale: float) -> None:
    """Turn scores into weights exp(scale (score - top)), and the scores behind the last key into 0.

    Write 1 / (sum of a query's weights) to its first number of `tops`."""
    for i in range(run.length):
        num_keys = run.num_keys + i - _oldest(run.num_keys + i, run.window)
        for query in range(i * group, (i + 1) * group):
            row = room.scores + query * stride
            x, tops = floats_at(row), floats_at(room.tops + query * lanes * 4)
            top = tops[0]
            for lane in range(1, lanes):
                top = max(top, tops[lane])
            for s in range(num_keys):
                x[s] = exp32((x[s] - top) * _f32(scale))
            for s in range(num_keys, num_keys + lanes):
                x[s] = _f32(0.0)
            whole = (num_keys + lanes - 1) // lanes * lanes
            tops[0] = _f32(1.0) / sum_of(row, whole, False, False)
            narrow_weights(items, row, whole // lanes)


@inlined
def store_run(
    run: Run, sums: int, shares: int, share_bytes: int, out: int, out_bytes: int, group: int, head_dim: int,
    is_half: bool,
) -> None:  # fmt: skip
    for i in range(run.length):
        for g in range(group):
            query = i * group + g
            share = floats_at(shares + query * share_bytes)[0]
            for d in range(head_dim):
                total = floats_at(sums)[query * head_dim + d]
                store(out + i * out_bytes, g * head_dim + d, total * share, is_half)


@inlined
def slot_at(side: KvSide, table: int, page: int, slot: int, step: Any, row_bytes: int) -> KvSide:
    number = np.int64(ints_at(table)[page])
    scales = side.scales + number * step[SCALE_PAGE_BYTES] + slot * SCALE_BYTES
    return KvSide(side.items + number * step[PAGE_BYTES] + slot * row_bytes, scales)


@inlined
def _locate(
    items_at: int, scales_at: int, side: KvSide, table: int, start: int, stop: int, step: Any, items: int,
    row_bytes: int, lanes: int,
) -> None:  # fmt: skip
    """Store the addresses of keys [start, start + lanes), and of their scales.

    Lanes at `stop` and beyond repeat the last address: their weight is 0."""
    page_size = step[PAGE_SIZE]
    page, slot = start // page_size, start % page_size
    at = slot_at(side, table, page, slot, step, row_bytes)
    for lane in range(lanes):
        if lane > 0 and start + lane < stop:
            slot += 1
            at = KvSide(at.items + row_bytes, at.scales + SCALE_BYTES)
            if slot == page_size:
                page, slot = page + 1, 0
                at = slot_at(side, table, page, 0, step, row_bytes)
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
def locate_seen(
    items_at: int, scales_at: int, side: KvSide, run: Run, start: int, step: Any, row_bytes: int, lanes: int
) -> None:
    """Store, for a draft tree's keys, the addresses of the slots that the token sees.

    Repeat the last address in the remaining lanes."""
    page_size = step[PAGE_SIZE]
    key, slot, at, seen = run.tree_start, run.tree_start, side, run.seen
    while seen != 0:
        if seen & 1:
            at = slot_at(side, run.table, slot // page_size, slot % page_size, step, row_bytes)
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
def _fetch(side: KvSide, table: int, start: int, stop: int, step: Any, items: int, row_bytes: int, lanes: int) -> None:
    """Prefetch scattered pages, which the hardware prefetcher does not find."""
    if start >= stop:
        return
    page_size = step[PAGE_SIZE]
    page, slot = start // page_size, start % page_size
    for _ in range(min(lanes, stop - start)):
        if slot == page_size:
            page, slot = page + 1, 0
        at = slot_at(side, table, page, slot, step, row_bytes)
        for line in range(0, row_bytes, CACHE_LINE):
            prefetch(at.items + line)
        if items >= FIRST_WITH_SCALES:
            prefetch(at.scales)
        slot += 1


@inlined
def fill(address: int, length: int, value: np.float32) -> None:
    for d in range(length):
        floats_at(address)[d] = value
