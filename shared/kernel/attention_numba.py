"""Attention over paged KV on the CPU, without gathering: numba kernels behind the AttentionBackend interface.

A step runs in two passes: every token is rotated and its key and value written to the row's pages, then every token
attends on its own, one kv head and its group of queries at a time, block of keys by block. A token's sums always run
in the same order, so its result depends neither on its batch mates, nor on how its prompt was cut, nor on the size of
pages, nor on the threads; nor on the siblings in a window of alternatives, whose keys are left out before the blocks
are formed.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shared.kernel.attention import AttentionInputs, AttentionShape, RopeTables
from shared.kernel.jit import (
    NUM_ROWS,
    NUM_SHARES,
    compile_task,
    exp32,
    floats_at,
    halves_at,
    inlined,
    ints_at,
    load,
    longs_at,
    prefetch,
    store,
)
from shared.kernel.program import Program
from shared.kernel.simd import block_lanes, score_block, weigh_block
from shared.kernel.team import Team

CACHE_LINE = 64
SHORT_ROW = 4  # queries
FETCH_AHEAD = 64  # keys
_f32 = np.float32

# The words of a task's arguments; NUM_ROWS counts tokens.
STEP, QKV, Q_NORM, K_NORM, KEYS, VALUES, OUT, COS, SIN, WINDOW = range(2, 12)
NUM_WORDS = 12
# The words that all layers of a step share, at the address STEP.
ROWS, POSITIONS, TABLE, TABLE_STRIDE, PAGE_BYTES, PAGE_SIZE = range(6)
QUERIES, SCRATCH, SCRATCH_BYTES, SCORE_BYTES, ROW_MAJOR, SLOTS, VISIBLE = range(6, 13)
NUM_STEP_WORDS = 13


def supports(shape: AttentionShape) -> bool:
    return block_lanes(shape.head_dim) > 0


class AttentionStep:
    """What all layers of one step share, as addresses. Buffers grow to the largest step seen, and belong to it."""

    def __init__(
        self, shape: AttentionShape, tables: RopeTables, num_shares: int, local_tables: RopeTables | None = None
    ) -> None:
        """`local_tables` are of the layers with a window, where theirs are others."""
        self._shape, self._num_shares = shape, num_shares
        self._tables = [table.contiguous() for pair in (tables, local_tables or tables) for table in pair]
        self._windows = np.array(shape.windows, np.int64)
        self.words = np.zeros(NUM_STEP_WORDS, np.int64)
        self._queries, self._scratch = torch.empty(0), torch.empty(0)

    def begin(self, inputs: AttentionInputs, kv: torch.Tensor) -> None:
        """Holds on to the inputs until the next step."""
        shape, num_tokens = self._shape, len(inputs.positions)
        bounds = inputs.cu_q_lens.to(torch.int64)
        # Which page table row each token reads through.
        self._rows = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff(), output_size=num_tokens)
        self._positions, self._slots = inputs.positions.contiguous(), inputs.key_slots.contiguous()
        self._visible = None if inputs.visible is None else inputs.visible.contiguous()
        self._table = inputs.page_table.contiguous()
        self._kv = kv
        self._check(inputs)
        self._queries = _at_least(self._queries, num_tokens * shape.num_heads * shape.head_dim)
        group, lanes = shape.num_heads // shape.num_kv_heads, block_lanes(shape.head_dim)
        # Per share: block addresses (int64), sums, maxima, scores; see make_attend.
        row = -(-inputs.max_seq_len // lanes) * lanes
        per_share = -(-(2 * lanes + group * (shape.head_dim + lanes + row)) // 16) * 16
        self._scratch = _at_least(self._scratch, self._num_shares * per_share)
        words = self.words
        words[ROWS], words[POSITIONS] = self._rows.data_ptr(), self._positions.data_ptr()
        words[TABLE], words[TABLE_STRIDE] = self._table.data_ptr(), self._table.shape[1]
        words[SLOTS] = self._slots.data_ptr()
        words[VISIBLE] = 0 if self._visible is None else self._visible.data_ptr()
        words[PAGE_BYTES], words[PAGE_SIZE] = kv.stride(0) * kv.element_size(), kv.shape[4]
        words[QUERIES], words[SCRATCH] = self._queries.data_ptr(), self._scratch.data_ptr()
        words[SCRATCH_BYTES], words[SCORE_BYTES] = per_share * 4, row * 4
        # Heads of a page lie side by side: short rows take one after the other. A chunk's tokens read the same keys.
        words[ROW_MAJOR] = inputs.max_q_len <= SHORT_ROW

    def fill(self, words: npt.NDArray[np.int64], tasks: npt.NDArray[np.int64], layers: npt.NDArray[np.int64]) -> None:
        """Sets what depends on the pool in the words of some tasks (n,) that work on the given layers (n,)."""
        layer_bytes, half_bytes = (self._kv.stride(dim) * self._kv.element_size() for dim in (1, 2))
        keys = self._kv.data_ptr() + layers * layer_bytes
        words[tasks, KEYS], words[tasks, VALUES] = keys, keys + half_bytes
        words[tasks, STEP] = self.words.ctypes.data
        windows = self._windows[layers] if len(self._windows) else np.zeros(len(layers), np.int64)
        cos, sin, local_cos, local_sin = (table.data_ptr() for table in self._tables)
        words[tasks, WINDOW] = windows
        words[tasks, COS] = np.where(windows > 0, local_cos, cos)
        words[tasks, SIN] = np.where(windows > 0, local_sin, sin)

    def _check(self, inputs: AttentionInputs) -> None:
        """The kernels check no bounds, so this does, once a step: a wrong plan fails instead of writing anywhere."""
        limit = min(inputs.max_seq_len, *map(len, self._tables), self._table.shape[1] * self._kv.shape[4])
        for name, places in (("positions", self._positions), ("slots", inputs.slots)):
            low, high = (0, 0) if places is None else (int(bound) for bound in places.aminmax())
            if low < 0 or high >= limit:
                raise IndexError(f"{name} {low}..{high} of a step that holds 0..{limit - 1}")
        if self._visible is not None and bool((self._visible.clamp(min=0) >> (self._slots + 1).clamp(max=62)).any()):
            raise IndexError("a window of alternatives begins before slot 0")
        low, high = (int(bound) for bound in self._table.aminmax())
        if low < 0 or high >= len(self._kv):
            raise IndexError(f"pages {low}..{high} of a pool that holds 0..{len(self._kv) - 1}")


class NumbaAttention:
    """AttentionBackend for CPU tensors, float32 or bfloat16."""

    def __init__(
        self,
        shape: AttentionShape,
        dtype: torch.dtype,
        tables: RopeTables,
        team: Team,
        local_tables: RopeTables | None = None,
    ) -> None:
        self._shape, self._dtype = shape, dtype
        self._step = AttentionStep(shape, tables, team.size, local_tables)
        self._program = Program(team, make_tasks(shape, dtype), np.zeros((2, NUM_WORDS), np.int64))

    def begin(self, inputs: AttentionInputs, kv: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        assert scales is None, "pages of bytes are read by TorchAttention"
        self._step.begin(inputs, kv)
        shape = (len(inputs.positions), self._shape.num_heads * self._shape.head_dim)
        self._out = torch.empty(shape, dtype=self._dtype)

    def attend(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        qkv, words = qkv.contiguous(), self._program.words
        self._step.fill(words, np.arange(2), np.full(2, layer))
        words[:, NUM_ROWS], words[:, QKV], words[:, OUT] = len(qkv), qkv.data_ptr(), self._out.data_ptr()
        words[:, Q_NORM] = 0 if q_norm is None else q_norm.data_ptr()
        words[:, K_NORM] = 0 if k_norm is None else k_norm.data_ptr()
        self._program.run()
        return self._out


def make_tasks(shape: AttentionShape, dtype: torch.dtype) -> tuple[Any, Any]:
    """Write, then attend: both of one layer, on the same words."""
    sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype == torch.bfloat16)
    return make_write(*sizes, shape.eps), make_attend(*sizes, shape.score_scale)


def _at_least(buffer: torch.Tensor, size: int) -> torch.Tensor:
    return buffer if len(buffer) >= size else torch.empty(size, dtype=torch.float32)


@functools.cache
def make_write(num_heads: int, num_kv_heads: int, head_dim: int, is_half: bool, eps: float) -> Any:
    """Rotates q into float32 scratch and k into the pages, copies v there. Tokens are dealt out to the shares."""
    item = 2 if is_half else 4
    head_bytes = head_dim * item

    def write(words: Any, share: int) -> None:
        step = longs_at(words[STEP])
        page_size = step[PAGE_SIZE]
        block = page_size * head_bytes  # one head's slots of one page
        for token in range(share, words[NUM_ROWS], words[NUM_SHARES]):
            row, position = longs_at(step[ROWS])[token], longs_at(step[POSITIONS])[token]
            place = longs_at(step[SLOTS])[token]
            page = np.int64(ints_at(step[TABLE] + row * step[TABLE_STRIDE] * 4)[place // page_size])
            slot = page * step[PAGE_BYTES] + place % page_size * head_bytes
            cos, sin = words[COS] + position * head_dim * 2, words[SIN] + position * head_dim * 2
            source = words[QKV] + token * (num_heads + 2 * num_kv_heads) * head_bytes
            for head in range(num_heads):
                target = step[QUERIES] + (token * num_heads + head) * head_dim * 4
                _rotate(source, cos, sin, words[Q_NORM], eps, target, head_dim, is_half, False)
                source += head_bytes
            for head in range(num_kv_heads):
                target = words[KEYS] + slot + head * block
                _rotate(source, cos, sin, words[K_NORM], eps, target, head_dim, is_half, is_half)
                source += head_bytes
            for head in range(num_kv_heads):
                _copy(source, words[VALUES] + slot + head * block, head_dim, is_half)
                source += head_bytes

    return compile_task(write)


@functools.cache
def make_attend(num_heads: int, num_kv_heads: int, head_dim: int, is_half: bool, scale: float) -> Any:
    """softmax(scale q k) v of every token, (token, kv_head) pairs dealt out to the shares. Keys before a layer's window
    are not looked at: their pages may have other owners."""
    lanes, group, head_bytes = block_lanes(head_dim), num_heads // num_kv_heads, head_dim * (2 if is_half else 4)

    def attend(words: Any, share: int) -> None:
        step, num_tokens = longs_at(words[STEP]), words[NUM_ROWS]
        page_size, row_major = step[PAGE_SIZE], step[ROW_MAJOR]
        score_bytes, page_bytes = step[SCORE_BYTES], step[PAGE_BYTES]
        addresses = step[SCRATCH] + share * step[SCRATCH_BYTES]
        sums = addresses + lanes * 8
        tops = sums + group * head_dim * 4
        scores = tops + group * lanes * 4
        for index in range(share, num_tokens * num_kv_heads, words[NUM_SHARES]):
            if row_major:
                token, head = index // num_kv_heads, index % num_kv_heads
            else:
                head, token = index // num_tokens, index % num_tokens
            first = token * num_heads + head * group
            table = step[TABLE] + longs_at(step[ROWS])[token] * step[TABLE_STRIDE] * 4
            num_keys = longs_at(step[SLOTS])[token] + 1
            window, seen = num_keys, 0  # where the row's window begins, and which of its slots are read
            if step[VISIBLE] != 0 and longs_at(step[VISIBLE])[token] >= 0:
                seen = longs_at(step[VISIBLE])[token]
                window, num_keys = _window_of(seen, num_keys)
            oldest = max(0, num_keys - words[WINDOW]) if words[WINDOW] != 0 else 0  # keys are counted as positions are
            keys = words[KEYS] + head * page_size * head_bytes
            values = words[VALUES] + head * page_size * head_bytes
            _fill(tops, group * lanes, _f32(-np.inf))
            _fill(sums, group * head_dim, _f32(0.0))
            queries = step[QUERIES] + first * head_dim * 4
            # A chunk's next token finds the row's pages in the cache; a new row's have to be asked for early.
            is_new = row_major or token == 0 or longs_at(step[ROWS])[token - 1] != longs_at(step[ROWS])[token]
            if is_new:
                for start in range(oldest, oldest + FETCH_AHEAD, lanes):
                    _fetch(keys, table, start, num_keys, page_size, page_bytes, head_bytes, lanes)
            for start in range(oldest, num_keys, lanes):
                if is_new:
                    _fetch(keys, table, start + FETCH_AHEAD, num_keys, page_size, page_bytes, head_bytes, lanes)
                    _fetch(values, table, start, num_keys, page_size, page_bytes, head_bytes, lanes)
                _locate(addresses, keys, table, start, num_keys, page_size, page_bytes, head_bytes, lanes)
                if seen != 0 and start + lanes > window:
                    _locate_seen(addresses, keys, table, start, window, seen, page_size, page_bytes, head_bytes, lanes)
                found = scores + (start - oldest) * 4
                score_block(group, head_dim, is_half, queries, addresses, found, score_bytes, tops)
            _soften(scores, score_bytes // 4, tops, num_keys - oldest, group, lanes, scale)
            for start in range(oldest, num_keys, lanes):
                _locate(addresses, values, table, start, num_keys, page_size, page_bytes, head_bytes, lanes)
                if seen != 0 and start + lanes > window:
                    _locate_seen(
                        addresses, values, table, start, window, seen, page_size, page_bytes, head_bytes, lanes
                    )
                weigh_block(group, head_dim, is_half, scores + (start - oldest) * 4, score_bytes, addresses, sums)
            for g in range(group):
                share = floats_at(tops)[g * lanes]
                for d in range(head_dim):
                    at = g * head_dim + d
                    store(words[OUT] + first * head_bytes, at, floats_at(sums)[at] * share, is_half)

    return compile_task(attend)


@inlined
def _locate(
    addresses: int,
    base: np.int64,
    table: int,
    start: int,
    num_keys: int,
    page_size: int,
    page_bytes: int,
    head_bytes: int,
    lanes: int,
) -> None:
    """Where the keys start .. start + lanes lie; behind the last one it is repeated (its weight is 0)."""
    pages, out = ints_at(table), longs_at(addresses)
    page, slot = start // page_size, start % page_size
    at = base + np.int64(pages[page]) * page_bytes + slot * head_bytes
    for lane in range(lanes):
        if lane > 0 and start + lane < num_keys:
            slot += 1
            at += head_bytes
            if slot == page_size:
                page, slot = page + 1, 0
                at = base + np.int64(pages[page]) * page_bytes
        out[lane] = at


@inlined
def _window_of(seen: int, end: int) -> tuple[int, int]:
    """Bits of a window whose last slot is end - 1 -> (its first slot, how many keys are read in all)."""
    width, count = 0, 0
    while seen >> width != 0:
        count += (seen >> width) & 1
        width += 1
    return end - width, end - width + count


@inlined
def _locate_seen(
    addresses: int,
    base: np.int64,
    table: int,
    start: int,
    window: int,
    seen: int,
    page_size: int,
    page_bytes: int,
    head_bytes: int,
    lanes: int,
) -> None:
    """Corrects a block's addresses from the window on: its n-th key is the n-th slot that is seen. Behind the last one
    it is repeated, as it is where there is no window."""
    pages, out = ints_at(table), longs_at(addresses)
    key, slot, at = window, window, base
    while seen != 0:
        if seen & 1:
            at = base + np.int64(pages[slot // page_size]) * page_bytes + slot % page_size * head_bytes
            if start <= key < start + lanes:
                out[key - start] = at
            key += 1
        seen >>= 1
        slot += 1
    for lane in range(key - start, lanes):
        out[lane] = at


@inlined
def _fetch(
    base: np.int64, table: int, start: int, num_keys: int, page_size: int, page_bytes: int, head_bytes: int, lanes: int
) -> None:
    """Asks for the memory of the keys start .. start + lanes: pages lie anywhere, where the processor, left to itself,
    would not look before it needs them."""
    if start >= num_keys:
        return
    pages, page, slot = ints_at(table), start // page_size, start % page_size
    for _ in range(min(lanes, num_keys - start)):
        if slot == page_size:
            page, slot = page + 1, 0
        key = base + np.int64(pages[page]) * page_bytes + slot * head_bytes
        for line in range(0, head_bytes, CACHE_LINE):
            prefetch(key + line)
        slot += 1


@inlined
def _soften(scores: int, row: int, tops: int, num_keys: int, group: int, lanes: int, scale: float) -> None:
    """Scores -> exp(scale (score - top)), 0 behind the last key; 1 / their sum goes to the first top of each query."""
    for g in range(group):
        x, top, total = floats_at(scores + g * row * 4), floats_at(tops)[g * lanes], _f32(0.0)
        for lane in range(1, lanes):
            top = max(top, floats_at(tops)[g * lanes + lane])
        for s in range(num_keys):
            weight = exp32((x[s] - top) * _f32(scale))
            x[s] = weight
            total += weight
        for s in range(num_keys, (num_keys + lanes - 1) // lanes * lanes):
            x[s] = _f32(0.0)
        floats_at(tops)[g * lanes] = _f32(1.0) / total


@inlined
def _rotate(
    source: int, cos: int, sin: int, norm: int, eps: float, out: int, head_dim: int, is_half: bool, out_half: bool
) -> None:
    """One head: RMS norm if there is a weight, then each (x[d], x[d + D/2]) turned by its angle, in float32."""
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
def _fill(address: int, length: int, value: np.float32) -> None:
    for d in range(length):
        floats_at(address)[d] = value
