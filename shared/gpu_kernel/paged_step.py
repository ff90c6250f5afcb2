"""What attention's kernels take of the pool and of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the pool: kv (num_pages, 2, kv_heads, page_size, D), pages of any stride and whole within; scales
    the same but for D. `window`: 0 where a token reads everything."""

    kv: torch.Tensor
    scales: torch.Tensor | None
    window: int
    score_scale: float


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a step, one after the other: cu_q_lens (B + 1,) int32, page_table (B, P) int32, visible (T,) int64,
    of all rows."""

    cu_q_lens: torch.Tensor
    page_table: torch.Tensor
    visible: torch.Tensor | None
    first: int
    num_rows: int
    first_token: int
    num_tokens: int
    max_q_len: int  # of these rows
    max_seq_len: int  # of all


def padded_dim(head_dim: int) -> int:
    """Return the columns of a tile."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def num_stages(head_dim: int) -> int:
    """Return the stages of both kernels' loops over keys. With 2, the compiler gives some variants of narrow heads 128
    registers a thread (groups of 7 on sm_100, sliding chunks on sm_86, 89 and 100), and they spill. With 3, heads of
    256 spill on sm_80, 86 and 89."""
    return 2 if padded_dim(head_dim) > 128 else 3


def keys_at_a_time(layer: Layer, dtype: torch.dtype) -> int:
    """Return the keys of a tile: as many as leave registers and shared memory enough, also on small chips. `dtype`: of
    the queries."""
    is_wide = padded_dim(layer.kv.shape[-1]) * dtype.itemsize > 256
    return 32 if is_wide or layer.scales is not None or layer.window else 64
