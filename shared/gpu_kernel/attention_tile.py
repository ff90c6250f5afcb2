"""The inner loop of both attention kernels: a tile of queries attends to a range of their row's keys.

A tile has BLOCK_M lines. Line i is head i % GROUP of query i // GROUP. The GROUP heads share keys and values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shared.gpu_kernel.places import ones_of
from shared.gpu_kernel.stored_bytes import unit_of, widened

LOG2_E = tl.constexpr(1.4426950408889634)  # the kernels compute softmax weights with exp2


@triton.jit
def readable(keys, slot, base, num_read, bits, window, TREES: tl.constexpr, SLIDING: tl.constexpr):
    """Return a mask, (M, N) bool: whether line m reads key n. See places.py for slot, base and num_read.

    `window` works as in outside_window of shared/kernel/attention/attention.py."""
    read = keys[None, :] <= slot[:, None]
    if SLIDING and not TREES:
        read = read & (keys[None, :] > slot[:, None] - window)
    if TREES:
        place = keys[None, :] - base[:, None]
        # shift the key's bit to bit 0
        above = bits[:, None] >> tl.minimum(tl.maximum(place, 0), 62).to(tl.int64)
        read = read & ((place < 0) | ((above & 1) == 1))
        if SLIDING:
            after = tl.where(place < 0, num_read[:, None] - keys[None, :], ones_of(tl.maximum(above, 0)))
            read = read & (after <= window)
    return read


@triton.jit
def capped(scores, softcap):
    """Return softcap * tanh(scores). Near 0 a series, because 1 - exp(-2x) has few digits there."""
    size = tl.abs(scores)
    small = tl.exp2(size * (-2 * LOG2_E))
    far = (1 - small) / (1 + small)
    square = scores * scores
    near = size * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    return softcap * tl.where(size < 0.1, near, far) * tl.where(scores < 0, -1.0, 1.0)


@triton.jit
def sink_weight(sinks, head, is_there, largest):
    """Return the weight of each line's sink, a score without a value, beside weights of which the largest is 1."""
    return tl.exp2(tl.load(sinks + head, is_there, other=0.0).to(tl.float32) * LOG2_E - largest)


@triton.jit
def attend_keys(
    q, kv, scales, table, kv_head, num_kv_heads, page_stride, scale_stride, first, stop,
    slot, base, num_read, bits, window, factor, softcap,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BY_TOKEN: tl.constexpr, KIND: tl.constexpr, TREES: tl.constexpr,
    SLIDING: tl.constexpr, CAPPED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute attention of q's lines (M, D) over keys [first, stop) of the row with page table `table`.

    Return float32 per line: the largest score (M,), the sum of the weights (M,), and the weighted sum of the values (M,
    D). Slots at `stop` and beyond are never loaded: they may hold NaN, and 0 * NaN is NaN. BY_TOKEN: see Layer."""
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dim = tl.arange(0, BLOCK_D)
    is_dim = dim < HEAD_DIM
    # A page's lines of HEAD_DIM numbers: how many lie between slots, between heads, and between a key and its value.
    between_slots = 2 * num_kv_heads if BY_TOKEN else 1
    between_heads = 1 if BY_TOKEN else PAGE_SIZE
    to_value = num_kv_heads if BY_TOKEN else num_kv_heads * PAGE_SIZE
    for start in range(first, stop, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        is_key = keys < stop
        page = tl.load(table + keys // PAGE_SIZE, is_key, other=0).to(tl.int64)
        line = kv_head * between_heads + keys % PAGE_SIZE * between_slots
        k_at = kv + (page * page_stride + line * HEAD_DIM)[:, None] + dim[None, :]
        there = is_key[:, None] & is_dim[None, :]
        k = widened(tl.load(k_at, there, other=0), q.dtype, KIND)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
        if KIND != 0:
            scale_at = scales + page * scale_stride + line
            scores = scores * unit_of(tl.load(scale_at, is_key, other=0.0), KIND)[None, :]
        if CAPPED:
            scores = capped(scores, softcap)
        read = readable(keys, slot, base, num_read, bits, window, TREES, SLIDING) & is_key[None, :]
        scores = tl.where(read, scores, float("-inf"))
        above = tl.maximum(largest, tl.max(scores, axis=1))
        known = tl.where(above == float("-inf"), 0.0, above)  # -inf - -inf would be NaN
        weights = tl.exp2(scores - known[:, None])
        shrunk = tl.exp2(largest - known)
        total = total * shrunk + tl.sum(weights, axis=1)
        if KIND != 0:
            scale = tl.load(scale_at + to_value, is_key, other=0.0)
            weights = weights * unit_of(scale, KIND)[None, :]
        v = widened(tl.load(k_at + to_value * HEAD_DIM, there, other=0), q.dtype, KIND)
        values = tl.dot(weights.to(q.dtype), v, values * shrunk[:, None], input_precision="ieee")
        largest = above
    return largest, total, values
