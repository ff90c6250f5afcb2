"""The attention that the library's layers call: write a step's keys and values to pages, then attend over pages.

    plane:  [page][layer][slot][kv_heads * key_size, then kv_heads * value_size]
    scales (--kv-dtype int8 or fp8, where the plane holds bytes):  [page][layer][slot][kv_heads of keys, then of values]

Layers with latents (latents.py) have one such head, of a latent and a rotated part. The library has already rotated
queries and keys. On a CPU our kernels attend (compiled_attention.py), on a GPU device_attention.py. The rest is plain
torch: heads that our kernels don't know, what CompiledAttention leaves to torch, and latents. Chunks attend one by one,
and neighbouring rows with equally many tokens together. The host cuts rows to their exact lengths. Bytes are widened
after they have been gathered.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from shared.kernel.attention.attention import (
    MOST_NUMBERS,
    AttentionInputs,
    hidden_keys,
    outside_window,
)
from shared.kv.pool import KVPool
from shared.model.library.attend.indexer import NO_MASK, ChosenKeys, Indexer
from shared.model.library.attend.latents import LatentWeights
from shared.model.library.attend.layer_pages import PagesOfLayer, ReadKeys
from shared.model.library.attend.layer_places import LayerShape, ModelPlaces, Scoring, places_of
from shared.model.library.attend.step_rows import StepRows, rows_of
from shared.model.math.interface import LayerMarks

if TYPE_CHECKING:  # it imports numba
    from shared.model.library.attend.compiled_attention import CompiledAttention


class PagedAttention:
    """`begin` starts a step; then the library calls the object for each layer, in the same order each time."""

    gathers = True  # keys of every row, as many as of the longest: as of AttentionBackend
    is_divided = False  # among ranks

    def __init__(
        self,
        layers: Sequence[LayerShape],
        kv_dtype: str = "auto",
        places: ModelPlaces | None = None,
        compiled: CompiledAttention | None = None,
        called: Sequence[int] | None = None,
    ) -> None:
        """`kv_dtype`: of ModelSpec. `places`: None means `places_of` the layers. `compiled`: attends, with torch's
        help; None: torch does it alone. `called`: which layer makes each call; None: each makes one, in order."""
        self._has_bytes, self._compiled = kv_dtype != "auto", compiled
        self.places = places or places_of(layers)
        self.layers = tuple(layers)
        self._own = self.layers  # with the heads that this rank has
        self._columns: tuple[tuple[slice, ...], ...] = ((slice(None),),) * len(self.layers)  # of their numbers
        self._marked_late = 0  # by how many layers
        self._calls: dict[int, list[int]] = {}  # by layer
        for call, layer in enumerate(range(len(layers)) if called is None else called):
            self._calls.setdefault(layer, []).append(call)

    @property
    def needs_cpu_seq_lens(self) -> bool:
        return self._compiled is None

    @property
    def mask(self) -> torch.Tensor | None:
        """Return what layers with indexers get as their mask, of which they take a part for it. Nothing reads it."""
        return NO_MASK if self.places.index is not None else None

    def begin(self, inputs: AttentionInputs, kv: KVPool, marks: LayerMarks | None = None) -> None:
        self._inputs, self._page_size, self._marks = inputs, kv.page_size, marks
        planes = range(len(self.places.planes))
        self._planes = [kv.plane(self.places.plane_name(plane)) for plane in planes]
        self._scales = [kv.plane(self.places.scales_name(plane)) for plane in planes] if self._has_bytes else None
        self._chosen = ChosenKeys(self.places, kv, self._has_bytes) if self.places.index is not None else None
        self._begun_calls: Counter[int] = Counter()  # by layer
        self._keys: dict[tuple[int, ...], ReadKeys] = {}
        if self._compiled is not None:
            self._compiled.begin(inputs)
        if self._compiled is None or self._compiled.may_leave_step:
            self._rows = self._rows_of(inputs)
            self._written = [self._find_places(group) for group in range(len(self.places.windows))]

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
        layer = int(cast(int, module.layer_idx))
        index = self._calls[layer][self._begun_calls[layer]]
        self._begun_calls[layer] += 1
        scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
        return self._answer(module, index, query, key, value, scoring), None

    def _answer(
        self,
        module: torch.nn.Module,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Return (1, T, heads, size). `index`: of the call. Tensors: as of `__call__`."""
        place = self.places.layers[index]
        number = self.places.plane_of[index]
        plane = self._planes[number][:, place.slot]
        scales = None if self._scales is None else self._scales[number][:, place.slot]
        planes = tuple(plane[:, :, part] for part in self._columns[index])
        pages = PagesOfLayer(self._own[index], place.group, planes, scales)
        q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
        return self._write_and_attend(module, index, pages, q, k, v, scoring)[None]

    def _write_and_attend(
        self,
        module: torch.nn.Module,
        index: int,
        pages: PagesOfLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        if self._compiled is not None and not self._compiled.leaves_layer(q.dtype, scoring):
            out = self._compiled.attend(pages, q, k, v, scoring)
            self._mark_written(index)
            return out
        pages.write(*self._written[pages.group], k, v)
        self._mark_written(index)
        if pages.layer.latent is not None:
            return self._attend_latents(pages, self._weights_of(module, index), q, scoring)
        return self._attend_all(pages, q, scoring)

    def choose(self, indexer: Indexer, given: Mapping[str, Any]) -> torch.Tensor:
        """Write the keys of a layer's indexer, and choose what its layer reads, and the ones behind without an indexer.

        given: the arguments of the indexer's forward. The library passes the result on, unread."""
        assert self._chosen is not None
        (index,) = self._calls[indexer.layer]
        layer, group = self._own[index], self.places.layers[index].group
        dtype: torch.dtype = given["hidden_states"].dtype
        self._chosen.choose(
            indexer,
            self.places.index_slots[index],
            given,
            self._rows,
            self._written[group],
            lambda rows: self._find_keys(rows, layer, group, dtype),
        )
        return self._chosen.mark

    @property
    def offsets(self) -> torch.Tensor:
        """(T,) int64: positions of the step's tokens, less their places in it."""
        positions = self._inputs.positions
        return positions - torch.arange(len(positions), device=positions.device)

    def _mark_written(self, layer: int) -> None:
        if self._marks is not None and layer >= self._marked_late:
            self._marks.reached(self.places.layers[layer - self._marked_late].num_whole)

    def _rows_of(self, inputs: AttentionInputs) -> list[StepRows]:
        return rows_of(inputs)

    def _find_places(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's page in a page group, and its slot there, (T,) int64."""
        layout, slots = self._inputs.layout, self._inputs.key_slots
        lens = torch.diff(layout.cu_q_lens)
        row = torch.repeat_interleave(torch.arange(len(lens), device=lens.device), lens, output_size=len(slots))
        return layout.page_tables[group][row, slots // self._page_size].long(), slots % self._page_size

    def _attend_all(self, pages: PagesOfLayer, queries: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Return (T, heads, value_size). queries: (T, heads, key_size)."""
        parts = [self._attend(pages, rows, queries[rows.start : rows.stop], scoring) for rows in self._rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(self, pages: PagesOfLayer, rows: StepRows, q: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Return (B * Q, heads, value_size). q: (B * Q, heads, key_size)."""
        keys = self._keys_of(rows, pages.layer, pages.group, q.dtype)
        return attend_rows(q, *pages.read(keys, q.dtype), keys.mask, scoring)

    def _weights_of(self, module: torch.nn.Module, index: int) -> LatentWeights:
        """Return those of the heads whose queries come."""
        heads = self.layers[index].latent
        assert heads is not None
        return LatentWeights.of_layer(module, heads)

    def _attend_latents(
        self, pages: PagesOfLayer, weights: LatentWeights, queries: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Return (T, heads, value_size). queries: (T, heads, key_size + rope).

        Neighbouring rows are absorbed together, because weights are larger than what most rows read."""
        layer, found = pages.layer, []

        def is_absorbed(rows: StepRows) -> bool:
            return weights.prefers_absorbed(rows.num_queries, max(rows.lengths), layer.value_size)

        for absorbed, group in itertools.groupby(self._rows, is_absorbed):
            joined = tuple(group)
            start = joined[0].start
            own = queries[start : joined[-1].stop]
            if absorbed:
                own = weights.absorb(own)
            parts = []
            for rows in joined:
                q = own[rows.start - start : rows.stop - start]
                keys = self._keys_of(rows, layer, pages.group, q.dtype)
                (latents,) = pages.read_numbers(keys, q.dtype)
                if absorbed:
                    # As wide as keys, values need no copy: outputs of rotated parts are cut off.
                    parts.append(attend_rows(q, latents[:, None], latents[:, None], keys.mask, scoring))
                    continue
                heads = [
                    attend_rows(q[:, these], k, v, keys.mask, scoring)
                    for these, k, v in weights.expanded(latents, MOST_NUMBERS)
                ]
                parts.append(torch.cat(heads, dim=1))
            out = torch.cat(parts)
            found.append(weights.values_of(out) if absorbed else out)
        return torch.cat(found)

    def _keys_of(self, rows: StepRows, layer: LayerShape, group: int, dtype: torch.dtype) -> ReadKeys:
        """All layers of a page group with the same window share the result, or all that read the same choice."""
        if layer.num_chosen and self._chosen is not None:
            return self._chosen.keys_of(rows)
        kind = (rows.first, layer.window, layer.in_chunks, layer.num_unread, group)
        found = self._keys.get(kind)
        if found is None:
            found = self._keys[kind] = self._find_keys(rows, layer, group, dtype)
        return found

    def _find_keys(self, rows: StepRows, layer: LayerShape, group: int, dtype: torch.dtype) -> ReadKeys:
        window, size = layer.window, self._page_size
        num_rows, num_queries = len(rows.lengths), rows.num_queries
        befores = [length - num_queries for length in rows.lengths]
        firsts = [max(0, before + 1 - window) if window else 0 for before in befores]  # no query reads a key before it
        firsts = [before - before % window for before in befores] if layer.in_chunks else firsts
        firsts = [max(first, min(before, layer.num_unread)) for first, before in zip(firsts, befores, strict=True)]
        num = max(length - first for length, first in zip(rows.lengths, firsts, strict=True))
        table = self._inputs.layout.page_tables[group][rows.first : rows.first + num_rows].long()
        first, length = torch.tensor([firsts, rows.lengths], device=table.device)[:, :, None]
        nth = torch.arange(num, device=table.device)
        read = (first + nth).minimum(length - 1)
        pages, slots = table.gather(1, read // size), read % size
        if num_rows == num_queries == 1:
            return ReadKeys(pages, slots, None)
        return ReadKeys(pages, slots, self._mask_of(rows, layer, first, num, dtype))

    def _mask_of(
        self, rows: StepRows, layer: LayerShape, first: torch.Tensor, num: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return ReadKeys.mask. first: (B, 1) int64, each row's first key."""
        tokens, visible = slice(rows.start, rows.stop), self._inputs.visible
        own = self._inputs.key_slots[tokens].view(len(rows.lengths), -1) - first
        seen = torch.full_like(own, -1) if visible is None else visible[tokens].view_as(own)
        nth = torch.arange(num, device=own.device)
        positions = self._inputs.positions[tokens].view_as(own)[..., None]
        window = positions % layer.window + 1 if layer.in_chunks else layer.window
        hidden = outside_window(hidden_keys(nth, own, seen), window)
        if layer.num_unread:
            hidden |= (nth + first < layer.num_unread)[:, None] & (nth != own[..., None])
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
        return mask[:, None]


def attend_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """Return (B * Q, heads, value_size). q (B * Q, heads, D), k and v (B, kv_heads, S, size), mask as of ReadKeys.

    All heads that share keys attend together, as if they were more queries: nothing is copied for them."""
    num_rows, num_kv_heads, num_keys = k.shape[:3]
    by_row = q.view(num_rows, -1, num_kv_heads, q.shape[1] // num_kv_heads, q.shape[2])
    if by_row.shape[1] == 1:
        wide = None if mask is None else mask.expand(-1, -1, by_row.shape[3], -1)
        return attend(by_row[:, 0], k, v, wide, scoring).flatten(1, 2)
    most = max(1, MOST_NUMBERS // (num_rows * q.shape[1] * num_keys))  # queries of a row at a time
    parts: list[torch.Tensor] = []
    for queries in by_row.split(most, 1):
        first, (num, _, group) = sum(part.shape[1] for part in parts), queries.shape[1:4]
        wide = None if mask is None else mask[:, :, first : first + num].repeat(1, 1, group, 1)
        out = attend(queries.permute(0, 2, 3, 1, 4).flatten(2, 3), k, v, wide, scoring)
        parts.append(out.unflatten(2, (group, num)).permute(0, 3, 1, 2, 4))
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return whole.flatten(2, 3).flatten(0, 1)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """Return (B, H, Q, value_size).

    q (B, H, Q, D), k and v (B, H, S, size), mask (B, 1, Q, S), which is added to scores."""
    if scoring.is_plain:
        missing = k.shape[3] - v.shape[3]  # torch is several times as fast with keys and values of one size
        wide = pad(v, (0, missing)) if missing > 0 else v
        out: torch.Tensor = scaled_dot_product_attention(q, k, wide, attn_mask=mask, scale=scoring.scale)
        return out[..., : v.shape[3]]
    scores = torch.matmul(q.float(), k.transpose(2, 3).float()) * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is not None:
        scores = scores + mask
    if scoring.sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        sinks = scoring.sinks.float().view(q.shape[1], -1)  # (H, heads that share a key head)
        sinks = sinks.repeat_interleave(q.shape[2] // sinks.shape[1], dim=1)[..., None].expand(len(q), -1, -1, 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    return torch.matmul(weights, v.float()).to(q.dtype)
