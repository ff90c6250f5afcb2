"""Computes attention over int8 pages with integer products: attention_numba.py's second task, for Items.INTEGERS.

Keys and values are repacked in blocks of 64 keys, as block_product.py packs weights, so its loops multiply them:

    scores:   rounded queries          x   tile (64 keys; inputs: head_dim numbers)
    values:   rounded weights          x   tiles (64 of the head's numbers; inputs: 64 keys)

A run (attend_numba.py) has length * group queries, which are the rows of both products. A weight is exp(score - top) *
(the value's scale). Queries are rounded to bytes, with a scale each, and so are each query's 64 weights of a block.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from shared.kernel.attention.attend_numba import MOST_RUN_TOKENS, MOST_SCRATCH, RunSizes, fill
from shared.kernel.attention.attend_weights import store_run
from shared.kernel.code.attention_words import (
    KEY_SCALES,
    KEYS,
    NUM_RUNS,
    OUT,
    PAGE_SIZE,
    QUERIES,
    RUN_TOKENS,
    SCORE_BYTES,
    SCRATCH,
    SCRATCH_BYTES,
    STEP,
    VALUE_SCALES,
    VALUES,
)
from shared.kernel.code.jit import (
    NUM_ROWS,
    NUM_SHARES,
    compile_exact_task,
    copied,
    floats_at,
    inlined,
    longs_at,
    prefetch,
    processor_features,
)
from shared.kernel.code.scratch import LINE_BYTES
from shared.kernel.product import amx
from shared.kernel.product.amx_code import add_registers
from shared.kernel.product.attend_places import KvSide, Run, locate_seen, run_at, side_at, slot_at
from shared.kernel.product.block_code import BlockForm
from shared.kernel.product.block_product import FEWEST_AMX_ROWS, multiply_rows
from shared.kernel.product.byte_rows import row_bytes_of
from shared.kernel.product.byte_tiles import BLOCK, largest_of, soften, tile_bytes, transpose_keys, transpose_values
from shared.kernel.product.dot import best_dot
from shared.kernel.product.product import COLUMNS

_f32 = np.float32
ROOM_BYTES = amx.CONFIG_BYTES + amx.DOTS_BYTES
VALUE_TILE = tile_bytes(BLOCK)


def score_row(num_keys: int) -> int:
    """Return the length of a query's row of float32 scores: whole blocks and a spare cache line, to spread the rows."""
    return -(-num_keys // BLOCK) * BLOCK + LINE_BYTES // 4


def tiles_bytes(head_dim: int) -> int:
    return max(tile_bytes(head_dim), head_dim // BLOCK * VALUE_TILE)


def fixed_bytes(row: int, head_dim: int) -> int:
    return ROOM_BYTES + tiles_bytes(head_dim) + 2 * 8 * BLOCK + 4 * row + 4 * BLOCK


def run_bytes(num_tokens: int, row: int, group: int, head_dim: int) -> int:
    """Return the size of a run's scratch. AMX reads whole registers of rows."""
    rows = -(-num_tokens * group // amx.ROWS) * amx.ROWS
    return fixed_bytes(row, head_dim) + 4 * rows * (head_dim + row)


def most_run_tokens(row: int, group: int, head_dim: int) -> int:
    """Return a run's largest length, a power of two."""
    per_token = 4 * group * (head_dim + row)
    fitting = min(MOST_RUN_TOKENS, max(1, (MOST_SCRATCH - fixed_bytes(row, head_dim)) // per_token))
    return 1 << fitting.bit_length() - 1


def run_sizes(num_keys: int, num_tokens: int, group: int, head_dim: int) -> RunSizes:
    """A run's length divides BLOCK, so that all its tokens read equally many blocks."""
    return _run_sizes(score_row(num_keys), 1 << (num_tokens - 1).bit_length(), group, head_dim)


@functools.lru_cache(maxsize=4096)
def _run_sizes(row: int, num_tokens: int, group: int, head_dim: int) -> RunSizes:
    tokens = min(most_run_tokens(row, group, head_dim), num_tokens)
    return RunSizes(tokens, 4 * row, run_bytes(tokens, row, group, head_dim))


def query_bytes(head_dim: int) -> int:
    return row_bytes_of(head_dim, head_dim)


class ByteRoom(NamedTuple):
    """Addresses in a thread's scratch. R: a run's largest length. G: queries per kv head. N: number of keys."""

    registers: int  # ROOM_BYTES
    tile: int  # what transpose_keys or transpose_values wrote
    items: int  # (BLOCK,) int64: addresses of a block's keys or values
    scales: int  # (BLOCK,) int64: addresses of the keys' scales
    zeros: int  # (BLOCK,) float32
    value_scales: int  # (N,) float32
    sums: int  # (R, G, D) float32: weighted values
    # (R, G, row) float32; then each block begins with its rounded weights. Behind the last block: 1 / (sum of exp)
    scores: int


@functools.cache
def make_attend(num_heads: int, num_kv_heads: int, head_dim: int, is_half: bool, scale: float) -> Any:
    group, out_bytes = num_heads // num_kv_heads, head_dim * (2 if is_half else 4)
    features = processor_features()
    dot, has_amx = best_dot(features), amx.has_amx(features)
    key_kind, value_kind = (BlockForm(8, inputs, dot).packed() for inputs in (head_dim, BLOCK))
    query_size, tiles_size = query_bytes(head_dim), tiles_bytes(head_dim)

    def attend(words: Any, share: int, worker: int) -> None:
        step = longs_at(words[STEP])
        memory = step[SCRATCH] + worker * step[SCRATCH_BYTES]
        room = _room_at(memory, tiles_size, step[SCORE_BYTES], step[RUN_TOKENS] * group * head_dim * 4)
        fill(room.zeros, BLOCK, _f32(0.0))
        if has_amx:
            amx.begin_registers(room.registers, amx.ROWS)
        for index in range(share, step[NUM_RUNS] * num_kv_heads, words[NUM_SHARES]):
            run, head = run_at(step, 0, 0, index // num_kv_heads, BLOCK), index % num_kv_heads
            keys = side_at(words[KEYS], words[KEY_SCALES], head, head_dim, False, step)
            values = side_at(words[VALUES], words[VALUE_SCALES], head, head_dim, False, step)
            queries = step[QUERIES] + (head * words[NUM_ROWS] + run.first) * group * query_size
            _score_run(key_kind, group, head_dim, query_size, has_amx, step, run, room, keys, values, queries)
            _soften_run(room, run, step[SCORE_BYTES], group, scale)
            _sum_run(value_kind, group, head_dim, has_amx, step, run, room, values)
            out = words[OUT] + (run.first * num_heads + head * group) * out_bytes
            shares = room.scores + step[SCORE_BYTES] - 4
            store_run(run, room.sums, shares, step[SCORE_BYTES], out, num_heads * out_bytes, group, head_dim, is_half)
        if has_amx:
            amx.end_registers()

    return compile_exact_task(attend)


@copied
def _score_run(
    kind: int, group: int, head_dim: int, query_size: int, has_amx: bool, step: Any, run: Run, room: ByteRoom,
    keys: KvSide, values: KvSide, queries: int,
) -> None:  # fmt: skip
    """Write scores, and copy values' scales."""
    stride, num_keys = step[SCORE_BYTES], run.num_keys + run.length - 1
    for start in range(0, num_keys, BLOCK):
        lanes = _locate(room, keys, run, start, num_keys, step)
        _fetch(room, lanes, values.items - keys.items, head_dim)
        _copy_scales(room, lanes, room.tile + BLOCK * head_dim, start, values.scales - keys.scales)
        transpose_keys(head_dim, room.items, lanes // COLUMNS, room.tile)
        _multiply(
            kind, head_dim, has_amx, queries, query_size, run.length * group, room.tile, room.zeros, 0,
            room.scores + start * 4, stride, room.registers,
        )  # fmt: skip


@copied
def _sum_run(
    kind: int, group: int, head_dim: int, has_amx: bool, step: Any, run: Run, room: ByteRoom, values: KvSide
) -> None:
    """Add up the weighted values. Their scales are in the weights."""
    stride, num_keys, num_rows = step[SCORE_BYTES], run.num_keys + run.length - 1, run.length * group
    row_bytes = head_dim * 4
    fill(room.sums, num_rows * head_dim, _f32(0.0))
    for tile in range(head_dim // BLOCK):
        fill(room.tile + tile * VALUE_TILE + BLOCK * BLOCK, BLOCK, _f32(1.0))
    for start in range(0, num_keys, BLOCK):
        lanes = _locate(room, values, run, start, num_keys, step)
        transpose_values(head_dim, room.items, lanes // 4, room.tile)
        for tile in range(head_dim // BLOCK):
            sums = room.sums + tile * BLOCK * 4
            _multiply(
                kind, BLOCK, has_amx, room.scores + start * 4, stride, num_rows, room.tile + tile * VALUE_TILE, sums,
                row_bytes, sums, row_bytes, room.registers,
            )  # fmt: skip


@inlined
def _room_at(memory: int, tiles_size: int, stride: int, sums_size: int) -> ByteRoom:
    tile = memory + ROOM_BYTES
    items = tile + tiles_size
    scales = items + BLOCK * 8
    zeros = scales + BLOCK * 8
    value_scales = zeros + BLOCK * 4
    sums = value_scales + stride
    scores = sums + sums_size
    return ByteRoom(memory, tile, items, scales, zeros, value_scales, sums, scores)


@copied
def _multiply(
    kind: int, block: int, has_amx: bool, x: int, row_bytes: int, num_rows: int, tile: int, before: int,
    before_bytes: int, out: int, out_bytes: int, registers: int,
) -> None:  # fmt: skip
    if has_amx and num_rows >= FEWEST_AMX_ROWS:
        for row in range(0, num_rows, amx.ROWS):
            count, rows = min(amx.ROWS, num_rows - row), x + row * row_bytes
            dots = registers + amx.CONFIG_BYTES
            amx.multiply_registers(block, rows, row_bytes, tile)
            amx.store_registers(dots)
            own, result = before + row * before_bytes, out + row * out_bytes
            add_registers(kind, rows, row_bytes, 0, 1, tile, dots, count, own, before_bytes, result, out_bytes)
    else:
        multiply_rows(kind, False, x, row_bytes, num_rows, tile, 1, before, before_bytes, out, out_bytes, 0)


@inlined
def _locate(room: ByteRoom, side: KvSide, run: Run, start: int, stop: int, step: Any) -> int:
    """Store the addresses of keys [start, stop), at most BLOCK, and of their scales. Return the number of lanes.

    Lanes at `stop` and beyond, up to a multiple of COLUMNS, repeat the last address."""
    page_size, count = step[PAGE_SIZE], min(BLOCK, stop - start)
    lanes, lane = (count + COLUMNS - 1) // COLUMNS * COLUMNS, 0
    page, slot = start // page_size, start % page_size
    items, scales = longs_at(room.items), longs_at(room.scales)
    while lane < count:
        at = slot_at(side, run.table, page, slot, step)
        together = min(count - lane, page_size - slot)
        for n in range(together):
            items[lane + n], scales[lane + n] = at.items + n * at.slot_bytes, at.scales + n * at.scale_bytes
        page, slot, lane = page + 1, 0, lane + together
    for lane in range(count, lanes):
        items[lane], scales[lane] = items[count - 1], scales[count - 1]
    if run.seen != 0 and start + BLOCK > run.tree_start:
        locate_seen(room.items, room.scales, side, run, start, step, BLOCK)
    return lanes


@inlined
def _copy_scales(room: ByteRoom, lanes: int, key_scales: int, start: int, to_values: int) -> None:
    for lane in range(lanes):
        at = longs_at(room.scales)[lane]
        floats_at(key_scales)[lane] = floats_at(at)[0]
        floats_at(room.value_scales)[start + lane] = floats_at(at + to_values)[0]


@inlined
def _fetch(room: ByteRoom, lanes: int, to_values: int, head_dim: int) -> None:
    for lane in range(lanes):
        for line in range(0, head_dim, LINE_BYTES):
            prefetch(longs_at(room.items)[lane] + to_values + line)


@copied
def _soften_run(room: ByteRoom, run: Run, stride: int, group: int, scale: float) -> None:
    """Turn each query's scores into rounded weights. Write 1 / (sum of exp(score - top)) behind them."""
    for i in range(run.length):
        num_keys = run.num_keys + i
        for query in range(i * group, (i + 1) * group):
            row = room.scores + query * stride
            top = largest_of(row, num_keys)
            total = soften(row, room.value_scales, num_keys, top, _f32(scale))
            floats_at(row + stride)[-1] = _f32(1.0) / total
