"""Divide a step's tokens among its rows, and say where each row's KV lies.

One Layout goes from the scheduler's plan to attention: freeze -> upload -> ModelInputs -> AttentionInputs, with a share
for each rank and each draft window. This code on the way treats all arrays alike. So a new array is one line here, and
one where the scheduler sets it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

A = TypeVar("A", np.ndarray, torch.Tensor)
B = TypeVar("B", np.ndarray, torch.Tensor)
MOST_BOUNDS = 64  # sizes of decode steps whose bounds are kept


@dataclass(frozen=True)
class HostLengths:
    """A step's B rows, as the host knows them at launch."""

    cu_q_lens: npt.NDArray[np.int32]  # (B + 1,)
    seq_lens: npt.NDArray[np.int64] | None  # (B,) number of tokens before the step, if known
    num_running: int  # number of decode rows, which come last and have equally many tokens
    varies: bool = False  # in a graph of prompts: whose tokens are whose, only the device knows at each replay

    @cached_property
    def seq_lens_sum(self) -> int | None:
        """Return the sum of `seq_lens`, which is computed when a kernel first asks. Most kernels never do."""
        return None if self.seq_lens is None else int(self.seq_lens.sum())


@dataclass(frozen=True, slots=True)
class Layout(Generic[A]):
    """A step's B rows, in host memory or on the device. An array has one element per row, unless noted.

    With an encoder, a row's first encoder_lens[b] positions are encoder input, all in one step. The decoder's
    cross-attention reads their KV; the decoder's own KV follows.
    """

    cu_q_lens: A  # (B + 1,) int32: row b owns tokens [cu_q_lens[b], cu_q_lens[b + 1])
    page_tables: tuple[A, ...]  # (B, P) int32 of each page group; entries behind a row's pages are 0, the sink page
    max_q_len: int
    max_seq_len: int  # >= committed + q_len of every row
    encoder_lens: A | None = None  # int64 numbers of encoder positions; None: no encoder
    host: HostLengths | None = None  # for a layout on the device; None: the host waits for the device's bounds

    @property
    def num_rows(self) -> int:
        return len(self.page_tables[0])

    @property
    def page_table(self) -> A:
        """Return the page table of a model that has one page group."""
        (table,) = self.page_tables
        return table

    def of_group(self, group: int = 0) -> Layout[A]:
        """Return the layout with one page group's table. A draft head's KV is in the first group's pages."""
        return self if len(self.page_tables) == 1 else replace(self, page_tables=(self.page_tables[group],))

    def per_row(self) -> dict[str, A]:
        """Return the arrays with one element per row, except page tables."""
        return {name: value for name in PER_ROW if (value := getattr(self, name)) is not None}

    def arrays(self) -> dict[str, A]:
        return {"cu_q_lens": self.cu_q_lens, **named_tables(self.page_tables), **self.per_row()}

    def with_arrays(self, found: Mapping[str, B], **changes: Any) -> Layout[B]:
        """Return the layout with other arrays, which have the names of `arrays`."""
        own: dict[str, Any] = {name: found[name] for name in ("cu_q_lens", *self.per_row())}
        tables = tuple(found[name] for name in named_tables(self.page_tables))
        made: Any = self  # `replace` keeps the kind of array, for mypy
        whole: Layout[B] = replace(made, page_tables=tables, **own, **changes)
        return whole

    def part(self, rows: slice, **changes: Any) -> Layout[A]:
        """Return the layout of consecutive rows. `changes` has at least their `cu_q_lens` and `host`."""
        own: dict[str, Any] = {name: value[rows] for name, value in self.per_row().items()}
        tables = tuple(table[rows] for table in self.page_tables)
        return replace(self, page_tables=tables, **own, **changes)


PER_ROW = tuple(one.name for one in fields(Layout) if one.type in ("A", "A | None") and one.name != "cu_q_lens")


def named_tables(tables: tuple[A, ...]) -> dict[str, A]:
    return {f"page_table_{group}": table for group, table in enumerate(tables)}


@functools.lru_cache(MOST_BOUNDS)
def equal_bounds(num_rows: int, q_len: int) -> npt.NDArray[np.int32]:
    """Return `cu_q_lens` of rows with equally many tokens. Steps share the array, so it must not be written."""
    return np.arange(num_rows + 1, dtype=np.int32) * np.int32(q_len)
