"""What the layers of a step share in compiled attention: rows, runs of tokens, queries and scratch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shared.kernel.attention import attend_bytes, attend_numba
from shared.kernel.attention.attend_numba import RunSizes
from shared.kernel.attention.attention import AttentionInputs, AttentionShape, RopeTables, page_hadamard
from shared.kernel.code.attention_words import (
    COS,
    KEY_SCALES,
    KEYS,
    NUM_RUNS,
    NUM_STEP_WORDS,
    PAGE_BYTES,
    PAGE_SIZE,
    POSITIONS,
    QUERIES,
    ROWS,
    RUN_TOKENS,
    RUNS,
    SCALE_PAGE_BYTES,
    SCALE_SLOT_BYTES,
    SCORE_BYTES,
    SCRATCH,
    SCRATCH_BYTES,
    SIN,
    SLOT_BYTES,
    SLOTS,
    STEP,
    TABLE,
    TABLE_STRIDE,
    VALUE_SCALES,
    VALUES,
    VISIBLE,
    WINDOW,
)
from shared.kernel.code.bounds import check_range
from shared.kernel.code.items import ITEMS, Items
from shared.kernel.code.scratch import Scratch
from shared.kernel.team.shares import MOST_COST, shares_of

SPARE_QUERIES = 16  # AMX reads whole registers
FILLED = np.array(
    (
        ROWS, POSITIONS, SLOTS, TABLE, TABLE_STRIDE, VISIBLE, PAGE_BYTES, PAGE_SIZE, SCALE_PAGE_BYTES, QUERIES,
        SCORE_BYTES, RUNS, NUM_RUNS, RUN_TOKENS, SCRATCH, SCRATCH_BYTES, SLOT_BYTES, SCALE_SLOT_BYTES,
    )
)  # fmt: skip


class PageSizes(NamedTuple):
    """Of a pool, whose pages hold `page_size` slots. The other sizes are in bytes, to the next page or slot."""

    num_pages: int
    page_size: int
    page_bytes: int
    scale_page_bytes: int = 0
    slot_bytes: int = 0  # used only if pages hold one token after another
    scale_slot_bytes: int = 0


class StepWords:
    """Holds the addresses that a step's layers share, and buffers for the largest step so far."""

    def __init__(self, num_heads: int, key_size: int, value_size: int, num_groups: int, num_threads: int) -> None:
        """`num_groups`: of page groups."""
        self._num_heads, self._key_size, self._value_size = num_heads, key_size, value_size
        self._num_threads = num_threads
        self.num_shares = num_threads  # shares of the attend task
        self.words = np.zeros((num_groups, NUM_STEP_WORDS), np.int64)  # of each page group
        self._queries, self._scratch = torch.empty(0), Scratch(num_threads)

    def begin_rows(self, inputs: AttentionInputs, pages: PageSizes, sizes: RunSizes, most_positions: int) -> None:
        """Hold a step's inputs until the next step. Raise IndexError for wrong ones: the kernels check no bounds.

        most_positions: how many the model's tables have."""
        bounds = inputs.layout.cu_q_lens.numpy()
        self._rows = np.repeat(np.arange(len(bounds) - 1), bounds[1:] - bounds[:-1])
        self._positions, self._slots = inputs.positions.contiguous(), inputs.key_slots.contiguous()
        self._visible = None if inputs.visible is None else inputs.visible.contiguous()
        self._page_tables = [table.contiguous() for table in inputs.layout.page_tables]
        self._check_rows(inputs, pages, most_positions)
        num_tokens = inputs.positions.shape[0]
        self._queries = _at_least(self._queries, (num_tokens * self._num_heads + SPARE_QUERIES) * self._key_size)
        self._runs = self._find_runs(sizes.most_tokens)
        self._scratch.reserve(sizes.scratch_bytes)
        cost = num_tokens * inputs.layout.max_seq_len * self._num_heads * (self._key_size + self._value_size)
        self.num_shares = shares_of(cost, MOST_COST, self._num_threads)
        self.words[:, FILLED] = (
            self._rows.ctypes.data,
            self._positions.data_ptr(),
            self._slots.data_ptr(),
            0,
            self._page_tables[0].shape[1],
            0 if self._visible is None else self._visible.data_ptr(),
            pages.page_bytes,
            pages.page_size,
            pages.scale_page_bytes,
            self._queries.data_ptr(),
            sizes.score_bytes,
            self._runs.ctypes.data,
            len(self._runs) - 1,
            sizes.most_tokens,
            *self._scratch.words,
            pages.slot_bytes,
            pages.scale_slot_bytes,
        )
        self.words[:, TABLE] = [table.data_ptr() for table in self._page_tables]

    def _find_runs(self, run_tokens: int) -> npt.NDArray[np.int64]:
        """Return each run's first token, then the number of all tokens.

        No run crosses a multiple of `run_tokens` slots, so its tokens' own keys lie in few blocks."""
        rows = self._rows
        if run_tokens == 1:
            return np.arange(len(rows) + 1)
        slots = self._slots.numpy()
        begins = np.ones(len(rows) + 1, bool)
        begins[1:-1] = (rows[1:] != rows[:-1]) | (slots[1:] != slots[:-1] + 1) | (slots[1:] % run_tokens == 0)
        if self._visible is not None:
            in_tree = self._visible.numpy() >= 0
            begins[1:-1] |= in_tree[1:] | in_tree[:-1]
        return np.flatnonzero(begins)

    def _check_rows(self, inputs: AttentionInputs, pages: PageSizes, most_positions: int) -> None:
        limit = min(inputs.layout.max_seq_len, most_positions, self._page_tables[0].shape[1] * pages.page_size)
        check_range("positions", self._positions, limit)
        if inputs.slots is not None:
            check_range("slots", self._slots, limit)
        if self._visible is not None and bool((self._visible.clamp(min=0) >> (self._slots + 1).clamp(max=62)).any()):
            raise IndexError("a draft tree begins before slot 0")
        for table in self._page_tables:
            check_range("pages", table, pages.num_pages)


class AttentionStep(StepWords):
    """For layers with rope, whose pages hold one head after another."""

    def __init__(
        self, shape: AttentionShape, tables: RopeTables, num_threads: int, local_tables: RopeTables | None = None
    ) -> None:
        super().__init__(shape.num_heads, shape.head_dim, shape.head_dim, shape.num_groups, num_threads)
        self._shape = shape
        self._tables = [table.contiguous() for pair in (tables, local_tables or tables) for table in pair]
        self._shortest = min(table.shape[0] for table in self._tables)
        self._windows = np.array(shape.windows, np.int64)

    def begin(self, inputs: AttentionInputs, kv: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        """Hold a step's inputs until the next step. Raise TypeError or IndexError for wrong ones."""
        if ITEMS[kv.dtype].has_scales != (scales is not None):
            raise TypeError(f"pages of {kv.dtype} with{'' if scales is not None else 'out'} scales")
        shape = self._shape
        self._kv, self._scales = kv, scales
        task = attend_bytes if page_items(shape, kv.dtype) == Items.INTEGERS else attend_numba
        group = shape.num_heads // shape.num_kv_heads
        sizes = task.run_sizes(inputs.layout.max_seq_len, inputs.layout.max_q_len, group, shape.head_dim)
        scale_bytes = 0 if scales is None else scales.stride(0) * scales.element_size()
        pages = PageSizes(kv.shape[0], kv.shape[4], kv.stride(0) * kv.element_size(), scale_bytes)
        self.begin_rows(inputs, pages, sizes, self._shortest)

    @property
    def pool(self) -> tuple[int, int, int]:
        """The pool's address and strides, on which `fill` depends.

        They also determine the scales' addresses: a page holds its scales behind its numbers."""
        return self._kv.data_ptr(), self._kv.stride(1), self._kv.stride(2)

    def fill(self, words: npt.NDArray[np.int64], tasks: npt.NDArray[np.int64], layers: npt.NDArray[np.int64]) -> None:
        """Write a step's addresses and windows. `tasks` (n,): rows of `words`; `layers` (n,): these tasks' layers."""
        group, slot = np.array([self._shape.place(layer) for layer in layers.tolist()], np.int64).T
        layer_bytes, half_bytes = (self._kv.stride(dim) * self._kv.element_size() for dim in (1, 2))
        keys = self._kv.data_ptr() + slot * layer_bytes
        words[tasks, KEYS], words[tasks, VALUES] = keys, keys + half_bytes
        if self._scales is not None:
            layer_bytes, half_bytes = (self._scales.stride(dim) * self._scales.element_size() for dim in (1, 2))
            scales = self._scales.data_ptr() + slot * layer_bytes
            words[tasks, KEY_SCALES], words[tasks, VALUE_SCALES] = scales, scales + half_bytes
        words[tasks, STEP] = self.words.ctypes.data + group * self.words.strides[0]
        windows = self._windows[layers] if len(self._windows) else np.zeros(len(layers), np.int64)
        cos, sin, local_cos, local_sin = (table.data_ptr() for table in self._tables)
        words[tasks, WINDOW] = windows
        words[tasks, COS] = np.where(windows > 0, local_cos, cos)
        words[tasks, SIN] = np.where(windows > 0, local_sin, sin)


def page_items(shape: AttentionShape, page_dtype: torch.dtype) -> Items:
    """Choose how attention reads pages, which decides its bits."""
    if page_hadamard(shape, page_dtype) > 1:
        return Items.INTEGERS
    return paired_items(ITEMS[page_dtype], shape.head_dim, any(shape.windows))


def paired_items(items: Items, size: int, has_window: bool) -> Items:
    """Return PAIRS if attention may read these pages so, else `items`. At a window's edge a pair would have one key."""
    is_paired = items == Items.HALVES and size % 32 == 0 and not has_window
    return Items.PAIRS if is_paired else items


def _at_least(buffer: torch.Tensor, size: int) -> torch.Tensor:
    return buffer if len(buffer) >= size else torch.empty(size, dtype=torch.float32)
