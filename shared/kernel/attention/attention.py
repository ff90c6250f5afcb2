"""Attention over paged KV: the interface, and a plain torch reference for any device.

    kv (one layer, a view of the pool):  [page][k, v][kv_head][slot][head_dim]

Row b of a step owns tokens [cu_q_lens[b], cu_q_lens[b+1]). A token at position p reads positions 0..p of its row. With
a sliding window of n positions, a token reads only the last n of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from shared.kernel.code.quantized import dequantize, quantize
from shared.kernel.code.step_layout import HostLengths, Layout
from shared.kernel.product.block_weights import hadamard

RopeTables = tuple[torch.Tensor, torch.Tensor]  # cos, sin
PADDED_MAX_Q = 16  # a row with more tokens runs alone; shorter rows are padded into one batch
MOST_PADDING = 4  # a padded batch may read this number of keys per real key
HADAMARD = 64
MOST_NUMBERS = 1 << 27  # most scores in memory at a time, and most numbers in widened keys


@dataclass(frozen=True, slots=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float  # epsilon of q's and k's norms, if the model has them
    # each layer's sliding window in positions, the token's own included; 0: none; (): none in every layer
    windows: tuple[int, ...] = ()
    scale: float = 0.0  # factor of the scores; 0: head_dim ** -0.5
    places: tuple[tuple[int, int], ...] = ()  # each layer's page group and slot; (): one group, in the layers' order

    @property
    def score_scale(self) -> float:
        return self.scale or self.head_dim**-0.5

    def window(self, layer: int) -> int:
        """Return 0 for no window."""
        return self.windows[layer] if self.windows else 0

    @property
    def num_groups(self) -> int:
        """Return the number of page groups."""
        return 1 + max((group for group, _ in self.places), default=0)

    def place(self, layer: int) -> tuple[int, int]:
        """Return the layer's page group, and its slot in the group's pages."""
        return self.places[layer] if self.places else (0, layer)


@dataclass(slots=True)
class AttentionInputs:
    """One step of T tokens. ModelInputs (shared/model/math/interface.py) has the same fields and rules.

    Tokens of a draft tree may share a position, in different slots. With trees, `slots` and `visible` are set.
    Otherwise both are None, and a token's slot equals its position. visible[t] is -1 (hides nothing) or a mask of at
    most 48 bits, whose highest set bit is the token's own slot. The token reads the slots of the set bits, and all
    slots before the slot of bit 0."""

    positions: torch.Tensor  # (T,) int64
    layout: Layout[torch.Tensor]
    slots: torch.Tensor | None = None  # (T,) int64, of each token's key and value
    visible: torch.Tensor | None = None  # (T,) int64

    @property
    def key_slots(self) -> torch.Tensor:
        """(T,) int64"""
        return self.positions if self.slots is None else self.slots


def page_hadamard(shape: AttentionShape, page_dtype: torch.dtype) -> int:
    """Return the size of the Hadamard matrices that mix queries, and keys in pages; 1: none.

    Mixed keys lose less if they are rounded to int8. A dot product of mixed vectors is the same, times the size."""
    is_fit = shape.head_dim == HADAMARD or shape.head_dim % (2 * HADAMARD) == 0
    is_mixed = page_dtype == torch.int8 and is_fit and not any(shape.windows)
    return HADAMARD if is_mixed else 1


class AttentionBackend(Protocol):
    """Attention on the forward stream: `begin` once per step, then `attend` once per layer.

    `gathers`: whether `attend` may read max_seq_len keys of every row, even of shorter ones."""

    gathers: bool

    def begin(self, inputs: AttentionInputs, kv: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        """Start a step.

        kv: (num_pages, slots, 2, kv_heads, page_size, head_dim), with any stride on dim 0. A layer is in its slot of
        its page group's pages. scales: kv's shape without head_dim, float32, if pages hold bytes, else None."""
        ...

    def attend(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Normalise and rotate q and k, write keys and values to their pages, then attend.

        qkv (T, (heads + 2 * kv_heads) * D) in the model's dtype. q_norm, k_norm: weights (D,) float32, or None without
        norms. Return (T, heads * D), valid until the next call."""
        ...


@runtime_checkable
class WritesPages(AttentionBackend, Protocol):
    """A backend whose writing another library's attention may use."""

    def write(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Do the first half of `attend`, with its arguments: all but attending. Return q, (T, heads, D), contiguous."""
        ...


@runtime_checkable
class PlansGraphs(Protocol):
    """A backend that prepares every run of a graph on the host."""

    def plan_graph(self, fixed: AttentionInputs, host: HostLengths | None, page_size: int) -> None:
        """Plan the next run of the graph that was captured, or is to be captured, with the inputs `fixed`.

        `host`: the rows of the step; a graph's other rows are padding. None: all are. Runs on the forward stream, after
        the step's page table was copied to `fixed`."""
        ...


class TorchAttention:
    """Gathers each row's pages. Scores and softmax are float32."""

    gathers = True

    def __init__(self, shape: AttentionShape, tables: RopeTables, local_tables: RopeTables | None = None) -> None:
        """`local_tables`: the tables of layers with a window; None means `tables`."""
        self._shape = shape
        self._tables, self._local_tables = tables, local_tables

    def begin(self, inputs: AttentionInputs, kv: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        self._inputs, self._kv, self._scales = inputs, kv, scales
        page_size = kv.shape[4]
        num_tokens = len(inputs.positions)
        bounds = inputs.layout.cu_q_lens.long()
        token = torch.arange(num_tokens, device=bounds.device)
        self._row = torch.searchsorted(bounds[1:].contiguous(), token, right=True)
        self._nth = token - bounds[self._row]  # index among the row's tokens of this step
        slots = inputs.key_slots
        tables = inputs.layout.page_tables
        self._write_pages = [table[self._row, slots // page_size].long() for table in tables]
        self._write_slot = slots % page_size
        self._rope = rope_of(self._tables, inputs.positions)
        local = self._local_tables
        self._local_rope = self._rope if local is None else rope_of(local, inputs.positions)
        self._num_pages = -(-inputs.layout.max_seq_len // page_size)
        self._num_alone = rows_alone(inputs)
        self._bounds = _host_bounds(inputs) if self._num_alone else []

    def attend(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        q = self.write(layer, qkv, q_norm, k_norm)
        parts = [self._alone(layer, q, row) for row in range(self._num_alone)]
        if self._num_alone < self._inputs.layout.num_rows:
            parts.append(self._padded(layer, q))
        return (torch.cat(parts) if parts else q).flatten(1).to(qkv.dtype)

    def write(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """With int8 pages, q is float32."""
        heads, kv_heads = self._shape.num_heads, self._shape.num_kv_heads
        q, k, v = qkv.view(len(qkv), -1, self._shape.head_dim).split((heads, kv_heads, kv_heads), dim=1)
        rope = self._local_rope if self._shape.window(layer) else self._rope
        q, k = self._rotate(q, q_norm, rope), self._rotate(k, k_norm, rope)
        size = page_hadamard(self._shape, self._kv.dtype)
        if size > 1:
            q, k = hadamard(q.float(), size), hadamard(k.float(), size) / size
        self._write(layer, 0, k)
        self._write(layer, 1, v)
        return q

    def _write(self, layer: int, half: int, values: torch.Tensor) -> None:
        group, place = self._shape.place(layer)
        page, slot = self._write_pages[group], self._write_slot
        if self._scales is not None:  # --kv-dtype int8 or fp8
            values, self._scales[page, place, half, :, slot] = quantize(values, self._kv.dtype)
        self._kv[page, place, half, :, slot] = values

    def _rotate(self, x: torch.Tensor, norm: torch.Tensor | None, rope: RopeTables) -> torch.Tensor:
        wide = x.float()
        if norm is not None:
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._shape.eps) * norm
        left, right = wide.chunk(2, dim=-1)
        cos, sin = rope
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)

    def _padded(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attend for rows that do not run alone, padded to (B, max_q, heads, D). Padding queries read slot 0."""
        first_row = self._num_alone
        begin = self._bounds[first_row] if first_row else 0
        table = self._table_of(layer)[first_row:, : self._num_pages].long()
        row, nth = self._row[begin:] - first_row, self._nth[begin:]
        shape = (len(table), (len(q) - begin) // len(table) if first_row else self._inputs.layout.max_q_len)
        padded = q.new_zeros(*shape, *q.shape[1:])
        padded[row, nth] = q[begin:]
        slots = torch.zeros(shape, dtype=torch.long, device=q.device)
        slots[row, nth] = self._inputs.key_slots[begin:]
        visible = torch.full_like(slots, -1)
        if self._inputs.visible is not None:
            visible[row, nth] = self._inputs.visible[begin:]
        most = self._rows_at_a_time(shape[1])
        queries = zip(padded.split(most), slots.split(most), visible.split(most), strict=True)
        pages = (self._gather(layer, part) for part in table.split(most))
        out = [self._masked(layer, *part, *keys) for part, keys in zip(queries, pages, strict=True)]
        return (out[0] if len(out) == 1 else torch.cat(out))[row, nth]

    def _rows_at_a_time(self, num_queries: int) -> int:
        keys = self._num_pages * self._kv.shape[4]
        return max(1, MOST_NUMBERS // (self._shape.num_heads * keys * max(num_queries, self._shape.head_dim)))

    def _alone(self, layer: int, q: torch.Tensor, row: int) -> torch.Tensor:
        start, stop = self._bounds[row], self._bounds[row + 1]
        if start == stop:
            return q[start:stop]
        table = self._table_of(layer)[row : row + 1, : self._pages_of(row)].long()
        slots = self._inputs.key_slots[None, start:stop]
        visible = torch.full_like(slots, -1)
        if self._inputs.visible is not None:
            visible = self._inputs.visible[None, start:stop]
        keys, values = self._gather(layer, table)
        most = max(1, MOST_NUMBERS // (self._shape.num_heads * keys.shape[2]))
        parts = zip(q[None, start:stop].split(most, 1), slots.split(most, 1), visible.split(most, 1), strict=True)
        out = [self._masked(layer, *part, keys, values)[0] for part in parts]
        return out[0] if len(out) == 1 else torch.cat(out)

    def _table_of(self, layer: int) -> torch.Tensor:
        return self._inputs.layout.page_tables[self._shape.place(layer)[0]]

    def _pages_of(self, row: int) -> int:
        host = self._inputs.layout.host
        if host is None or host.seq_lens is None:
            return self._num_pages
        after = int(host.seq_lens[row]) + self._bounds[row + 1] - self._bounds[row]
        return -(-after // self._kv.shape[4])

    def _gather(self, layer: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, each (B, kv_heads, P * page_size, D), of pages (B, P)."""
        _, place = self._shape.place(layer)
        pages = self._kv[table, place]  # (B, P, 2, kv_heads, page_size, D)
        if self._scales is not None:
            pages = dequantize(pages, self._scales[table, place])
        keys, values = pages.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).unbind(0)
        return keys, values

    def _masked(
        self, layer: int, q: torch.Tensor, slots: torch.Tensor, visible: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attend. q is (B, Q, heads, D), slots and visible (B, Q), k and v (B, kv_heads, S, D)."""
        group = self._shape.num_heads // self._shape.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        keys = torch.arange(k.shape[2], device=q.device)
        hidden = outside_window(hidden_keys(keys, slots, visible), self._shape.window(layer))
        # Unread slots may hold an earlier owner's NaN, and 0 * NaN is NaN.
        v = v.masked_fill(hidden.all(dim=1)[:, None, :, None], 0)
        scores = torch.matmul(q.transpose(1, 2).float(), k.transpose(2, 3).float()) * self._shape.score_scale
        weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(dim=-1)
        return torch.matmul(weights, v.float()).transpose(1, 2).to(q.dtype)


def rows_alone(inputs: AttentionInputs) -> int:
    """Return how many rows, from the first, run one by one: the prefill chunks, or all if padding dominates.

    On a CPU, all rows run alone if any is a chunk, because launches cost nothing there. In a graph of prompts no row
    does: the host does not know which tokens it has."""
    host, num_rows = inputs.layout.host, inputs.layout.num_rows
    if host is not None and host.varies:
        return 0
    has_chunk = inputs.layout.max_q_len > PADDED_MAX_Q
    if host is None or (has_chunk and inputs.positions.device.type == "cpu"):
        return num_rows if has_chunk else 0
    if host.seq_lens_sum is not None:
        keys = host.seq_lens_sum + len(inputs.positions)
        if num_rows * inputs.layout.max_seq_len > MOST_PADDING * keys:
            return num_rows
    return num_rows - host.num_running if has_chunk else 0


def _host_bounds(inputs: AttentionInputs) -> list[int]:
    host = inputs.layout.host
    bounds: list[int] = (inputs.layout.cu_q_lens if host is None else host.cu_q_lens).tolist()
    return bounds


def hidden_keys(keys: torch.Tensor, slots: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Return (B, Q, S) bool: True where the query at slot slots[b, q] does not read the key at slot keys[s]."""
    num_bits = torch.frexp(visible.clamp(min=1).double()).exponent
    bit = keys[None, None] - (slots - num_bits + 1)[:, :, None]
    is_set = (visible[:, :, None] >> bit.clamp(0, 62)) & 1 > 0
    in_window = (visible[:, :, None] >= 0) & (bit >= 0)
    return (keys[None, None] > slots[:, :, None]) | (in_window & ~is_set)


def outside_window(hidden: torch.Tensor, window: int | torch.Tensor) -> torch.Tensor:
    """Hide all but the last `window` keys that each query reads, or no keys if `window` is 0. (B, Q, 1): each query's.

    `hidden` (B, Q, S) bool: the keys hidden so far. The n-th key that a query reads has position n, even if a
    draft tree's unread siblings lie between the keys."""
    if isinstance(window, int) and window == 0:
        return hidden
    nth = (~hidden).cumsum(dim=-1)
    return hidden | (nth <= nth[..., -1:] - window)


def rope_of(tables: RopeTables, positions: torch.Tensor) -> RopeTables:
    """Return cos and sin, (T, 1, D // 2)."""
    return tables[0][positions][:, None], tables[1][positions][:, None]
