"""Attention over paged KV: the interface, and the reference in plain torch that runs on any device.

    kv (one layer, a view of the pool):  [page][k, v][kv_head][slot][head_dim]

Row b of a step owns tokens [cu_q_lens[b], cu_q_lens[b+1]); the token at position p reads positions 0..p of its row.
In a window of alternatives (a tree of drafts) several tokens have one position, each with a slot of its own: a token
then reads all slots before the window, and in it its ancestors' and its own. A layer with a sliding window reads the
last of these only, as many as it has positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from shared.kernel.quantized import dequantize, quantize

RopeTables = tuple[torch.Tensor, torch.Tensor]  # cos, sin
PADDED_MAX_Q = 16  # up to here rows are padded to one batch; above, each row runs alone


@dataclass(frozen=True, slots=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float  # of the norms on each head of q and k, where a model has them
    windows: tuple[
        int, ...
    ] = ()  # per layer, how many positions a token reads, its own too; 0: all. (): all, everywhere
    scale: float = 0.0  # of scores; 0: head_dim ** -0.5

    @property
    def score_scale(self) -> float:
        return self.scale or self.head_dim**-0.5

    def window(self, layer: int) -> int:
        """0: a token reads everything."""
        return self.windows[layer] if self.windows else 0


@dataclass(slots=True)
class AttentionInputs:
    """What attention needs of one step: T tokens, B rows. Same fields and rules as the model's inputs.

    slots and visible are both there or both None (no windows: slots are positions). visible[t] is -1 where a token
    reads all slots up to its own, else bits: the highest is the token's own slot, those below it are the slots before,
    and everything before the lowest of these slots is read too. At most 48 bits.
    """

    positions: torch.Tensor  # (T,) int64
    cu_q_lens: torch.Tensor  # (B+1,) int32
    page_table: torch.Tensor  # (B, P) int32
    max_q_len: int
    max_seq_len: int
    slots: torch.Tensor | None = None  # (T,) int64: where each token's key and value lie
    visible: torch.Tensor | None = None  # (T,) int64

    @property
    def key_slots(self) -> torch.Tensor:
        """(T,) int64"""
        return self.positions if self.slots is None else self.slots


class AttentionBackend(Protocol):
    """Runs on the forward stream. `begin` once per step, then `attend` once per layer."""

    def begin(self, inputs: AttentionInputs, kv: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        """kv: the pool's plane, (num_pages, layers, 2, kv_heads, page_size, head_dim), any strides on dim 0. `scales`:
        where it holds bytes, the plane of their scales, the same but for head_dim."""
        ...

    def attend(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """qkv (T, q | k | v heads * D) in the pool's dtype. Norms (weights (D,) float32, where there are any) and
        rotates q and k, writes k and v to the pages, then attends. Returns (T, heads * D), valid until the next call.
        """
        ...


class TorchAttention:
    """Reference: gathers each row's pages and multiplies under a mask; scores and softmax in float32."""

    def __init__(self, shape: AttentionShape, tables: RopeTables, local_tables: RopeTables | None = None) -> None:
        """`local_tables` are of the layers with a window, where theirs are others."""
        self._shape = shape
        self._tables, self._local_tables = tables, local_tables

    def begin(self, inputs: AttentionInputs, kv: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        self._inputs, self._kv, self._scales = inputs, kv, scales
        page_size = kv.shape[4]
        num_tokens = len(inputs.positions)
        bounds = inputs.cu_q_lens.long()
        token = torch.arange(num_tokens, device=bounds.device)
        self._row = torch.searchsorted(bounds[1:].contiguous(), token, right=True)  # which row a token belongs to
        self._nth = token - bounds[self._row]  # and its place in the row's queries
        slots = inputs.key_slots
        self._write_page = inputs.page_table[self._row, slots // page_size].long()
        self._write_slot = slots % page_size
        self._turn = turn_of(self._tables, inputs.positions)
        local = self._local_tables
        self._local_turn = self._turn if local is None else turn_of(local, inputs.positions)
        self._num_pages = -(-inputs.max_seq_len // page_size)

    def attend(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        heads, kv_heads = self._shape.num_heads, self._shape.num_kv_heads
        q, k, v = qkv.view(len(qkv), -1, self._shape.head_dim).split((heads, kv_heads, kv_heads), dim=1)
        turn = self._local_turn if self._shape.window(layer) else self._turn
        q, k = self._rotate(q, q_norm, turn), self._rotate(k, k_norm, turn)
        self._write(layer, 0, k)
        self._write(layer, 1, v)
        if self._inputs.max_q_len <= PADDED_MAX_Q:
            return self._padded(layer, q).flatten(1)
        return self._row_by_row(layer, q).flatten(1)

    def _write(self, layer: int, half: int, values: torch.Tensor) -> None:
        """(T, kv_heads, D) to the tokens' slots."""
        page, slot = self._write_page, self._write_slot
        if self._scales is not None:  # --kv-dtype int8 or fp8
            values, self._scales[page, layer, half, :, slot] = quantize(values, self._kv.dtype)
        self._kv[page, layer, half, :, slot] = values

    def _rotate(self, x: torch.Tensor, norm: torch.Tensor | None, turn: RopeTables) -> torch.Tensor:
        """(T, heads, D), the two halves of a head turned against each other; computed in float32."""
        wide = x.float()
        if norm is not None:
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._shape.eps) * norm
        left, right = wide.chunk(2, dim=-1)
        cos, sin = turn
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)

    def _padded(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """All rows as one (B, heads, max_q, D) batch; padding queries see slot 0 only."""
        table = self._inputs.page_table[:, : self._num_pages].long()
        shape = (len(table), self._inputs.max_q_len)
        padded = q.new_zeros(*shape, *q.shape[1:])
        padded[self._row, self._nth] = q
        slots = torch.zeros(shape, dtype=torch.long, device=q.device)
        slots[self._row, self._nth] = self._inputs.key_slots
        visible = torch.full_like(slots, -1)
        if self._inputs.visible is not None:
            visible[self._row, self._nth] = self._inputs.visible
        out = self._masked(layer, padded, slots, visible, *self._gather(layer, table))
        return out[self._row, self._nth]

    def _row_by_row(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Long chunks: no padding, at the price of reading the rows' bounds on the host."""
        bounds = self._inputs.cu_q_lens.tolist()
        parts = []
        for row in range(len(bounds) - 1):
            start, stop = bounds[row], bounds[row + 1]
            if start == stop:
                continue
            table = self._inputs.page_table[row : row + 1, : self._num_pages].long()
            slots = self._inputs.key_slots[None, start:stop]
            visible = torch.full_like(slots, -1)
            if self._inputs.visible is not None:
                visible = self._inputs.visible[None, start:stop]
            parts.append(self._masked(layer, q[None, start:stop], slots, visible, *self._gather(layer, table))[0])
        return torch.cat(parts) if parts else q

    def _gather(self, layer: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, P) pages -> k and v of (B, kv_heads, P * page_size, D)."""
        pages = self._kv[table, layer]  # (B, P, 2, kv_heads, page_size, D)
        if self._scales is not None:
            pages = dequantize(pages, self._scales[table, layer])
        keys, values = pages.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).unbind(0)
        return keys, values

    def _masked(
        self, layer: int, q: torch.Tensor, slots: torch.Tensor, visible: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """q (B, Q, heads, D), slots and visible (B, Q), k and v (B, kv_heads, S, D) -> (B, Q, heads, D)."""
        group = self._shape.num_heads // self._shape.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        keys = torch.arange(k.shape[2], device=q.device)
        hidden = outside_window(hidden_keys(keys, slots, visible), self._shape.window(layer))
        # Slots that none reads hold what an earlier owner left, maybe NaN, and 0 * NaN is NaN: zero them.
        v = v.masked_fill(hidden.all(dim=1)[:, None, :, None], 0)
        scores = torch.matmul(q.transpose(1, 2).float(), k.transpose(2, 3).float()) * self._shape.score_scale
        weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(dim=-1)
        return torch.matmul(weights, v.float()).transpose(1, 2).to(q.dtype)


def hidden_keys(keys: torch.Tensor, slots: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """(B, Q, S) bool: which of the keys (S,) each query, at slots (B, Q), does not read."""
    num_bits = torch.frexp(visible.clamp(min=1).double()).exponent
    bit = keys[None, None] - (slots - num_bits + 1)[:, :, None]
    is_set = (visible[:, :, None] >> bit.clamp(0, 62)) & 1 > 0
    in_window = (visible[:, :, None] >= 0) & (bit >= 0)
    return (keys[None, None] > slots[:, :, None]) | (in_window & ~is_set)


def outside_window(hidden: torch.Tensor, window: int) -> torch.Tensor:
    """(B, Q, S) bool: hides of the keys that each query reads all but the last `window` (0: none). The n-th key that is
    read is that of position n, also where siblings lie between them."""
    if window == 0:
        return hidden
    nth = (~hidden).cumsum(dim=-1)
    return hidden | (nth <= nth[..., -1:] - window)


def turn_of(tables: RopeTables, positions: torch.Tensor) -> RopeTables:
    """cos and sin of some tokens, (T, 1, D // 2)."""
    return tables[0][positions][:, None], tables[1][positions][:, None]
