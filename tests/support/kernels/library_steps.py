"""Steps of every kind for the attention of one of the library's layers, and the textbook's result."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from shared.kernel.attention.attention import AttentionInputs, hidden_keys, outside_window
from shared.kernel.code.quantized import DTYPES, dequantize, quantize
from shared.kernel.code.step_layout import HostLengths, Layout
from shared.kv.pool import KVPool
from shared.model.library.attend.attention import PagedAttention
from shared.model.library.attend.layer_places import LatentHeads, LayerShape, places_of
from tests.support.cores.draft_trees import depths, draw_parents, visible_bits

PAGE, PAGES_OF_ROW, HEADS = 4, 30, 4
SPARE = 23  # tokens by which the host's bound exceeds the longest row
PLAIN = LayerShape(2, 16, 16, torch.float32)


@dataclass(frozen=True)
class DrawnStep:
    """Rows of (tokens before, tokens); `trees`: each row's tokens are a draft tree; `running`: rows that decode."""

    rows: tuple[tuple[int, int], ...]
    trees: bool = False
    running: int = 0


STEPS = {
    "decode": DrawnStep(((0, 1), (7, 1), (64, 1), (21, 1)), running=4),
    "verify": DrawnStep(((5, 4), (40, 4), (0, 4)), running=3),
    "trees": DrawnStep(((5, 7), (40, 7)), trees=True, running=2),
    "chunks and decode": DrawnStep(((0, 19), (9, 3), (30, 1), (4, 1)), running=2),
}
LAYERS = {
    "plain": PLAIN,
    "window": replace(PLAIN, window=6),
    "chunks": replace(PLAIN, window=6, in_chunks=True),
    "shared keys": replace(PLAIN, num_kv_heads=1, window=20),
    "softcap": PLAIN,
    "sinks, window": replace(PLAIN, window=9),
    "sinks, softcap": replace(PLAIN, num_kv_heads=1),
    "narrow values": replace(PLAIN, value_size=8),
    "latents": LayerShape(1, 24, 8, torch.float32, latent=LatentHeads(HEADS, 12, 10)),
}


class LayerAttention(torch.nn.Module):
    """What attention reads of a layer's module."""

    def __init__(self, layer: LayerShape) -> None:
        super().__init__()
        self.layer_idx = 0
        if layer.latent is not None:
            made = layer.latent.num * (layer.latent.key_size + layer.latent.value_size)
            torch.manual_seed(5)
            self.kv_b_proj = torch.nn.Linear(layer.key_size, made, bias=False)


@dataclass(frozen=True)
class Attended:
    """`out` (T, heads, value_size) of the last step, and what each step was given: q, k, v are (T, heads, size)."""

    out: torch.Tensor
    given: list[tuple[AttentionInputs, tuple[torch.Tensor, ...]]]


def arguments_of(name: str) -> dict[str, Any]:
    """What a layer of this name gives attention beside queries, keys and values."""
    more: dict[str, Any] = {"scaling": 0.31}
    if "softcap" in name:
        more["softcap"] = 1.5
    if "sinks" in name:
        more["s_aux"] = torch.tensor([-2.0, 0.5, 3.0, 100.0])
    return more


def inputs_of(step: DrawnStep, rng: random.Random, *, exact: bool) -> AttentionInputs:
    lens, befores = [num for _, num in step.rows], [before for before, _ in step.rows]
    bounds = np.cumsum([0, *lens]).astype(np.int32)
    table = 1 + torch.randperm(len(lens) * PAGES_OF_ROW, generator=torch.Generator().manual_seed(4)).int()
    parents = [draw_parents(rng, num) if step.trees else list(range(num - 1)) for num in lens]
    slots = torch.cat([before + torch.arange(num) for before, num in step.rows])
    longest = max(map(sum, step.rows))
    return AttentionInputs(
        torch.cat([before + torch.tensor(depths(of)) for before, of in zip(befores, parents, strict=True)]),
        Layout(
            torch.from_numpy(bounds), (table.view(len(lens), PAGES_OF_ROW),), max(lens), longest + SPARE * (not exact),
            host=HostLengths(bounds, np.asarray(befores) if exact else None, step.running),
        ),
        slots if step.trees else None,
        torch.cat([visible_bits(of) for of in parents]) if step.trees else None,
    )  # fmt: skip


def attended(own: PagedAttention, name: str, step: DrawnStep, kv: str, *, exact: bool) -> Attended:
    """Attend in the step after what rows have before it. `name`: says what the layer asks for."""
    (layer,) = own.layers
    pool, draw, given = empty_pool(layer, len(step.rows), kv), torch.Generator().manual_seed(7), []
    before = DrawnStep(tuple((0, start) for start, _ in step.rows if start))
    steps = [replace_table(inputs_of(before, random.Random(1), exact=exact), step)] if before.rows else []
    for inputs in (*steps, inputs_of(step, random.Random(1), exact=exact)):
        given.append((inputs, drawn_qkv(layer, len(inputs.positions), draw)))
        out = attended_once(own, pool, *given[-1], name)
    pool.close()
    return Attended(out, given)


def empty_pool(layer: LayerShape, num_rows: int, kv: str) -> KVPool:
    """Return a pool that holds no number yet, only NaN."""
    planes = places_of([layer]).specs(PAGE, kv)
    pool = KVPool(planes, 1 + num_rows * PAGES_OF_ROW, PAGE)
    for plane in planes:
        numbers = pool.plane(plane.name)
        numbers.fill_(float("nan") if numbers.dtype.is_floating_point else 0)
    return pool


def drawn_qkv(layer: LayerShape, num_tokens: int, draw: torch.Generator) -> tuple[torch.Tensor, ...]:
    query_size = layer.key_size if layer.latent is None else layer.latent.key_size + layer.value_size
    heads = ((HEADS, query_size), (layer.num_kv_heads, layer.key_size), (layer.num_kv_heads, layer.value_size))
    return tuple(
        torch.randn(num, num_tokens, size, generator=draw).to(layer.dtype).transpose(0, 1) for num, size in heads
    )


def attended_once(
    own: PagedAttention, pool: KVPool, inputs: AttentionInputs, qkv: tuple[torch.Tensor, ...], name: str
) -> torch.Tensor:
    """Return (T, heads, value_size)."""
    own.begin(inputs, pool)
    q, k, v = (one.transpose(0, 1)[None] for one in qkv)
    return own(LayerAttention(own.layers[0]), q, k, v, None, **arguments_of(name))[0][0].detach()


def replace_table(inputs: AttentionInputs, step: DrawnStep) -> AttentionInputs:
    """Give the rows that have tokens before the step the pages that they have in it."""
    (table,) = inputs_of(step, random.Random(1), exact=True).layout.page_tables
    own = table[[number for number, (start, _) in enumerate(step.rows) if start]]
    return replace(inputs, layout=replace(inputs.layout, page_tables=(own,)))


def by_hand(of: Attended, layer: LayerShape, name: str, step: DrawnStep, kv: str) -> torch.Tensor:
    """Return what `of.out` should be, in float64. Bytes are what `quantize` says."""
    (_, (_, *before)), (inputs, (q, *new)) = of.given
    found, old_start, start = [], 0, 0
    for num_before, num in step.rows:
        own = slice(start, start + num)
        k, v = (
            as_stored(torch.cat((old[old_start : old_start + num_before], late[own])), kv)
            for old, late in zip(before, new, strict=True)
        )
        visible = torch.full((num,), -1) if inputs.visible is None else inputs.visible[own]
        hidden = hidden_keys(torch.arange(len(k)), inputs.key_slots[own][None], visible[None])
        read = inputs.positions[own][None, :, None] % layer.window + 1 if layer.in_chunks else layer.window
        hidden = outside_window(hidden, read)[0]
        numbers = torch.arange(len(k))
        hidden |= (numbers < layer.num_unread) & (numbers != inputs.key_slots[own][:, None])
        found.append(textbook(q[own].double(), k, v, hidden, **arguments_of(name)))
        start, old_start = start + num, old_start + num_before
    return torch.cat(found)


def as_stored(x: torch.Tensor, kv: str) -> torch.Tensor:
    return x.double() if kv == "auto" else dequantize(*quantize(x, DTYPES[kv])).double()


def textbook(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hidden: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(hidden, float("-inf"))
    if s_aux is not None:
        weights = torch.cat((weights, s_aux.double()[:, None, None].expand(-1, len(q), 1)), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights.softmax(-1)[..., : k.shape[0]], v)
