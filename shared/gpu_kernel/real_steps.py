"""Define the steps (on the "meta" device) for which attention's kernels are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from shared.gpu_kernel.launch.real_models import REAL_MODELS, RealModel
from shared.gpu_kernel.launch.signatures import REAL_BATCH, REAL_CONTEXT, REAL_DTYPES
from shared.gpu_kernel.paged_step import Layer, Rows
from shared.gpu_kernel.places import Places
from shared.kernel.attention.attention import AttentionShape

PAGE_SIZE = 16
NUM_PAGES, NUM_LAYERS = 64, 2
META = torch.device("meta")


@dataclass(frozen=True)
class RealStep:
    model: RealModel
    dtype: torch.dtype = torch.bfloat16
    pages: torch.dtype | None = None  # int8 or fp8; None: `dtype`
    trees: bool = False
    window: int = 0
    context: int = REAL_CONTEXT
    by_token: bool = False  # pages as of models that the library transformers runs; not with bytes
    softcap: float = 0.0  # with `by_token`, as `sinks`
    sinks: bool = False

    @property
    def shape(self) -> AttentionShape:
        model = self.model
        windows = (self.window,) if self.window else ()
        return AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim, eps=1e-5, windows=windows)

    @property
    def layer(self) -> Layer:
        model = self.model
        if self.by_token:
            numbers = 2 * model.num_kv_heads * model.head_dim
            tokens = torch.empty(NUM_PAGES, NUM_LAYERS, PAGE_SIZE, numbers, dtype=self.dtype, device=META)
            sinks = torch.empty(model.num_heads, dtype=self.dtype, device=META) if self.sinks else None
            scoring = model.head_dim**-0.5, self.softcap, sinks
            return Layer.of_tokens(tokens[:, 1], None, model.num_kv_heads, self.window, *scoring)
        shape = (NUM_PAGES, NUM_LAYERS, 2, model.num_kv_heads, PAGE_SIZE, model.head_dim)
        kv = torch.empty(shape, dtype=self.pages or self.dtype, device=META)
        scales = None if self.pages is None else torch.empty(shape[:-1], dtype=torch.float32, device=META)[:, 1]
        return Layer(kv[:, 1], scales, self.window, model.head_dim**-0.5)

    @property
    def rows(self) -> Rows:
        table = torch.empty(REAL_BATCH, self.context // PAGE_SIZE, dtype=torch.int32, device=META)
        bounds = torch.empty(REAL_BATCH + 1, dtype=torch.int32, device=META)
        visible = torch.empty(REAL_BATCH, dtype=torch.int64, device=META) if self.trees else None
        return Rows(bounds, table, visible, 0, REAL_BATCH, 0, REAL_BATCH, 1, self.context)

    @property
    def places(self) -> Places:
        return Places(*torch.empty(4, REAL_BATCH, dtype=torch.int32, device=META).unbind(0))

    @property
    def queries(self) -> torch.Tensor:
        return torch.empty(REAL_BATCH, self.model.num_heads, self.model.head_dim, dtype=self.dtype, device=META)


def real_steps() -> Iterator[RealStep]:
    """Yield steps of every model in bfloat16, and all other variants of one model."""
    steps = [RealStep(model) for model in REAL_MODELS]
    usual = RealStep(next(model for model in REAL_MODELS if model.head_dim == 128))
    for dtype in REAL_DTYPES:
        steps += [replace(usual, dtype=dtype, trees=trees) for trees in (False, True)]
    for pages in (torch.int8, torch.float8_e4m3fn):
        steps += [replace(usual, pages=pages, trees=trees) for trees in (False, True)]
    steps += [replace(usual, trees=trees, window=4096) for trees in (False, True)]
    for window in (0, 4096):
        by_token = [replace(usual, trees=trees, window=window, by_token=True) for trees in (False, True)]
        steps += by_token + [replace(step, softcap=50.0) for step in by_token]
        steps += [replace(step, sinks=True) for step in by_token]
    for step in steps:
        yield step
        yield replace(step, context=PAGE_SIZE)
