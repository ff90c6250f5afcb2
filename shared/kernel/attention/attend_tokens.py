"""Attention over pages that hold one token after another, for layers that rotate queries and keys themselves.

    keys and values, each:  [page][slot][kv_head][size], any distance between pages and between slots
    their scales, if pages hold bytes:  [page][slot][kv_head]

A layer's tasks: write its keys and values to pages and its queries to scratch; then attend (attend_numba.py).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shared.kernel.attention import attend_numba
from shared.kernel.attention.attend_numba import AttendForm, make_attend
from shared.kernel.attention.attention import AttentionInputs
from shared.kernel.attention.attention_numba import copy_row, place_of
from shared.kernel.attention.attention_step import PageSizes, StepWords, paired_items
from shared.kernel.code.attention_words import (
    KEY_SCALES,
    KEYS,
    NEW_KEYS,
    NEW_VALUES,
    NUM_KV_HEADS,
    NUM_TOKEN_WORDS,
    NUM_UNREAD,
    OUT,
    PAGE_BYTES,
    QKV,
    QUERIES,
    SCALE,
    SCALE_PAGE_BYTES,
    SCALE_SLOT_BYTES,
    SINKS,
    SLOT_BYTES,
    SOFTCAP,
    STEP,
    VALUE_SCALES,
    VALUES,
    WINDOW,
)
from shared.kernel.code.items import ITEMS, Items
from shared.kernel.code.jit import NUM_ROWS, NUM_SHARES, compile_exact_task, floats_at, load, longs_at, rows_of
from shared.kernel.product.attend_places import SCALE_BYTES
from shared.kernel.product.simd import narrow_row, split_pairs
from shared.kernel.product.vectors import are_paired, block_lanes, number_bytes_of
from shared.kernel.team.program import Program
from shared.kernel.team.team import Team


def supports(key_size: int, value_size: int) -> bool:
    """Return whether the tasks know heads of these sizes."""
    return block_lanes(key_size) == block_lanes(value_size) > 0


@dataclass(frozen=True, slots=True)
class TokenHeads:
    """A layer's heads, whose queries, keys and values are `dtype` (float32 or bfloat16)."""

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    page_dtype: torch.dtype
    has_window: bool  # whether any layer of the model has one, or unread keys
    is_capped: bool = False
    has_sinks: bool = False

    def form(self) -> AttendForm:
        items = paired_items(ITEMS[self.page_dtype], math.gcd(self.key_size, self.value_size), self.has_window)
        sizes = self.num_heads // self.num_kv_heads, self.key_size, self.value_size
        return AttendForm(*sizes, self.dtype == torch.bfloat16, items, self.is_capped, self.has_sinks)


@dataclass(frozen=True, slots=True)
class TokenPages:
    """A layer's views of all pages: (pages, page_size, kv_heads * size), scales (pages, page_size, kv_heads) float32.

    Within a slot, all are contiguous. Keys and values lie in the same slots, and so do their scales."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    def sizes(self) -> PageSizes:
        page, slot = (self.keys.stride(dim) * self.keys.element_size() for dim in (0, 1))
        scale_page, scale_slot = (
            0 if self.key_scales is None else self.key_scales.stride(dim) * SCALE_BYTES for dim in (0, 1)
        )
        num_pages, page_size, _ = self.keys.shape
        return PageSizes(num_pages, page_size, page, scale_page, slot, scale_slot)


@dataclass(frozen=True, slots=True)
class TokenScoring:
    """How products become weights. `softcap`: 0 without one. `sinks`: (heads,) float32. `num_unread`: how many of a
    row's first keys no other token reads."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    num_unread: int = 0


class TokenAttention:
    """Attends in the layers of a page group that have equal heads: `begin` once per step, then `attend` per layer."""

    def __init__(self, heads: TokenHeads, team: Team) -> None:
        self._heads, self._form = heads, heads.form()
        self._step = StepWords(heads.num_heads, heads.key_size, heads.value_size, 1, team.size)
        tasks = make_write(*self._form[:5]), make_attend(self._form)
        self._program = Program(team, tasks, np.zeros((2, NUM_TOKEN_WORDS), np.int64))
        self._program.words[:, NUM_KV_HEADS] = heads.num_kv_heads
        self._program.words[:, STEP] = self._step.words.ctypes.data

    def begin(self, inputs: AttentionInputs, pages: PageSizes) -> None:
        """`inputs`: with the table of this page group alone. Raise IndexError for wrong ones."""
        layout, form = inputs.layout, self._form
        size = max(form.key_size, form.value_size)
        sizes = attend_numba.run_sizes(layout.max_seq_len, layout.max_q_len, form.group, size)
        self._step.begin_rows(inputs, pages, sizes, layout.max_seq_len)
        self._program.words[1, NUM_SHARES] = self._step.num_shares

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: TokenPages, scoring: TokenScoring
    ) -> torch.Tensor:
        """Write a layer's keys and values, then attend: return (T, heads, value_size).

        q (T, heads, key_size), k (T, kv_heads, key_size), v (T, kv_heads, value_size) in the heads' dtype."""
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = torch.empty(len(q), self._heads.num_heads, self._heads.value_size, dtype=q.dtype)
        sinks = None if scoring.sinks is None else scoring.sinks.float().contiguous()
        words = self._program.words
        words[:, NUM_ROWS], words[:, OUT], words[:, WINDOW] = len(q), out.data_ptr(), scoring.window
        words[:, NUM_UNREAD] = scoring.num_unread
        words[:, QKV], words[:, NEW_KEYS], words[:, NEW_VALUES] = q.data_ptr(), k.data_ptr(), v.data_ptr()
        words[:, KEYS], words[:, VALUES] = pages.keys.data_ptr(), pages.values.data_ptr()
        if pages.key_scales is not None and pages.value_scales is not None:
            words[:, KEY_SCALES], words[:, VALUE_SCALES] = pages.key_scales.data_ptr(), pages.value_scales.data_ptr()
        words[:, SCALE] = bits_of_float(scoring.scale / (scoring.softcap or 1.0))
        words[:, SOFTCAP] = bits_of_float(scoring.softcap)
        words[:, SINKS] = 0 if sinks is None else sinks.data_ptr()
        self._program.run()
        return out


def bits_of_float(number: float) -> int:
    return int(np.float32(number).view(np.uint32))


@functools.cache
def make_write(group: int, key_size: int, value_size: int, is_half: bool, page_items: Items) -> Any:
    """Compile the task that copies k and v into pages, and q into scratch (float32 or pairs)."""
    source_items, byte_items = int(Items.HALVES if is_half else Items.FLOATS), int(page_items)
    number_bytes, has_scales = 2 if is_half else 4, page_items.has_scales
    query_bytes, in_pairs = key_size * number_bytes_of(page_items), are_paired(page_items)
    is_split = page_items == Items.PAIRS and not in_pairs
    key_bytes, value_bytes = key_size * page_items.num_bytes, value_size * page_items.num_bytes

    def write_tokens(words: Any, share: int, worker: int) -> None:
        step = longs_at(words[STEP])
        heads = words[NUM_KV_HEADS]
        first, end = rows_of(words, share)
        for token in range(first, end):
            page, slot = place_of(step, token)
            at = page * step[PAGE_BYTES] + slot * step[SLOT_BYTES]
            scale_at = page * step[SCALE_PAGE_BYTES] + slot * step[SCALE_SLOT_BYTES]
            for query in range(token * heads * group, (token + 1) * heads * group):
                source, target = words[QKV] + query * key_size * number_bytes, step[QUERIES] + query * query_bytes
                if in_pairs:
                    copy_row(source, target, key_size, True)
                elif is_split:
                    split_pairs(key_size, source, target)
                else:
                    for d in range(key_size):
                        floats_at(target)[d] = load(source, d, is_half)
            for head in range(heads):
                key = words[NEW_KEYS] + (token * heads + head) * key_size * number_bytes
                value = words[NEW_VALUES] + (token * heads + head) * value_size * number_bytes
                to_key, to_value = words[KEYS] + at + head * key_bytes, words[VALUES] + at + head * value_bytes
                if has_scales:
                    key_scale = words[KEY_SCALES] + scale_at + head * SCALE_BYTES
                    value_scale = words[VALUE_SCALES] + scale_at + head * SCALE_BYTES
                    narrow_row(key_size, source_items, byte_items, 1, key, to_key, key_scale)
                    narrow_row(value_size, source_items, byte_items, 1, value, to_value, value_scale)
                else:
                    copy_row(key, to_key, key_size, is_half)
                    copy_row(value, to_value, value_size, is_half)

    return compile_exact_task(write_tokens)
