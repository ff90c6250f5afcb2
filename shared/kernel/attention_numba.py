"""Attention over paged KV on the CPU, without gathering: numba kernels behind the AttentionBackend interface.

A step runs in two passes: every token is rotated and its key and value written to the row's pages, then every token
attends on its own, one kv head and its group of queries at a time, page by page. A token's sums always run in the
same order, so its result depends neither on its batch mates, nor on how its prompt was cut, nor on the threads.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numba
import torch
from numba import prange

from shared.kernel.attention import AttentionInputs, AttentionShape
from shared.kernel.jit import exp32, floats_at, halves_at, inlined, ints_at, kernel, load, longs_at, prefetch, store

CACHE_LINE = 64
_f32 = np.float32
Kernel = Callable[..., None]


class NumbaAttention:
    """AttentionBackend for CPU tensors, float32 or bfloat16. Buffers grow to the largest step seen."""

    def __init__(
        self, shape: AttentionShape, dtype: torch.dtype, tables: tuple[torch.Tensor, torch.Tensor], threads: int
    ) -> None:
        self._shape, self._dtype, self._threads = shape, dtype, threads
        self._cos, self._sin = (table.contiguous() for table in tables)
        self._step = make_step(shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype == torch.bfloat16, threads > 1)
        self._queries = torch.empty(0)
        self._scores = torch.empty(0)
        self._out = torch.empty(0, 0, dtype=dtype)

    def begin(self, inputs: AttentionInputs, kv: torch.Tensor) -> None:
        shape, num_tokens = self._shape, len(inputs.positions)
        bounds = inputs.cu_q_lens.to(torch.int64)
        # Which page table row each token reads through.
        self._rows = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff(), output_size=num_tokens)
        self._positions = inputs.positions.contiguous()
        self._table = inputs.page_table.contiguous()
        self._kv = kv
        self._queries = _at_least(self._queries, num_tokens * shape.num_heads * shape.head_dim)
        group = shape.num_heads // shape.num_kv_heads
        # Per thread: scores of one group, its maxima, and the sums over values; whole cache lines.
        self._stride = -(-group * (inputs.max_seq_len + 1 + shape.head_dim) // 16) * 16
        self._scores = _at_least(self._scores, self._threads * self._stride)
        self._out = torch.empty(num_tokens, shape.num_heads * shape.head_dim, dtype=self._dtype)
        page_size = kv.shape[4]
        self._arguments = (
            num_tokens,
            self._threads,
            self._rows.data_ptr(),
            self._positions.data_ptr(),
            self._table.data_ptr(),
            self._table.shape[1],
            self._cos.data_ptr(),
            self._sin.data_ptr(),
            shape.eps,
            kv.data_ptr(),
            kv.stride(0),
            page_size,
            inputs.max_seq_len,
            self._queries.data_ptr(),
            self._scores.data_ptr(),
            self._stride,
            self._out.data_ptr(),
        )

    def attend(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        if not qkv.is_contiguous():
            qkv = qkv.contiguous()
        norms = (0, 0) if q_norm is None or k_norm is None else (q_norm.data_ptr(), k_norm.data_ptr())
        if self._threads > 1:
            numba.set_num_threads(min(self._threads, numba.config.NUMBA_NUM_THREADS))
        self._step(layer, qkv.data_ptr(), *norms, *self._arguments)
        return self._out


def _at_least(buffer: torch.Tensor, size: int) -> torch.Tensor:
    return buffer if len(buffer) >= size else torch.empty(size, dtype=torch.float32)


def make_step(num_heads: int, num_kv_heads: int, head_dim: int, is_half: bool, parallel: bool) -> Kernel:
    """One layer of one step, compiled for constant sizes so that the loops over a head unroll into vector registers."""

    def step(
        layer: int,
        qkv: int,
        q_norm: int,
        k_norm: int,
        num_tokens: int,
        num_threads: int,
        rows: int,
        positions: int,
        table: int,
        table_stride: int,
        cos: int,
        sin: int,
        eps: float,
        kv: int,
        page_stride: int,
        page_size: int,
        max_seq_len: int,
        queries: int,
        scores: int,
        scores_stride: int,
        out: int,
    ) -> None:
        block = page_size * head_dim  # one head's slots of one page
        item = 2 if is_half else 4
        keys = kv + layer * 2 * num_kv_heads * block * item
        values = keys + num_kv_heads * block * item
        for thread in prange(num_threads):
            for token in range(thread, num_tokens, num_threads):
                row, position = longs_at(rows)[token], longs_at(positions)[token]
                page = np.int64(ints_at(table + row * table_stride * 4)[position // page_size])
                slot = (page * page_stride + position % page_size * head_dim) * item
                turn = position * (head_dim // 2) * 4
                source = qkv + token * (num_heads + 2 * num_kv_heads) * head_dim * item
                for head in range(num_heads):
                    target = queries + (token * num_heads + head) * head_dim * 4
                    _rotate(source, cos + turn, sin + turn, q_norm, eps, target, head_dim, is_half, False)
                    source += head_dim * item
                for head in range(num_kv_heads):
                    target = keys + slot + head * block * item
                    _rotate(source, cos + turn, sin + turn, k_norm, eps, target, head_dim, is_half, is_half)
                    source += head_dim * item
                for head in range(num_kv_heads):
                    _copy(source, values + slot + head * block * item, head_dim, is_half)
                    source += head_dim * item
        group = num_heads // num_kv_heads
        for thread in prange(num_threads):
            for item_index in range(thread, num_tokens * num_kv_heads, num_threads):
                head, token = item_index // num_tokens, item_index % num_tokens
                first = token * num_heads + head * group
                _attend(
                    queries + first * head_dim * 4,
                    keys + head * block * item,
                    values + head * block * item,
                    table + longs_at(rows)[token] * table_stride * 4,
                    longs_at(positions)[token] + 1,
                    page_stride,
                    page_size,
                    scores + thread * scores_stride * 4,
                    max_seq_len,
                    out + first * head_dim * item,
                    group,
                    head_dim,
                    is_half,
                )

    return kernel(parallel=parallel)(step)


@inlined
def _rotate(
    source: int, cos: int, sin: int, norm: int, eps: float, out: int, head_dim: int, is_half: bool, out_half: bool
) -> None:
    """One head: RMS norm if there is a weight, then each (x[d], x[d + D/2]) turned by its angle; computed in float32."""
    half = head_dim // 2
    scale = _f32(1.0)
    if norm != 0:
        total = _f32(0.0)
        for d in range(head_dim):
            x = load(source, d, is_half)
            total += x * x
        scale = _f32(1.0) / np.sqrt(total / _f32(head_dim) + _f32(eps))
    for d in range(half):
        left, right = load(source, d, is_half), load(source, d + half, is_half)
        if norm != 0:
            left *= scale * floats_at(norm)[d]
            right *= scale * floats_at(norm)[d + half]
        c, s = floats_at(cos)[d], floats_at(sin)[d]
        store(out, d, left * c - right * s, out_half)
        store(out, d + half, right * c + left * s, out_half)


@inlined
def _copy(source: int, target: int, length: int, is_half: bool) -> None:
    for d in range(length):
        if is_half:
            halves_at(target)[d] = halves_at(source)[d]
        else:
            floats_at(target)[d] = floats_at(source)[d]


@inlined
def _attend(
    queries: int,
    keys: int,
    values: int,
    table: int,
    num_keys: int,
    page_stride: int,
    page_size: int,
    scratch: int,
    max_keys: int,
    out: int,
    group: int,
    head_dim: int,
    is_half: bool,
) -> None:
    """One token, one kv head: softmax(q k / sqrt(D)) v for its group of queries."""
    item = 2 if is_half else 4
    scores, tops = floats_at(scratch), floats_at(scratch + group * max_keys * 4)
    sums = floats_at(scratch + (group * max_keys + group) * 4)
    num_pages = (num_keys + page_size - 1) // page_size
    for g in range(group):
        tops[g] = _f32(-np.inf)
    for page in range(num_pages):
        at = keys + np.int64(ints_at(table)[page]) * page_stride * item
        # The next page lies anywhere, where the processor would not look by itself.
        ahead = keys + np.int64(ints_at(table)[page + 1]) * page_stride * item if page + 1 < num_pages else at
        first = page * page_size
        for slot in range(min(page_size, num_keys - first)):
            _fetch(ahead + slot * head_dim * item, head_dim * item)
            _score(queries, at + slot * head_dim * item, scores, tops, first + slot, max_keys, group, head_dim, is_half)
    scale = _f32(1.0) / np.sqrt(_f32(head_dim))
    for g in range(group):
        total, top = _f32(0.0), tops[g]
        for s in range(num_keys):
            weight = exp32((scores[g * max_keys + s] - top) * scale)
            scores[g * max_keys + s] = weight
            total += weight
        tops[g] = _f32(1.0) / total
    for d in range(group * head_dim):
        sums[d] = _f32(0.0)
    for page in range(num_pages):
        at = values + np.int64(ints_at(table)[page]) * page_stride * item
        ahead = values + np.int64(ints_at(table)[page + 1]) * page_stride * item if page + 1 < num_pages else at
        first = page * page_size
        last = min(page_size, num_keys - first) - 1
        for slot in range(0, last + 1, 4):
            _fetch(ahead + slot * head_dim * item, 4 * head_dim * item)
            _weigh(at, scores, sums, first, slot, last, max_keys, group, head_dim, is_half)
    for g in range(group):
        for d in range(head_dim):
            store(out, g * head_dim + d, sums[g * head_dim + d] * tops[g], is_half)


@inlined
def _score(
    queries: int,
    key: int,
    scores: int,
    tops: int,
    at: int,
    max_keys: int,
    group: int,
    head_dim: int,
    is_half: bool,
) -> None:
    """Four queries share each load of the key; behind the group's end the last one is repeated, which folds away."""
    q = floats_at(queries)
    for g in range(0, group, 4):
        g1, g2, g3 = min(g + 1, group - 1), min(g + 2, group - 1), min(g + 3, group - 1)
        s0, s1, s2, s3 = _f32(0.0), _f32(0.0), _f32(0.0), _f32(0.0)
        for d in range(head_dim):
            x = load(key, d, is_half)
            s0 += q[g * head_dim + d] * x
            s1 += q[g1 * head_dim + d] * x
            s2 += q[g2 * head_dim + d] * x
            s3 += q[g3 * head_dim + d] * x
        scores[g * max_keys + at] = s0
        scores[g1 * max_keys + at] = s1
        scores[g2 * max_keys + at] = s2
        scores[g3 * max_keys + at] = s3
        tops[g], tops[g1] = max(tops[g], s0), max(tops[g1], s1)
        tops[g2], tops[g3] = max(tops[g2], s2), max(tops[g3], s3)


@inlined
def _weigh(
    values: int,
    scores: int,
    sums: int,
    first: int,
    slot: int,
    last: int,
    max_keys: int,
    group: int,
    head_dim: int,
    is_half: bool,
) -> None:
    """Adds four slots at once, a quarter of the loads and stores of the sums; those behind the last weigh nothing."""
    a0, a1 = slot * head_dim, min(slot + 1, last) * head_dim
    a2, a3 = min(slot + 2, last) * head_dim, min(slot + 3, last) * head_dim
    for g in range(group):
        at = g * max_keys + first + slot
        w0 = scores[at]
        w1 = scores[at + 1] if slot + 1 <= last else _f32(0.0)
        w2 = scores[at + 2] if slot + 2 <= last else _f32(0.0)
        w3 = scores[at + 3] if slot + 3 <= last else _f32(0.0)
        for d in range(head_dim):
            near = w0 * load(values, a0 + d, is_half) + w1 * load(values, a1 + d, is_half)
            far = w2 * load(values, a2 + d, is_half) + w3 * load(values, a3 + d, is_half)
            sums[g * head_dim + d] += near + far


@inlined
def _fetch(address: int, num_bytes: int) -> None:
    for line in range(0, num_bytes, CACHE_LINE):
        prefetch(address + line)
