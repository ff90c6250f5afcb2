"""Decode attention over long rows, whose keys several programs share: what every real step launches.

References are plain torch on the same device, in float64. Without a GPU, the interpreter runs rows of few keys, with
splits of 16 keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.core.sampling_params import SamplingParams
from shared.device.streams import make_streams
from shared.engine.boundary import PinnedCopies
from shared.kernel.attention import (
    AttentionInputs,
    AttentionShape,
    HostLengths,
    TorchAttention,
    hidden_keys,
    outside_window,
)
from shared.kernel.quantized import DTYPES, quantize
from shared.kv.pool import KVPool
from shared.model.interface import Model, ModelInputs
from shared.node.assemble import CoreSizes, assemble_core
from shared.node.graph_spec import GraphSpec
from shared.sched.events import Emitted
from shared.sched.settings import SchedSettings
from tests.gpu.checks.kernels import device_of, kernels
from tests.gpu.checks.rates import capture
from tests.gpu.failed_steps import no_failed_steps
from tests.gpu.place import Place
from tests.gpu.shapes import random_model, shape
from tests.support.attention_cases import shape_of
from tests.support.paged_steps import tables_of

PAGE_SIZE = 16
LAYERS, LAYER = 2, 1
MOST_CONTEXT = 131_072
HEADS = (shape_of(32, 8, 128), shape_of(16, 8, 128), shape_of(14, 2, 64), shape_of(9, 3, 64), shape_of(8, 4, 256))
TINY_HEADS = (shape_of(4, 2, 16),)
KEYS, TINY_KEYS = (257, 600, 4100, 9000, 31, 256), (17, 70, 5)
BOUNDS, TINY_BOUNDS = (16_384, MOST_CONTEXT), (128,)
# Of a row's root mean square: weights of keys and results are rounded to the dtype, everything else to float32.
FAR = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 2e-4}
FAR_IN_BYTES = 3  # times as far: mixed queries and scaled weights are rounded once more


@dataclass(frozen=True, slots=True)
class Kind:
    """The dtype of a model, of its pages ("" for the same), and the tokens of each row."""

    dtype: torch.dtype
    pages: str = ""
    queries: int = 1

    @property
    def far(self) -> float:
        return FAR[self.dtype] * (FAR_IN_BYTES if self.pages else 1)

    def __str__(self) -> str:
        return f"{self.dtype}, pages {self.pages or 'alike'}, {self.queries} tokens a row".removeprefix("torch.")


KINDS = (
    Kind(torch.bfloat16),
    Kind(torch.bfloat16, queries=4),
    Kind(torch.bfloat16, "int8"),
    Kind(torch.bfloat16, "fp8"),
    Kind(torch.float16),
)
TINY_KINDS = (Kind(torch.float32), Kind(torch.float32, "int8"))


class Exact(TorchAttention):
    """Scores, weights and sums in float64. `exact` (T, heads * D) float64: what `attend` rounds."""

    def _masked(
        self, layer: int, q: torch.Tensor, slots: torch.Tensor, visible: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        group = self._shape.num_heads // self._shape.num_kv_heads
        keys = torch.arange(k.shape[2], device=q.device)
        hidden = outside_window(hidden_keys(keys, slots, visible), self._shape.window(layer))
        of = [tensor.double().repeat_interleave(group, dim=1) for tensor in (k, v)]
        of = [tensor.masked_fill(hidden.all(dim=1)[:, None, :, None], 0) for tensor in of]
        scores = torch.matmul(q.transpose(1, 2).double(), of[0].transpose(2, 3)) * self._shape.score_scale
        weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(dim=-1)
        result = torch.matmul(weights, of[1]).transpose(1, 2)
        self.exact = torch.cat((*getattr(self, 'parts', ()), result.flatten(0, 1).flatten(1)))
        self.parts = (self.exact,)
        return result.to(q.dtype)


@contextmanager
def short_splits(place: Place, triton: ModuleType) -> Iterator[None]:
    """Where kernels are interpreted, splits of 16 keys, at most four."""
    if not place.tiny:
        yield
        return
    paged = triton.attend_windows.__globals__
    before = {name: paged[name] for name in ("SPLIT_KEYS", "MOST_SPLITS")}
    paged.update(SPLIT_KEYS=16, MOST_SPLITS=4)
    try:
        yield
    finally:
        paged.update(before)


def splits(place: Place) -> dict[str, object]:
    """Rows of up to 9,000 keys beside float64; the same bits for every bound of the longest row's length, for a row
    alone and among others, and from a captured graph."""
    triton, device = kernels(place, "attention"), device_of(place)
    figures: dict[str, object] = {}
    with short_splits(place, triton):
        for heads in TINY_HEADS if place.tiny else HEADS:
            for kind in TINY_KINDS if place.tiny else KINDS:
                told = f"{heads.num_heads}/{heads.num_kv_heads} heads of {heads.head_dim}, {kind}"
                figures[f"{told}: furthest from float64, of its size"] = one_kind(place, triton, heads, kind, device)
    return figures


def one_kind(place: Place, triton: ModuleType, heads: AttentionShape, kind: Kind, device: torch.device) -> float:
    lengths = TINY_KEYS if place.tiny else KEYS
    step = long_rows(heads, kind, lengths, device)
    tables = tuple(of.to(device) for of in tables_of(heads, num=max(lengths) + 1))
    exact = Exact(heads, tables)
    step.run(exact, max(lengths))
    wanted = exact.exact
    ours = triton.TritonAttention(heads, tables)
    got = step.run(ours, max(lengths))
    assert got.isfinite().all(), f"{kind}: a slot was read that holds nothing"
    scale = wanted.pow(2).mean(dim=1, keepdim=True).sqrt()
    far = ((got.double() - wanted).abs() / scale).amax(dim=1)
    assert float(far.max()) < kind.far, f"{kind}: {far.tolist()} of their sizes from float64, rows of {lengths}"
    for bound in TINY_BOUNDS if place.tiny else BOUNDS:
        again = step.run(ours, bound)
        assert torch.equal(again, got), f"{kind}: other bits where rows may have {bound} keys"
    for row, length in enumerate(lengths):
        alone = step.row(row).run(ours, length)
        part = got[row * kind.queries : (row + 1) * kind.queries]
        assert torch.equal(alone, part), f"{kind}: a row of {length} keys has other bits alone"
    if not place.tiny:
        replayed = captured(place, lambda: step.run(ours, MOST_CONTEXT))
        assert torch.equal(replayed, got), f"{kind}: other bits from a graph"
    return float(far.max())


def captured(place: Place, work: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What `work` left when it was captured and then replayed; it ran before."""
    kept: list[torch.Tensor] = []
    graph = capture(place, lambda: kept.append(work()))
    kept[0].zero_()
    graph.replay()
    place.gpu.synchronize(place.gpu.device)
    return kept[0]


@dataclass(frozen=True, slots=True)
class LongRows:
    """A step of rows with `lengths` keys each, the step's tokens included."""

    kind: Kind
    lengths: tuple[int, ...]
    kv: torch.Tensor
    scales: torch.Tensor | None
    table: torch.Tensor
    qkv: torch.Tensor
    positions: torch.Tensor
    bounds: torch.Tensor  # (B + 1,) int32

    def run(self, backend: Any, bound: int) -> torch.Tensor:
        starts = np.arange(len(self.lengths) + 1, dtype=np.int32) * self.kind.queries
        inputs = AttentionInputs(
            positions=self.positions,
            cu_q_lens=self.bounds,
            page_table=self.table,
            max_q_len=self.kind.queries,
            max_seq_len=bound,
            host=HostLengths(starts, None, None, len(self.lengths)),
        )
        backend.begin(inputs, self.kv, self.scales)
        attended: torch.Tensor = backend.attend(LAYER, self.qkv, None, None)
        return attended.clone()

    def row(self, number: int) -> LongRows:
        part = slice(number * self.kind.queries, (number + 1) * self.kind.queries)
        one = slice(number, number + 1)
        kept = (self.kv, self.scales, self.table[one].contiguous(), self.qkv[part], self.positions[part])
        return LongRows(self.kind, self.lengths[one], *kept, self.bounds[:2])


def long_rows(heads: AttentionShape, kind: Kind, lengths: tuple[int, ...], device: torch.device) -> LongRows:
    """Slots behind a row's keys hold NaN, or in bytes a scale of NaN."""
    draw = torch.Generator(device).manual_seed(11)
    per_row = -(-max(lengths) // PAGE_SIZE)
    pages = 1 + len(lengths) * per_row
    plane = (pages, LAYERS, 2, heads.num_kv_heads, PAGE_SIZE, heads.head_dim)
    values = torch.randn(plane, generator=draw, device=device)
    order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(12)).to(torch.int32)
    table = (1 + order).view(len(lengths), per_row).to(device)
    kv, scales = (values.to(kind.dtype), None) if not kind.pages else quantize(values, DTYPES[kind.pages])
    for row, length in enumerate(lengths):
        for slot in range(length, per_row * PAGE_SIZE):
            page = int(table[row, slot // PAGE_SIZE])
            (kv if scales is None else scales)[page, :, :, :, slot % PAGE_SIZE] = float("nan")
            if slot - length > 2 * PAGE_SIZE:
                break
    columns = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    qkv = torch.randn(len(lengths) * kind.queries, columns, generator=draw, device=device).to(kind.dtype)
    positions = torch.cat([torch.arange(length - kind.queries, length) for length in lengths]).to(device)
    bounds = (torch.arange(len(lengths) + 1) * kind.queries).to(torch.int32).to(device)
    return LongRows(kind, lengths, kv, scales, table, qkv, positions, bounds)


WIDE = shape("two layers of 8B", "llama", 4096, 14_336, 2, (32, 8, 128), 32_000, tied=False)
TINY = shape("two tiny layers", "llama", 32, 48, 2, (4, 2, 8), 97, tied=False)
CONTEXTS, TINY_CONTEXTS = (4096, 600, 257, 30), (40, 17)
CHUNK = 2048
FAR_LOGITS = 3e-2  # root mean square of differences, of that of the logits


def network(place: Place) -> dict[str, object]:
    """Two layers of an 8B model at 4k tokens of context, on Triton's kernels beside plain torch: a prompt's chunks and a
    decode step, and the step from a captured graph."""
    config, contexts = (TINY, TINY_CONTEXTS) if place.tiny else (WIDE, CONTEXTS)
    device = place.gpu.device
    logits = {}
    for name in ("torch",) if place.tiny else ("torch", "triton"):
        torch.manual_seed(5)
        model = random_model(config, device, name)
        with torch.inference_mode():
            logits[name], step = decode(model, contexts, device)
            if name == "triton":
                assert torch.equal(captured(place, step), logits[name]), "a captured step has other logits"
    if place.tiny:
        return {"rows": len(contexts)}
    spread = logits["torch"].std(dim=1)
    far = (logits["triton"] - logits["torch"]).std(dim=1) / spread
    assert float(far.max()) < FAR_LOGITS, f"logits differ by {far.tolist()} of their size, contexts {contexts}"
    return {f"logits at {context} tokens differ, of their size": float(of) for context, of in zip(contexts, far, strict=True)}


def decode(
    model: Model, contexts: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """Logits of a step of all rows behind prompts of `contexts` tokens, and the step itself."""
    per_row = -(-(max(contexts) + 1) // PAGE_SIZE)
    pool = KVPool(model.kv_planes(PAGE_SIZE), 1 + len(contexts) * per_row, PAGE_SIZE, device)
    order = torch.randperm(len(contexts) * per_row, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    table = (1 + order).view(len(contexts), per_row).to(device)
    ids = torch.randint(0, model.spec.vocab_size, (len(contexts), max(contexts) + 1), generator=torch.Generator().manual_seed(4))
    ids = ids.to(device)
    for row, context in enumerate(contexts):
        for start in range(0, context, CHUNK):
            stop = min(context, start + CHUNK)
            bounds = np.asarray([0, stop - start], np.int32)
            model.forward(
                ModelInputs(
                    ids[row, start:stop],
                    torch.arange(start, stop, device=device),
                    torch.from_numpy(bounds).to(device),
                    table[row : row + 1],
                    torch.tensor([stop - start - 1], device=device),
                    stop - start,
                    stop,
                    host=HostLengths(bounds, np.asarray([start]), start, 0),
                ),
                pool,
            )
    places = torch.tensor(contexts, device=device)
    bounds = np.arange(len(contexts) + 1, dtype=np.int32)
    inputs = ModelInputs(
        ids[torch.arange(len(contexts), device=device), places],
        places,
        torch.from_numpy(bounds).to(device),
        table,
        torch.arange(len(contexts), device=device),
        1,
        max(contexts) + 1,
        host=HostLengths(bounds, None, None, len(contexts)),
    )

    def step() -> torch.Tensor:
        return model.forward(inputs, pool).logits

    return step().clone(), step


PROMPTS, TINY_PROMPTS = (250, 505, 1020, 8), (9, 14)
OUT, TINY_OUT = 40, 6
GRAPH_TOKENS, TINY_GRAPH_TOKENS = 1040, 18  # the longest row grows past it
GROWN_CONTEXT, TINY_GROWN_CONTEXT = 2048, 64


def growth(place: Place) -> dict[str, object]:
    """Rows that grow over a page, over a split and over the graphs' bound: the tokens of steps without graphs."""
    config = TINY if place.tiny else WIDE
    torch.manual_seed(6)
    model = random_model(config, place.gpu.device, "torch" if place.tiny else "triton")
    eager, _ = tokens_of(place, model, None)
    graphed, steps = tokens_of(place, model, TINY_GRAPH_TOKENS if place.tiny else GRAPH_TOKENS)
    assert steps["graph_steps"] > 0, steps
    assert steps["eager.length"] > 0, steps
    assert graphed == eager, {rid: (graphed[rid], ids) for rid, ids in eager.items() if graphed[rid] != ids}
    return {"tokens": sum(map(len, eager.values()))} | dict(steps)


def tokens_of(place: Place, model: Model, most_tokens: int | None) -> tuple[dict[str, list[int]], dict[str, float]]:
    gpu, prompts, out = place.gpu, TINY_PROMPTS if place.tiny else PROMPTS, TINY_OUT if place.tiny else OUT
    context = TINY_GROWN_CONTEXT if place.tiny else GROWN_CONTEXT
    settings = SchedSettings(PAGE_SIZE, context, chunk_size=CHUNK, mixed_chunk_size=CHUNK, device=str(gpu.device))
    boundary = PinnedCopies(gpu.device, lambda size: gpu.pinned((size,), torch.uint8))
    sized = CoreSizes(2 + sum(-(-(of + out + PAGE_SIZE) // PAGE_SIZE) for of in prompts), len(prompts), prefix_cache=False)
    spec = None if most_tokens is None else GraphSpec(gpu, (1,), most_tokens)
    core = assemble_core(model, make_streams("cuda", gpu=gpu), settings, sized, boundary=boundary, graphs=spec)
    rng, found = np.random.default_rng(9), {}
    try:
        with no_failed_steps():
            for number, length in enumerate(prompts):
                key = RequestKey("growth", 1, f"r{number}", 0, 0)
                found[key.rid] = []
                prompt = rng.integers(2, model.spec.vocab_size, length).astype(np.int64)
                core.scheduler.submit(Request(key, prompt, SamplingParams(out, temperature=0.0), 0, number))
            while core.scheduler.requests or not core.loop.idle:
                core.loop.step(block=True)
                for event in core.scheduler.take_events():
                    if isinstance(event, Emitted):
                        found[event.key.rid].extend(int(one) for one in event.ids)
        return found, core.engine.runner.totals() if most_tokens is not None else {}
    finally:
        core.close()
