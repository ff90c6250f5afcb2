"""Computes softmax(scale q k) v over paged KV: attention_numba.py's second task.

Neighbouring tokens of a row form a run. If all tokens of a run read a block, the block is loaded once:

    token 0 of the run    | early | shared, in whole blocks | its own |
    token 1                 |early| shared                  | its own   |
    last token                    | shared                  | its own     |

Keys are "early" only with a sliding window or unread keys. In a draft tree or a decode row, each token forms a run,
whose keys are all "its own".
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from shared.kernel.attention.attend_weights import RunRoom, room_at, soften_more, soften_run, store_run
from shared.kernel.code.attention_words import (
    KEY_SCALES,
    KEYS,
    NUM_KV_HEADS,
    NUM_RUNS,
    NUM_UNREAD,
    OUT,
    QUERIES,
    RUN_TOKENS,
    SCALE,
    SCORE_BYTES,
    SCRATCH,
    SCRATCH_BYTES,
    SINKS,
    SOFTCAP,
    STEP,
    VALUE_SCALES,
    VALUES,
    WINDOW,
)
from shared.kernel.code.items import Items
from shared.kernel.code.jit import NUM_SHARES, compile_task, copied, float_of, floats_at, inlined, longs_at
from shared.kernel.product.attend_places import KvSide, Run, fetch, locate, locate_seen, oldest_of, run_at, side_at
from shared.kernel.product.simd import copy_block, score_block, score_transposed, sum_block, transpose_block
from shared.kernel.product.vectors import block_lanes, number_bytes_of

FETCH_AHEAD = 64  # keys
MOST_RUN_TOKENS = 16
MOST_SCRATCH = 1 << 19  # limit of a run's scratch in bytes, to fit a core's own cache
_f32, _u32 = np.float32, np.uint32


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


class AttendForm(NamedTuple):
    """What the code of an attend task depends on. Keys and values have equally many lanes (block_lanes)."""

    group: int  # queries per kv head
    key_size: int
    value_size: int
    is_half: bool  # whether results are bfloat16
    items: Items
    is_capped: bool = False  # scores become softcap * tanh(score / softcap)
    has_sinks: bool = False  # each query head has a score without a value


@functools.cache
def make_attend(form: AttendForm, num_kv_heads: int = 0, scale: float = 0.0) -> Any:
    """Compile the task. Pages before the window are never read: they may have been reused.

    `num_kv_heads` is 0 if pages hold one token after another (attend_places.side_at). The task's words then have this
    number, the factor of scores, unread keys, and what the form has of softcap and sinks (heads,) float32.
    """
    group, key_size, value_size, is_half, _, is_capped, has_sinks = form
    lanes, items, size = block_lanes(key_size), int(form.items), max(key_size, value_size)
    key_bytes, value_bytes = (own * form.items.num_bytes for own in (key_size, value_size))
    number_bytes, out_bytes = number_bytes_of(form.items), value_size * (2 if is_half else 4)
    group_bytes, by_token = group * key_size * number_bytes, num_kv_heads == 0

    def attend(words: Any, share: int, worker: int) -> None:
        step = longs_at(words[STEP])
        stride = step[SCORE_BYTES]
        room = room_at(step[SCRATCH] + worker * step[SCRATCH_BYTES], step[RUN_TOKENS], group, size, lanes)
        heads = words[NUM_KV_HEADS] if by_token else num_kv_heads
        factor = float_of(_u32(words[SCALE])) if by_token else _f32(scale)
        num_unread = words[NUM_UNREAD] if by_token else 0
        token_bytes = heads * group_bytes
        for index in range(share, step[NUM_RUNS] * heads, words[NUM_SHARES]):
            run, head = run_at(step, words[WINDOW], num_unread, index // heads, lanes), index % heads
            keys = side_at(words[KEYS], words[KEY_SCALES], head, key_bytes, by_token, step)
            values = side_at(words[VALUES], words[VALUE_SCALES], head, value_bytes, by_token, step)
            queries = step[QUERIES] + run.first * token_bytes + head * group_bytes
            fill(room.tops, run.length * group * lanes, _f32(-np.inf))
            _score_own(
                group, key_size, items, lanes, key_bytes, value_bytes, step, run, room, keys, values, queries,
                token_bytes,
            )  # fmt: skip
            for start in range(run.shared, run.end, lanes):
                fetch(keys, run.table, start + lanes, run.end, step, items, key_bytes, lanes)
                locate(room.items, room.scales, keys, run.table, start, run.end, step, items, lanes)
                transpose_block(key_size, items, room.items, room.scales, room.block)
                for i in range(run.length):
                    oldest = oldest_of(run.num_keys + i, run.window, run.num_unread)
                    found = room.scores + i * group * stride + (start - oldest) * 4
                    tops = room.tops + i * group * lanes * 4
                    score_transposed(group, key_size, items, queries + i * token_bytes, room.block, found, stride, tops)
            if is_capped or has_sinks:
                softcap, sinks = float_of(_u32(words[SOFTCAP])), words[SINKS] + head * group * 4
                soften_more(items, room, run, stride, group, lanes, factor, softcap, sinks, is_capped, has_sinks)
            else:
                soften_run(items, room, run, stride, group, lanes, factor)
            fill(room.sums, run.length * group * value_size, _f32(0.0))
            _sum_own(group, value_size, items, number_bytes, lanes, step, run, room, values, True)
            for start in range(run.shared, run.end, lanes):
                fetch(values, run.table, start + lanes, run.end, step, items, value_bytes, lanes)
                locate(room.items, room.scales, values, run.table, start, run.end, step, items, lanes)
                copy_block(value_size, items, room.items, room.scales, room.block)
                for i in range(run.length):
                    oldest = oldest_of(run.num_keys + i, run.window, run.num_unread)
                    weights = room.scores + i * group * stride + (start - oldest) * number_bytes
                    sums = room.sums + i * group * value_size * 4
                    sum_block(group, value_size, items, True, weights, stride, room.block, 0, sums)
            _sum_own(group, value_size, items, number_bytes, lanes, step, run, room, values, False)
            out, row = words[OUT] + (run.first * heads + head) * group * out_bytes, heads * group * out_bytes
            store_run(run, room.sums, room.tops, lanes * 4, out, row, group, value_size, is_half)

    return compile_task(attend)


@copied
def _score_own(
    group: int, key_size: int, items: int, lanes: int, key_bytes: int, value_bytes: int, step: Any, run: Run,
    room: RunRoom, keys: KvSide, values: KvSide, queries: int, token_bytes: int,
) -> None:  # fmt: skip
    """Score the keys outside the shared blocks. A partial block's spare lanes are overwritten later."""
    if run.length == 1:
        for start in range(run.shared, run.shared + FETCH_AHEAD, lanes):
            fetch(keys, run.table, start, run.num_keys, step, items, key_bytes, lanes)
    for i in range(run.length):
        num_keys = run.num_keys + i
        oldest, early = oldest_of(num_keys, run.window, run.num_unread), min(run.shared, num_keys)
        rows, tops = room.scores + i * group * step[SCORE_BYTES], room.tops + i * group * lanes * 4
        start = oldest if oldest < early else run.end
        while start < num_keys:
            if run.length == 1:
                fetch(keys, run.table, start + FETCH_AHEAD, num_keys, step, items, key_bytes, lanes)
                fetch(values, run.table, start, num_keys, step, items, value_bytes, lanes)
            stop = early if start < early else num_keys
            locate(room.items, room.scales, keys, run.table, start, stop, step, items, lanes)
            if run.seen != 0 and start + lanes > run.tree_start:
                locate_seen(room.items, room.scales, keys, run, start, step, lanes)
            found = rows + (start - oldest) * 4
            asked = queries + i * token_bytes
            score_block(group, key_size, items, asked, room.items, room.scales, found, step[SCORE_BYTES], tops)
            start = run.end if start < early <= start + lanes else start + lanes


@copied
def _sum_own(
    group: int, value_size: int, items: int, number_bytes: int, lanes: int, step: Any, run: Run, room: RunRoom,
    values: KvSide, is_early: bool,
) -> None:  # fmt: skip
    """Add weighted values in the keys' order: before the shared blocks (`is_early`), or after them."""
    stride = step[SCORE_BYTES]
    for i in range(run.length):
        num_keys = run.num_keys + i
        oldest = oldest_of(num_keys, run.window, run.num_unread)
        first, stop = (oldest, min(run.shared, num_keys)) if is_early else (run.end, num_keys)
        for start in range(first, stop, lanes):
            locate(room.items, room.scales, values, run.table, start, stop, step, items, lanes)
            if run.seen != 0 and start + lanes > run.tree_start:
                locate_seen(room.items, room.scales, values, run, start, step, lanes)
            weights, row = room.scores + i * group * stride + (start - oldest) * number_bytes, stride
            if is_early:  # copy them: the row continues with other keys' weights
                _copy_edge(weights, stride, room.edge, stop - start, group, lanes)
                weights, row = room.edge, lanes * 4
            sums = room.sums + i * group * value_size * 4
            sum_block(group, value_size, items, False, weights, row, room.items, room.scales, sums)


@inlined
def _copy_edge(weights: int, stride: int, edge: int, count: int, group: int, lanes: int) -> None:
    for g in range(group):
        for lane in range(lanes):
            weight = floats_at(weights + g * stride)[lane] if lane < count else _f32(0.0)
            floats_at(edge)[g * lanes + lane] = weight


@inlined
def fill(address: int, length: int, value: np.float32) -> None:
    for d in range(length):
        floats_at(address)[d] = value
