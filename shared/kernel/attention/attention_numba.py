"""Attention over paged KV on the CPU, without gathering: an AttentionBackend of numba kernels."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from shared.kernel.attention import attend_bytes, attend_numba
from shared.kernel.attention.attend_numba import AttendForm
from shared.kernel.attention.attention import HADAMARD, AttentionInputs, AttentionShape, RopeTables
from shared.kernel.attention.attention_step import AttentionStep, page_items
from shared.kernel.code.attention_words import (
    COS,
    K_NORM,
    KEY_SCALES,
    KEYS,
    NUM_WORDS,
    OUT,
    PAGE_BYTES,
    PAGE_SIZE,
    POSITIONS,
    Q_NORM,
    QKV,
    QUERIES,
    ROWS,
    SCALE_PAGE_BYTES,
    SCRATCH,
    SCRATCH_BYTES,
    SIN,
    SLOTS,
    STEP,
    TABLE,
    TABLE_STRIDE,
    VALUE_SCALES,
    VALUES,
)
from shared.kernel.code.items import Items
from shared.kernel.code.jit import (
    NUM_ROWS,
    NUM_SHARES,
    compile_exact_task,
    compile_task,
    copied,
    floats_at,
    halves_at,
    inlined,
    ints_at,
    load,
    longs_at,
    rows_of,
    store,
)
from shared.kernel.code.sums import sum_of
from shared.kernel.product.byte_rows import BYTES_ONLY, round_block
from shared.kernel.product.byte_tiles import ZERO
from shared.kernel.product.simd import narrow_row, split_pairs
from shared.kernel.product.vectors import are_paired, block_lanes, number_bytes_of
from shared.kernel.team.program import Program
from shared.kernel.team.team import Team

_f32 = np.float32


def supports(shape: AttentionShape) -> bool:
    return block_lanes(shape.head_dim) > 0


class NumbaAttention:
    """AttentionBackend for CPU tensors, float32 or bfloat16; pages may hold bytes."""

    gathers = False

    def __init__(
        self,
        shape: AttentionShape,
        dtype: torch.dtype,
        tables: RopeTables,
        team: Team,
        local_tables: RopeTables | None = None,
        page_dtype: torch.dtype | None = None,
    ) -> None:
        self._shape, self._dtype, self._page_dtype = shape, dtype, page_dtype or dtype
        self._step = AttentionStep(shape, tables, team.size, local_tables)
        self._tasks = np.arange(2)
        self._program = Program(team, make_tasks(shape, dtype, page_dtype), np.zeros((2, NUM_WORDS), np.int64))

    def begin(self, inputs: AttentionInputs, kv: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        if kv.dtype != self._page_dtype:
            raise TypeError(f"pages of {kv.dtype}; these kernels are for {self._page_dtype}")
        self._step.begin(inputs, kv, scales)
        shape = (len(inputs.positions), self._shape.num_heads * self._shape.head_dim)
        self._out = torch.empty(shape, dtype=self._dtype)

    def attend(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        qkv, words = qkv.contiguous(), self._program.words
        self._step.fill(words, self._tasks, np.full(2, layer))
        words[:, NUM_ROWS], words[:, QKV], words[:, OUT] = len(qkv), qkv.data_ptr(), self._out.data_ptr()
        words[1, NUM_SHARES] = self._step.num_shares
        words[:, Q_NORM] = 0 if q_norm is None else q_norm.data_ptr()
        words[:, K_NORM] = 0 if k_norm is None else k_norm.data_ptr()
        self._program.run()
        return self._out


def make_tasks(shape: AttentionShape, dtype: torch.dtype, page_dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """Return a layer's write task and attend task."""
    items = page_items(shape, page_dtype or dtype)
    sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype == torch.bfloat16)
    write = make_write(*sizes, items, shape.eps)
    if items == Items.INTEGERS:
        return write, attend_bytes.make_attend(*sizes, shape.score_scale)
    group = shape.num_heads // shape.num_kv_heads
    form = AttendForm(group, shape.head_dim, shape.head_dim, dtype == torch.bfloat16, items)
    return write, attend_numba.make_attend(form, shape.num_kv_heads, shape.score_scale)


@functools.cache
def make_write(num_heads: int, num_kv_heads: int, head_dim: int, is_half: bool, items: Items, eps: float) -> Any:
    """Compile the task that rotates q into scratch (float32 or pairs) and k into pages, and copies v into pages."""
    if items.has_scales:
        return _make_write_bytes(num_heads, num_kv_heads, head_dim, is_half, items, eps)
    head_bytes, in_pairs = head_dim * items.num_bytes, are_paired(items)
    is_split = items == Items.PAIRS and not in_pairs
    query_bytes = head_dim * number_bytes_of(items)

    def write(words: Any, share: int, worker: int) -> None:
        step = longs_at(words[STEP])
        block = step[PAGE_SIZE] * head_bytes  # bytes of one head's slots in a page
        first, end = rows_of(words, share)
        for token in range(first, end):
            page, slot = place_of(step, token)
            at = page * step[PAGE_BYTES] + slot * head_bytes
            cos, sin = _rope(words, step, token, head_dim)
            source = words[QKV] + token * (num_heads + 2 * num_kv_heads) * head_bytes
            for head in range(num_heads):
                target = step[QUERIES] + (token * num_heads + head) * query_bytes
                if is_split:
                    pairs = step[SCRATCH] + worker * step[SCRATCH_BYTES]
                    _rotate(source, cos, sin, words[Q_NORM], eps, pairs, head_dim, is_half, True)
                    split_pairs(head_dim, pairs, target)
                else:
                    _rotate(source, cos, sin, words[Q_NORM], eps, target, head_dim, is_half, in_pairs)
                source += head_bytes
            for head in range(num_kv_heads):
                target = words[KEYS] + at + head * block
                _rotate(source, cos, sin, words[K_NORM], eps, target, head_dim, is_half, is_half)
                source += head_bytes
            for head in range(num_kv_heads):
                copy_row(source, words[VALUES] + at + head * block, head_dim, is_half)
                source += head_bytes

    return compile_task(write)


def _make_write_bytes(num_heads: int, num_kv_heads: int, head_dim: int, is_half: bool, items: Items, eps: float) -> Any:
    head_bytes = head_dim * (2 if is_half else 4)
    source_items, byte_items = int(Items.HALVES if is_half else Items.FLOATS), int(items)
    is_integer, group = items == Items.INTEGERS, num_heads // num_kv_heads
    size, zero = HADAMARD if is_integer else 1, ZERO
    query_bytes = attend_bytes.query_bytes(head_dim) if is_integer else head_dim * 4

    def write_bytes(words: Any, share: int, worker: int) -> None:
        step = longs_at(words[STEP])
        page_size = step[PAGE_SIZE]
        key = step[SCRATCH] + worker * step[SCRATCH_BYTES]
        first, end = rows_of(words, share)
        for token in range(first, end):
            page, slot = place_of(step, token)
            at, scale_at = page * step[PAGE_BYTES], page * step[SCALE_PAGE_BYTES]
            cos, sin = _rope(words, step, token, head_dim)
            source = words[QKV] + token * (num_heads + 2 * num_kv_heads) * head_bytes
            for head in range(num_heads):
                if is_integer:
                    nth = (head // group * words[NUM_ROWS] + token) * group + head % group
                    target = step[QUERIES] + nth * query_bytes
                    start, unit, total = target + head_dim, target + head_dim + 4, target + head_dim + 8
                    _rotate(source, cos, sin, words[Q_NORM], eps, key, head_dim, is_half, False)
                    round_block(head_dim, size, zero, False, BYTES_ONLY, key, target, 0, start, unit, total)
                else:
                    target = step[QUERIES] + (token * num_heads + head) * query_bytes
                    _rotate(source, cos, sin, words[Q_NORM], eps, target, head_dim, is_half, False)
                source += head_bytes
            for head in range(num_kv_heads):
                _rotate(source, cos, sin, words[K_NORM], eps, key, head_dim, is_half, is_half)
                row = head * page_size + slot
                target, scale = words[KEYS] + at + row * head_dim, words[KEY_SCALES] + scale_at + row * 4
                narrow_row(head_dim, source_items, byte_items, size, key, target, scale)
                source += head_bytes
            for head in range(num_kv_heads):
                row = head * page_size + slot
                target, scale = words[VALUES] + at + row * head_dim, words[VALUE_SCALES] + scale_at + row * 4
                narrow_row(head_dim, source_items, byte_items, 1, source, target, scale)
                source += head_bytes

    return compile_exact_task(write_bytes)


@inlined
def place_of(step: Any, token: int) -> tuple[int, int]:
    place = longs_at(step[SLOTS])[token]
    table = step[TABLE] + longs_at(step[ROWS])[token] * step[TABLE_STRIDE] * 4
    return ints_at(table)[place // step[PAGE_SIZE]], place % step[PAGE_SIZE]


@inlined
def _rope(words: Any, step: Any, token: int, head_dim: int) -> tuple[int, int]:
    offset = longs_at(step[POSITIONS])[token] * head_dim * 2
    return words[COS] + offset, words[SIN] + offset


@copied
def _rotate(
    source: int, cos: int, sin: int, norm: int, eps: float, out: int, head_dim: int, is_half: bool, out_half: bool
) -> None:
    """Rotate each pair (x[d], x[d + D/2]) by its angle, in float32, after a norm if `norm` is not 0."""
    half = head_dim // 2
    scale = _norm_scale(source, head_dim, eps, is_half) if norm != 0 else _f32(1.0)
    for d in range(half):
        left, right = load(source, d, is_half), load(source, d + half, is_half)
        if norm != 0:
            left *= scale * floats_at(norm)[d]
            right *= scale * floats_at(norm)[d + half]
        c, s = floats_at(cos)[d], floats_at(sin)[d]
        store(out, d, left * c - right * s, out_half)
        store(out, d + half, right * c + left * s, out_half)


@copied
def _norm_scale(source: int, head_dim: int, eps: float, is_half: bool) -> np.float32:
    total = sum_of(source, head_dim, is_half, True)
    scale: np.float32 = _f32(1.0) / np.sqrt(total / _f32(head_dim) + _f32(eps))
    return scale


@inlined
def copy_row(source: int, target: int, length: int, is_half: bool) -> None:
    for d in range(length):
        if is_half:
            halves_at(target)[d] = halves_at(source)[d]
        else:
            floats_at(target)[d] = floats_at(source)[d]
