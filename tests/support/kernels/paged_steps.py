"""Steps of several rows over one layer of a pool in which only what a step reads has been written."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch

from shared.kernel.attention.attention import (
    AttentionBackend,
    AttentionInputs,
    AttentionShape,
    RopeTables,
    page_hadamard,
)
from shared.kernel.attention.rope import inverse_frequencies, rope_tables
from shared.kernel.code.quantized import DTYPES, quantize
from shared.kernel.code.step_layout import Layout
from shared.kernel.product.block_weights import hadamard
from tests.support.cores.draft_trees import depths, draw_parents, visible_bits

MAX_LEN = 700
LAYERS, LAYER = 3, 1
DEVICE_INPUTS = ("positions", "slots", "visible")
POISON = 0x5B  # a byte that was not written; the scales are no numbers


@dataclass(frozen=True)
class Row:
    start: int  # tokens written before
    num: int  # tokens of the step
    is_tree: bool = False
    is_padding: bool = False  # page 0 only, from its first slot


@dataclass
class Step:
    """What a backend gets, and gives back of the rows that are no padding."""

    shape: AttentionShape
    inputs: AttentionInputs
    qkv: torch.Tensor
    kv: torch.Tensor
    scales: torch.Tensor | None
    norms: tuple[torch.Tensor | None, torch.Tensor | None]
    is_real: torch.Tensor  # (T,) bool

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        """The real tokens' results; a pool of its own is written to: see `pages`."""
        kv, self.scales_after = self.kv.clone(), None if self.scales is None else self.scales.clone()
        backend.begin(self.inputs, kv, self.scales_after)
        out = backend.attend(LAYER, self.qkv, *self.norms)[self.is_real].clone()
        self.kv_after = kv
        return out

    def to(self, device: torch.device) -> Step:
        """Return a copy whose tensors are on `device`; what the host knows stays there."""
        layout = self.inputs.layout.with_arrays({n: on(one, device) for n, one in self.inputs.layout.arrays().items()})
        moved = {name: on(getattr(self.inputs, name), device) for name in DEVICE_INPUTS} | {"layout": layout}
        norms = (on(self.norms[0], device), on(self.norms[1], device))
        qkv, kv, scales, is_real = (on(value, device) for value in (self.qkv, self.kv, self.scales, self.is_real))
        return Step(self.shape, replace(self.inputs, **moved), qkv, kv, scales, norms, is_real)

    def pages(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The bits of the pool after the last run, but for page 0, and the scales."""
        return self.kv_after[1:].view(torch.uint8), None if self.scales_after is None else self.scales_after[1:]


def on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def tables_of(shape: AttentionShape, theta: float = 10000.0, num: int = MAX_LEN) -> RopeTables:
    """Of `num` positions."""
    return rope_tables(inverse_frequencies(shape.head_dim, theta), num)


def make_step(
    shape: AttentionShape,
    rows: list[Row],
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    pages: str = "",
    norms: bool = False,
    seed: int = 1,
) -> Step:
    """`pages`: int8 or fp8, else as dtype."""
    draw, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    most = max(row.start + row.num for row in rows)
    per_row = -(-most // page_size) + 1
    order = 1 + torch.randperm(len(rows) * per_row, generator=draw).to(torch.int32).view(len(rows), per_row)
    table = torch.stack([line * (not row.is_padding) for line, row in zip(order, rows, strict=True)])
    kv, scales = make_pool(shape, 1 + len(rows) * per_row, page_size, dtype, pages)
    for row, line in zip(rows, table, strict=True):
        write_before(shape, row, line, kv, scales, draw)
    parents = [draw_parents(rng, row.num) if row.is_tree else None for row in rows]
    starts = [0 if row.is_padding else row.start for row in rows]
    slots = torch.cat([start + torch.arange(row.num) for start, row in zip(starts, rows, strict=True)])
    depth = [
        torch.arange(row.num) if of is None else torch.tensor(depths(of)) for of, row in zip(parents, rows, strict=True)
    ]
    visible = [
        torch.full((row.num,), -1) if of is None else visible_bits(of) for of, row in zip(parents, rows, strict=True)
    ]
    lens = torch.tensor([0, *(row.num for row in rows)])
    has_tree = any(row.is_tree for row in rows)
    columns = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    weights = (torch.linspace(0.5, 1.5, shape.head_dim), torch.linspace(1.2, 0.7, shape.head_dim))
    return Step(
        shape,
        AttentionInputs(
            positions=torch.cat([start + of for start, of in zip(starts, depth, strict=True)]),
            layout=Layout(
                cu_q_lens=lens.cumsum(0).to(torch.int32),
                page_tables=(table,),
                max_q_len=int(lens.max()),
                max_seq_len=most,
            ),
            slots=slots if has_tree else None,
            visible=torch.cat(visible) if has_tree else None,
        ),
        torch.randn(len(slots), columns, generator=draw).to(dtype),
        kv,
        scales,
        weights if norms else (None, None),
        torch.cat([torch.full((row.num,), not row.is_padding) for row in rows]),
    )


def make_pool(
    shape: AttentionShape, num_pages: int, page_size: int, dtype: torch.dtype, pages: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Nothing in it is written."""
    plane = (num_pages, LAYERS, 2, shape.num_kv_heads, page_size, shape.head_dim)
    if not pages:
        return torch.full(plane, float("nan"), dtype=dtype), None
    return torch.full(plane, POISON, dtype=torch.uint8).view(DTYPES[pages]), torch.full(plane[:-1], float("nan"))


def write_before(
    shape: AttentionShape,
    row: Row,
    line: torch.Tensor,
    kv: torch.Tensor,
    scales: torch.Tensor | None,
    draw: torch.Generator,
) -> None:
    """The keys and values of the tokens before the step."""
    slots = torch.arange(0 if row.is_padding else row.start)
    page, slot = line[slots // kv.shape[4]].long(), slots % kv.shape[4]
    for half in (0, 1):
        values = torch.randn(len(slots), kv.shape[3], kv.shape[5], generator=draw)
        size = page_hadamard(shape, kv.dtype)
        if size > 1 and half == 0:
            values = hadamard(values, size) / size
        if scales is not None:
            values, scales[page, LAYER, half, :, slot] = quantize(values, kv.dtype)
        kv[page, LAYER, half, :, slot] = values.to(kv.dtype)


def token_by_token(kv: torch.Tensor | None) -> Any:
    """Copy a layer's kv (pages, 2, heads, slots, D), or its scales, to pages that hold one token after the other."""
    if kv is None:
        return None
    rest = range(4, kv.dim())
    return kv.permute(0, 3, 1, 2, *rest).contiguous().permute(0, 2, 3, 1, *rest)


def bounded(step: Step, max_seq_len: int) -> Step:
    """The same with another bound of the host's."""
    return replace(step, inputs=replace(step.inputs, layout=replace(step.inputs.layout, max_seq_len=max_seq_len)))
