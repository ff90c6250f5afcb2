"""The attention that the library's layers call: write the step's keys and values to pages, then attend row by row.

    plane of a group:  [page][layer][slot][kv_heads * key_size, then kv_heads * value_size]

The library has already rotated queries and keys. This is plain torch. It loops over rows on the host, so it needs exact
lengths there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn.functional import scaled_dot_product_attention

from shared.kernel.attention import AttentionInputs, hidden_keys, outside_window
from shared.kernel.step_layout import Layout
from shared.kv.layout import KIND_WHOLE, KIND_WINDOW, GroupSpec, PlaneSpec
from shared.kv.pool import KVPool
from shared.model.interface import LayerMarks


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a layer keeps per token, and how many tokens it reads (0: all), its own included."""

    num_kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    window: int = 0

    def __str__(self) -> str:
        window = f", and a window of {self.window}" if self.window else ""
        return f"{self.num_kv_heads} heads of keys of {self.key_size} and values of {self.value_size}{window}"

    @property
    def sizes(self) -> tuple[int, int, int, torch.dtype]:
        return self.num_kv_heads, self.key_size, self.value_size, self.dtype


def group_specs(layers: Sequence[LayerShape], page_size: int) -> tuple[GroupSpec, ...]:
    """Return one group for each key and value size, in the order of their first layers."""
    groups = []
    for number, sizes in enumerate(dict.fromkeys(layer.sizes for layer in layers)):
        windows = [layer.window for layer in layers if layer.sizes == sizes]
        num_kv_heads, key_size, value_size, dtype = sizes
        shape = (len(windows), page_size, num_kv_heads * (key_size + value_size))
        window = max(windows) if all(windows) else 0
        plane = PlaneSpec(plane_name(number), shape, dtype, window=window)
        groups.append(GroupSpec((plane,), window, KIND_WINDOW if window else KIND_WHOLE))
    return tuple(groups)


def plane_name(group: int) -> str:
    return f"kv{group}"


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer turns products of queries and keys into weights."""

    scale: float
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: torch.Tensor | None = None  # (heads,): a score without a value, in each softmax

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True, slots=True)
class StepRow:
    """A row's tokens [start, stop) of the step. With them it has `length` tokens."""

    number: int
    start: int
    stop: int
    length: int

    @property
    def num_before(self) -> int:
        return self.length - (self.stop - self.start)


@dataclass(frozen=True, slots=True)
class ReadKeys:
    """The keys that a row reads: slots [first, first + num) of its `pages`."""

    pages: torch.Tensor  # (P,) int64
    first: int
    num: int
    mask: torch.Tensor | None  # (Q, num) bool, True where a query reads a key; None: all read all


class PagedAttention:
    """`begin` starts a step; then the library calls the object once per layer, in the layers' order."""

    needs_cpu_seq_lens = True

    def __init__(self, layers: Sequence[LayerShape]) -> None:
        kinds = list(dict.fromkeys(layer.sizes for layer in layers))
        self._layers = tuple(layers)
        self._groups = [kinds.index(layer.sizes) for layer in layers]
        self._places = [self._groups[:index].count(group) for index, group in enumerate(self._groups)]  # in its group

    def begin(self, inputs: AttentionInputs, kv: KVPool, marks: LayerMarks | None = None) -> None:
        layout, slots = inputs.layout, inputs.key_slots
        self._inputs, self._page_size, self._marks = inputs, kv.page_size, marks
        self._planes = [kv.plane(plane_name(group)) for group in range(1 + max(self._groups))]
        self._rows = rows_of(layout)
        lens = torch.diff(layout.cu_q_lens)
        row = torch.repeat_interleave(torch.arange(len(lens), device=lens.device), lens, output_size=len(slots))
        self._write_page = layout.page_table[row, slots // kv.page_size].long()
        self._write_slot = slots % kv.page_size
        self._keys: dict[tuple[int, int], ReadKeys] = {}

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend for a flat batch. query, key, value: (1, heads or kv_heads, T, size). Return (1, T, heads, size).

        The survey has seen all other arguments, and has refused any that would change the result."""
        index = int(cast(int, module.layer_idx))
        place = self._places[index]
        plane = self._planes[self._groups[index]][:, place]
        written = torch.cat((key[0].transpose(0, 1).flatten(1), value[0].transpose(0, 1).flatten(1)), dim=1)
        plane[self._write_page, self._write_slot] = written
        if self._marks is not None and self._groups[index] == 0:  # only its layers travel before the step ends
            self._marks.reached(place + 1)
        scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
        queries = query[0].transpose(0, 1)
        layer = self._layers[index]
        parts = [self._attend(layer, plane, row, queries[row.start : row.stop], scoring) for row in self._rows]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None

    def _attend(
        self, layer: LayerShape, plane: torch.Tensor, row: StepRow, q: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Return (Q, heads, value_size). q: (Q, heads, key_size).

        All heads that share keys attend together, as if they were more queries: nothing is copied for them."""
        keys = self._keys_of(row, layer.window)
        both = plane[keys.pages].flatten(0, 1)[keys.first : keys.first + keys.num]
        k, v = both.split((layer.num_kv_heads * layer.key_size, layer.num_kv_heads * layer.value_size), dim=1)
        k, v = (one.unflatten(1, (layer.num_kv_heads, -1)).transpose(0, 1) for one in (k, v))
        num_queries, num_heads = q.shape[:2]
        group = num_heads // layer.num_kv_heads
        q = q.unflatten(1, (layer.num_kv_heads, group)).permute(1, 2, 0, 3).flatten(1, 2)
        mask = None if keys.mask is None else keys.mask.repeat(group, 1)
        out: torch.Tensor = attend(q, k, v, mask, scoring).unflatten(1, (group, num_queries))
        return out.permute(2, 0, 1, 3).flatten(1, 2)

    def _keys_of(self, row: StepRow, window: int) -> ReadKeys:
        """All layers with the same window share the result."""
        found = self._keys.get((row.number, window))
        if found is None:
            found = self._keys[row.number, window] = self._find_keys(row, window)
        return found

    def _find_keys(self, row: StepRow, window: int) -> ReadKeys:
        first = max(0, row.num_before + 1 - window) if window else 0  # no query reads a key before it
        page, size = first // self._page_size, self._page_size
        pages = self._inputs.layout.page_table[row.number, page : -(-row.length // size)].long()
        mask = None
        if row.stop - row.start > 1:
            slots, visible = self._inputs.key_slots[None, row.start : row.stop], self._inputs.visible
            seen = torch.full_like(slots, -1) if visible is None else visible[None, row.start : row.stop]
            numbers = torch.arange(first, row.length, device=slots.device)
            mask = ~outside_window(hidden_keys(numbers, slots, seen), window)[0]
        return ReadKeys(pages, first - page * size, row.length - first, mask)


def rows_of(layout: Layout[torch.Tensor]) -> list[StepRow]:
    """Return the rows that have tokens. Needs exact lengths on the host."""
    host = layout.host
    assert host is not None and host.seq_lens is not None, "this attention needs exact lengths on the host"
    rows = enumerate(zip(itertools.pairwise(host.cu_q_lens.tolist()), host.seq_lens.tolist(), strict=True))
    return [StepRow(number, a, b, before + b - a) for number, ((a, b), before) in rows if b > a]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """Return (H, Q, value_size). q (H, Q, D), k and v (H, S, size), mask (Q, S), True where a query reads a key."""
    if scoring.is_plain:
        mask = None if mask is None else mask[None, None]
        out: torch.Tensor = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scoring.scale)
        return out[0]
    scores = torch.matmul(q.float(), k.transpose(1, 2).float()) * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if scoring.sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        sinks = scoring.sinks.float().view(len(q), -1)  # (H, heads that share a key head)
        sinks = sinks.repeat_interleave(q.shape[1] // sinks.shape[1], dim=1)[..., None]
        weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    return torch.matmul(weights, v.float()).to(q.dtype)
