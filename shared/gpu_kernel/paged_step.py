"""The arguments of attention's kernels: a layer of the pool, and rows of the step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from shared.gpu_kernel.attention_tile import LOG2_E


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the pool: kv (num_pages, 2, kv_heads, page_size, D), and a page without gaps.

    Within a page come keys and values in turn, then heads, then slots; with `by_token` slots, then keys and values,
    then heads. scales: kv's shape without D in the same order, or None. `window`: 0 for no window.

    With a `softcap`, a score becomes softcap * tanh(score / softcap). sinks (heads,), in the model's dtype: for each
    head, a score without a value in each softmax."""

    kv: torch.Tensor
    scales: torch.Tensor | None
    window: int
    score_scale: float
    softcap: float = 0.0  # 0: none
    sinks: torch.Tensor | None = None

    @property
    def by_token(self) -> bool:
        return self.kv.stride(3) != self.kv.shape[4]

    def scoring(self) -> tuple[float, float]:
        """Return the kernels' factor of a product, and their softcap. Their scores have base 2."""
        per_e = float(LOG2_E.value)
        if self.softcap:
            return self.score_scale / self.softcap, self.softcap * per_e
        return self.score_scale * per_e, 0.0

    @classmethod
    def of_tokens(
        cls,
        kv: torch.Tensor,
        scales: torch.Tensor | None,
        num_kv_heads: int,
        window: int,
        score_scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> Layer:
        """kv: (num_pages, page_size, 2 * kv_heads * D), a token's keys and then its values; scales: the same, D 1."""
        by_head = kv.unflatten(2, (2, num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
        of_heads = None if scales is None else scales.unflatten(2, (2, num_kv_heads)).permute(0, 2, 3, 1)
        return cls(by_head, of_heads, window, score_scale, softcap, sinks)


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of a step. The tensors cover all rows of the step.

    cu_q_lens (B + 1,) int32, page_table (B, P) int32, visible (T,) int64."""

    cu_q_lens: torch.Tensor
    page_table: torch.Tensor
    visible: torch.Tensor | None
    first: int
    num_rows: int
    first_token: int
    num_tokens: int
    max_q_len: int  # over these rows
    max_seq_len: int  # over all rows of the step


def padded_dim(head_dim: int) -> int:
    return max(16, int(triton.next_power_of_2(head_dim)))


def num_stages(head_dim: int) -> int:
    """Return how many pipeline stages the loop over keys has in both kernels.

    With 2 stages, some variants with narrow heads spill (groups of 7 heads on sm_100, chunks with a sliding window on
    sm_86, 89 and 100). With 3 stages, variants with a head_dim of 256 spill on sm_80, 86 and 89,
    and chunks with sinks on sm_80: these have 2."""
    return 2 if padded_dim(head_dim) > 128 else 3


def keys_at_a_time(layer: Layer, dtype: torch.dtype) -> int:
    """Return how many keys a tile has. A tile must fit the registers and shared memory of small chips.

    `dtype`: the queries' dtype."""
    is_wide = padded_dim(layer.kv.shape[-1]) * dtype.itemsize > 256
    return 32 if is_wide or layer.scales is not None or layer.window else 64
