"""The kernels at the sizes of real models, beside plain torch on the same device. A test records what is launched here
and holds it against what real models' steps launch: shared/gpu_kernel/real_steps.py. Without a GPU the interpreter runs
one tiny model, with splits of 16 keys.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from shared.engine.buckets import PromptShape
from shared.engine.future_map import FutureMap
from shared.engine.graphs import FixedInputs
from shared.engine.prepare import Prepared, prepare_by_torch
from shared.gpu_kernel.launch.real_models import REAL_MODELS, RealModel
from shared.kernel.attention.attention import (
    AttentionInputs,
    AttentionShape,
    TorchAttention,
    hidden_keys,
    outside_window,
)
from shared.kernel.code.quantized import DTYPES, dequantize, quantize
from shared.kernel.code.step_layout import HostLengths, Layout
from shared.kernel.product.blocks import BlockKernels, TorchBlocks
from shared.kernel.product.experts import Experts, GroupedExperts
from shared.kernel.product.linear import Linear, PlainLinear, QuantizedLinear
from shared.kernel.product.scaled_product import MULTIPLE, ScaledLinear, why_not_scaled
from shared.model.math.interface import ModelInputs
from shared.model.math.kernels import groups_on
from shared.sample.interface import SamplingBatch
from shared.sample.sampler_torch import rank_candidates_torch, sample_torch
from shared.transfer.digest import sums_by_torch
from tests.gpu.checks.kernels import EPS, KNOBS, TOLERANCE, device_of, kernels
from tests.gpu.checks.rates import capture
from tests.gpu.place import Place
from tests.support.cores.draft_trees import depths, draw_parents, visible_bits
from tests.support.cores.sampling_cases import make_params, rows_on
from tests.support.kernels.paged_steps import tables_of, token_by_token

PAGE_SIZE = 16
NAMES = ("input_ids", "positions")  # what a graph of prompts reads for each token
LAYERS, LAYER = 2, 1
MOST_CONTEXT = 131_072


TINY = RealModel("tiny", 32, 48, 4, 2, 16, 97)
WIDEST = RealModel("the widest norm", 16_384, 53_248, 128, 8, 128, 128_256)
USUAL = "Llama-3.1-8B"  # all dtypes, trees and windows are tried with its heads, as in real_steps
KEYS, TINY_KEYS = (257, 600, 4100, 9000, 31, 256), (17, 70, 9)  # from 1 split to 32
BOUNDS, TINY_BOUNDS = (16_384, MOST_CONTEXT), (128,)
CHUNKS, TINY_CHUNKS = ((0, 700), (900, 300)), ((0, 20), (9, 25))  # tokens before, and of the step
# Of a row's root mean square: weights of keys and results are rounded to the dtype, everything else to float32.
FAR = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 2e-4}
FAR_IN_BYTES = 3  # times as far: mixed queries and scaled weights are rounded once more


def models(place: Place) -> tuple[RealModel, ...]:
    return (TINY,) if place.tiny else REAL_MODELS


# Attention


@dataclass(frozen=True, slots=True)
class Kind:
    """The dtype of a model, of its pages ("" for the same), and each row's tokens: one, a window, or a tree.

    `by_token`: pages hold one token after the other, as of models that the library transformers runs. These may have a
    softcap and sinks."""

    dtype: torch.dtype
    pages: str = ""
    queries: int = 1
    trees: bool = False
    window: int = 0
    by_token: bool = False
    softcap: float = 0.0
    sinks: bool = False

    def sinks_of(self, num_heads: int, device: torch.device) -> torch.Tensor | None:
        return torch.linspace(-2, 8, num_heads, device=device).to(self.dtype) if self.sinks else None

    @property
    def far(self) -> float:
        return FAR[self.dtype] * (FAR_IN_BYTES if self.pages else 1)

    def __str__(self) -> str:
        tokens = f"trees of {self.queries}" if self.trees else f"{self.queries} tokens a row"
        window = f", window {self.window}" if self.window else ""
        pages = (self.pages or "alike") + " by token" * self.by_token
        more = f", softcap {self.softcap}" * (self.softcap > 0) + ", sinks" * self.sinks
        return f"{self.dtype}, pages {pages}, {tokens}{window}{more}".removeprefix("torch.")


def kinds_of(place: Place, name: str) -> Iterator[Kind]:
    if place.tiny:
        float32 = torch.float32
        yield Kind(float32, queries=5, trees=True, by_token=True, softcap=2.0, sinks=True)
        if name == USUAL:  # of the others the interpreter runs the same tiny model
            yield from (Kind(float32), Kind(float32, "int8"), Kind(float32, queries=5, trees=True))
            yield Kind(float32, by_token=True)
        return
    yield Kind(torch.bfloat16)
    if name != USUAL:
        return
    yield Kind(torch.bfloat16, queries=4)
    for dtype, pages, window, by_token in (
        (torch.bfloat16, "", 0, False),
        (torch.float16, "", 0, False),
        (torch.bfloat16, "int8", 0, False),
        (torch.bfloat16, "fp8", 0, False),
        (torch.bfloat16, "", 4096, False),
        (torch.bfloat16, "", 0, True),
        (torch.bfloat16, "", 4096, True),
    ):
        for queries, trees in ((1, False), (9, True)):
            if (kind := Kind(dtype, pages, queries, trees, window, by_token)) != Kind(torch.bfloat16):
                yield kind
            if by_token:
                yield replace(kind, softcap=50.0)
                yield replace(kind, sinks=True)


class Exact(TorchAttention):
    """Scores, weights and sums in float64. `exact` (T, heads * D) float64: what `attend` rounds."""

    def __init__(self, kind: Kind, *args: Any) -> None:
        super().__init__(*args)
        self._kind = kind

    def attend(self, *args: Any) -> torch.Tensor:
        self.parts: list[torch.Tensor] = []
        rounded = super().attend(*args)
        self.exact = torch.cat(self.parts)
        return rounded

    def _masked(
        self, layer: int, q: torch.Tensor, slots: torch.Tensor, visible: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        group = self._shape.num_heads // self._shape.num_kv_heads
        keys = torch.arange(k.shape[2], device=q.device)
        hidden = outside_window(hidden_keys(keys, slots, visible), self._shape.window(layer))
        wide = [of.double().repeat_interleave(group, dim=1) for of in (k, v)]
        wide = [of.masked_fill(hidden.all(dim=1)[:, None, :, None], 0) for of in wide]
        scores = torch.matmul(q.transpose(1, 2).double(), wide[0].transpose(2, 3)) * self._shape.score_scale
        if self._kind.softcap:
            scores = self._kind.softcap * torch.tanh(scores / self._kind.softcap)
        scores = scores.masked_fill(hidden[:, None], float("-inf"))
        if (sinks := self._kind.sinks_of(self._shape.num_heads, q.device)) is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(*scores.shape[:3], 1)), dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(keys)]
        result = torch.matmul(weights, wide[1]).transpose(1, 2)
        self.parts.append(result.flatten(0, 1).flatten(1))
        return result.to(q.dtype)


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of `kind` with `before` tokens in the pool and `lens` tokens of the step. With `chunk`, all are prompts'."""

    kind: Kind
    before: tuple[int, ...]
    lens: tuple[int, ...]
    kv: torch.Tensor
    scales: torch.Tensor | None
    table: torch.Tensor
    qkv: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    visible: torch.Tensor | None
    norms: tuple[torch.Tensor, torch.Tensor] | None
    chunk: bool = False

    @property
    def longest(self) -> int:
        return max(before + num for before, num in zip(self.before, self.lens, strict=True))

    def run(self, backend: Any, bound: int = 0) -> torch.Tensor:
        """`bound`: of the rows' keys, as the host knows it; 0: exactly the longest's."""
        return self.attend(backend, self.inputs(bound))

    def inputs(self, bound: int = 0) -> AttentionInputs:
        """Copied to the device, which a graph's capture refuses."""
        starts = np.cumsum([0, *self.lens]).astype(np.int32)
        return AttentionInputs(
            positions=self.positions,
            layout=Layout(
                cu_q_lens=torch.from_numpy(starts).to(self.kv.device),
                page_tables=(self.table,),
                max_q_len=max(self.lens),
                max_seq_len=bound or self.longest,
                host=HostLengths(starts, None, 0 if self.chunk else len(self.lens)),
            ),
            slots=self.slots if self.visible is not None else None,
            visible=self.visible,
        )

    def attend(self, backend: Any, inputs: AttentionInputs) -> torch.Tensor:
        backend.begin(inputs, self.kv, self.scales)
        attended: torch.Tensor = backend.attend(LAYER, self.qkv, *(self.norms or (None, None)))
        return attended.clone()

    def row(self, number: int) -> Step:
        begin = sum(self.lens[:number])
        part, one = slice(begin, begin + self.lens[number]), slice(number, number + 1)
        visible = None if self.visible is None else self.visible[part]
        own = (self.table[one].contiguous(), self.qkv[part], self.positions[part], self.slots[part], visible)
        return Step(self.kind, self.before[one], self.lens[one], self.kv, self.scales, *own, self.norms, self.chunk)


def attention(place: Place, name: str) -> dict[str, object]:
    """Decode, windows, trees and prompts of one model beside float64: with the same bits for every bound of the longest
    row's length, for a row alone and among others, and from a captured graph."""
    triton, device = kernels(place, "attention"), device_of(place)
    model = TINY if place.tiny else {model.name: model for model in models(place)}[name]
    figures: dict[str, object] = {}
    with short_splits(place, triton):
        for kind in kinds_of(place, name):
            windows = (kind.window,) * LAYERS if kind.window else ()
            shape = AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim, EPS, windows=windows)
            keys, chunks = (TINY_KEYS, TINY_CHUNKS) if place.tiny else (KEYS, CHUNKS)
            rows = [(length - kind.queries, kind.queries) for length in keys]
            step = make_step(shape, kind, rows, device)
            figures[f"decode, {kind}: furthest from float64, of its size"] = one_step(place, triton, shape, step)
            near = make_step(shape, kind, rows[-1:], device)  # of one split
            one_step(place, triton, shape, near)
            if not kind.trees and kind.queries == 1:
                prompts = make_step(shape, kind, chunks, device, chunk=True)
                figures[f"prompts, {kind}: furthest from float64, of its size"] = one_step(
                    place, triton, shape, prompts
                )
    return figures


def one_step(place: Place, triton: ModuleType, shape: AttentionShape, step: Step) -> float:
    kind, device = step.kind, step.kv.device
    tables = tuple(of.to(device) for of in tables_of(shape, num=step.longest))
    sinks = kind.sinks_of(shape.num_heads, device)
    more = {"softcap": kind.softcap, "sinks": sinks}
    ours = (by_token(triton, **more) if kind.by_token else triton.TritonAttention)(shape, tables)
    got = step.run(ours)
    if not place.computes:
        step.run(ours, MOST_CONTEXT)
        return 0.0
    exact = Exact(kind, shape, tables)
    step.run(exact)
    assert got.isfinite().all(), f"{kind}: a slot was read that holds nothing"
    scale = exact.exact.pow(2).mean(dim=1, keepdim=True).sqrt()
    far = ((got.double() - exact.exact).abs() / scale).amax(dim=1)
    assert float(far.max()) < kind.far, (
        f"{kind}: {float(far.max())} of its size from float64, token {int(far.argmax())}"
    )
    for bound in TINY_BOUNDS if place.tiny else BOUNDS:
        assert torch.equal(step.run(ours, bound), got), f"{kind}: other bits where rows may have {bound} keys"
    for number, part in enumerate(got.split(list(step.lens))):
        alone = step.row(number).run(ours)
        assert torch.equal(alone, part), f"{kind}: row {number} has other bits alone"
    if step.chunk:
        assert torch.equal(from_places(place, ours, step), got), f"{kind}: other bits from a graph of prompts"
    else:
        inputs = step.inputs(MOST_CONTEXT)
        check_replayed(place, lambda: step.attend(ours, inputs), got, str(kind))
    return float(far.max())


def by_token(triton: ModuleType, **more: object) -> Any:
    """Return a kind of TritonAttention that attends over copies of the pages, token by token. `more`: for the layer."""

    class ByToken(triton.TritonAttention):  # type: ignore[name-defined,misc]
        def attend(self, layer: int, *given: Any) -> Any:
            q, (group, _) = self.write(layer, *given), self._shape.place(layer)
            of = self._layer(layer)
            of = replace(of, kv=token_by_token(of.kv), scales=token_by_token(of.scales), **more)
            return triton.attend_rows(q, of, self._parts[group], self._places[group]).flatten(1)

    return ByToken


def from_places(place: Place, ours: Any, step: Step) -> torch.Tensor:
    """The chunks' results from a graph that was captured when its places held padding alone. Interpreted: no graph."""
    num, given = len(step.qkv), step.inputs()
    fixed = FixedInputs(
        [shape := PromptShape(num + 13, step.longest)], -(-step.longest // PAGE_SIZE), NAMES, step.kv.device
    )
    read, qkv = fixed.of(shape), torch.zeros(shape.num_tokens, step.qkv.shape[1]).to(step.qkv)

    def work() -> torch.Tensor:
        return replace(step, qkv=qkv).attend(ours, read.for_attention())

    kept = [work()]
    graph = None if place.tiny else capture(place, lambda: kept.append(work()))
    qkv[:num].copy_(step.qkv)
    fixed.fill(ModelInputs(given.positions, given.positions, given.layout, given.positions[:0]), read)
    if graph is None:
        return work()[:num]
    graph.replay()
    place.gpu.synchronize(place.gpu.device)
    return kept[-1][:num]


@contextmanager
def short_splits(place: Place, triton: ModuleType) -> Iterator[None]:
    """Where kernels are interpreted, splits of 16 keys, at most four."""
    if not place.tiny:
        yield
        return
    module = triton.attend_windows.__globals__
    before = {name: module[name] for name in ("SPLIT_KEYS", "MOST_SPLITS")}
    module.update(SPLIT_KEYS=16, MOST_SPLITS=4)
    try:
        yield
    finally:
        module.update(before)


def captured(place: Place, work: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What `work` left when it was captured and then replayed; it ran before."""
    kept: list[torch.Tensor] = []
    graph = capture(place, lambda: kept.append(work()))
    kept[0].zero_()
    graph.replay()
    place.gpu.synchronize(place.gpu.device)
    return kept[0]


def check_replayed(place: Place, work: Callable[[], torch.Tensor], got: torch.Tensor, told: str) -> None:
    """A graph of `work` has the bits that `work` had eagerly. Without a GPU, nothing is captured."""
    if place.computes and not place.tiny:
        assert torch.equal(captured(place, work), got), f"{told}: other bits from a graph"


def make_step(shape: AttentionShape, kind: Kind, rows: Any, device: torch.device, *, chunk: bool = False) -> Step:
    """`rows`: (tokens before, tokens) each. What no row may read is NaN, or in bytes has a scale of NaN."""
    rng = random.Random(2)
    before, lens = zip(*rows, strict=True)
    per_row = -(-max(map(sum, rows)) // PAGE_SIZE)
    pages = 1 + len(rows) * per_row
    plane = (pages, LAYERS, 2, shape.num_kv_heads, PAGE_SIZE, shape.head_dim)
    table = 1 + torch.randperm(pages - 1, generator=torch.Generator().manual_seed(12)).to(torch.int32)
    table = table.view(len(rows), per_row)
    values = torch.empty(plane, device=device).normal_()
    kv, scales = (values.to(kind.dtype), None) if not kind.pages else quantize(values, DTYPES[kind.pages])
    unread = kv if scales is None else scales
    unread[0] = float("nan")
    for line, row in zip(table.tolist(), rows, strict=True):
        behind = sum(row)
        unread[line[behind // PAGE_SIZE] if behind < per_row * PAGE_SIZE else 0, :, :, :, behind % PAGE_SIZE :] = float(
            "nan"
        )
        for page in line[behind // PAGE_SIZE + 1 :]:
            unread[page] = float("nan")
    parents = [draw_parents(rng, num) if kind.trees else list(range(num - 1)) for num in lens]
    depth = [torch.tensor(depths(of)) for of in parents]
    columns = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    weights = (torch.linspace(0.5, 1.5, shape.head_dim), torch.linspace(1.2, 0.7, shape.head_dim))
    return Step(
        kind, tuple(before), tuple(lens), kv, scales, table.to(device),
        torch.empty(sum(lens), columns, device=device).normal_().to(kind.dtype),
        torch.cat([start + of for start, of in zip(before, depth, strict=True)]).to(device),
        torch.cat([start + torch.arange(num) for start, num in rows]).to(device),
        torch.cat([visible_bits(of) for of in parents]).to(device) if kind.trees else None,
        tuple(of.to(device) for of in weights) if chunk else None,  # type: ignore[arg-type]
        chunk,
    )  # fmt: skip


def merge(place: Place) -> dict[str, object]:
    """The merge of splits alone, some of them empty, beside float64."""
    triton, device = kernels(place, "paged_attention"), device_of(place)
    rows_of = kernels(place, "paged_step").Rows
    tokens, heads, dim = (3, 4, 16) if place.tiny else (5, 32, 128)
    bounds = torch.arange(tokens + 1, dtype=torch.int32, device=device)
    rows = rows_of(bounds, bounds[None], None, 0, tokens, 0, tokens, 1, MOST_CONTEXT)
    far = 0.0
    for splits in (2, 3) if place.tiny else (2, 17, 32):
        sums = torch.empty(2, splits, tokens, heads, device=device).normal_().abs_()
        parts = torch.empty(splits, tokens, heads, dim, device=device).normal_()
        for empty, token in ((slice(1, None), 0), (slice(0, 1), 1)):  # what an empty split leaves is undefined
            sums[0, empty, token] = float("-inf")
            sums[1, empty, token] = parts[empty, token] = float("nan")
        out = torch.empty(tokens, heads, dim, device=device, dtype=torch.float32 if place.tiny else torch.bfloat16)
        triton.merge_splits(sums, parts, out, rows)
        if not place.computes:
            continue
        largest, total = sums.double()
        weight = (largest - largest.amax(dim=0)).exp2()
        wanted = (weight[..., None] * parts).nan_to_num().sum(0) / (weight * total).nan_to_num().sum(0)[..., None]
        own = float((out.double() - wanted).abs().max() / wanted.pow(2).mean().sqrt())
        assert own < FAR[out.dtype] * 3, f"{splits} splits: {own} of its size from float64"
        far = max(far, own)
    return {"furthest from float64, of its size": far}


# Everything else


def blocks(place: Place) -> dict[str, object]:
    """The residual sum with its norm, and the gate, beside torch's on the same device."""
    triton, far = kernels(place, "blocks"), 0.0
    for dtype in (torch.float32,) if place.tiny else TOLERANCE:
        for model in (*models(place), *([] if place.tiny else [WIDEST])):
            for is_gelu in (False, True):
                ours, plain = triton.TritonBlocks(EPS, dtype, is_gelu), TorchBlocks(EPS, dtype, is_gelu)
                far = max(far, blocks_differ(place, ours, plain, model, dtype))
    return {"largest difference of norm and gate": far}


def blocks_differ(place: Place, ours: BlockKernels, plain: BlockKernels, model: RealModel, dtype: torch.dtype) -> float:
    rows, hidden, device = 3 if place.tiny else 129, model.hidden_size, device_of(place)
    residual, weight = torch.empty(rows, hidden, device=device).normal_(), torch.ones(hidden, device=device)
    delta = torch.empty(rows, hidden, device=device).normal_().to(dtype)
    gate_up = torch.empty(rows, 2 * model.intermediate_size, device=device).normal_().to(dtype)
    ways: list[Callable[[BlockKernels], torch.Tensor]] = [
        lambda of: of.add_norm(residual.clone(), delta, weight),
        lambda of: of.add_norm(residual.clone(), None, weight),
        lambda of: of.norm(delta, weight),
        lambda of: of.gate(gate_up),
    ]
    return max(near(place, way(ours), lambda way=way: way(plain), TOLERANCE[dtype], model.name) for way in ways)


def near(place: Place, got: torch.Tensor, wanted: Callable[[], torch.Tensor], tolerance: float, told: str) -> float:
    """The largest difference. AssertionError above `tolerance`, absolute and relative."""
    if not place.computes:
        return 0.0
    known = wanted().to(got.dtype)
    torch.testing.assert_close(got, known, atol=tolerance, rtol=tolerance, msg=lambda words: f"{told}: {words}")
    return float((got.float() - known.float()).abs().max())


OUTPUTS, TINY_OUTPUTS = 1040, 66
ROWS, TINY_ROWS = (1, 17, 257), (3, 5)  # above 256, weights in bytes are multiplied by the library


def products(place: Place) -> dict[str, object]:
    """Tiles of one size and weights in bytes, with and without bias and gate, beside float64; gated, with the bits of
    two launches."""
    triton, device, fp8 = kernels(place, "product"), device_of(place), DTYPES["fp8"]
    far = {"fixed tiles": 0.0, "weights in bytes": 0.0}
    for dtype in (torch.float32,) if place.tiny else TOLERANCE:
        for model in models(place):
            outputs = TINY_OUTPUTS if place.tiny else OUTPUTS
            weight = torch.empty(outputs, model.hidden_size, device=device).normal_().to(dtype)
            for bias in (None, torch.linspace(-1, 1, outputs, device=device).to(dtype)):
                exact = PlainLinear(weight.double(), None if bias is None else bias.double())
                ours = triton.FixedLinear(weight, bias)
                of = products_differ(place, ours, lambda x, of=exact: of(x.double()), model, dtype)
                in_bytes, plain = triton.ByteLinear(weight, bias, fp8), QuantizedLinear(weight, bias, fp8)
                of_bytes = products_differ(place, in_bytes, lambda x, of=plain: of(x.float()), model, dtype)
                far = {
                    "fixed tiles": max(far["fixed tiles"], of),
                    "weights in bytes": max(far["weights in bytes"], of_bytes),
                }
            head, exact = triton.FixedLinear(weight, out_dtype=torch.float32), PlainLinear(weight.double())
            x = torch.empty(17, model.hidden_size, device=device).normal_().to(dtype) / model.hidden_size**0.5
            near(place, head(x), lambda of=exact, x=x: of(x.double()), TOLERANCE[dtype], f"head, {model.name}")
    far["grouped experts"] = grouped_differ(place)
    missing = why_not_scaled(device, torch.float32 if place.tiny else torch.bfloat16)  # torch 2.11 has none for a CPU
    if not missing:
        far["fp8 rows"] = max(scaled_differ(place, model) for model in models(place))
    figures: dict[str, object] = {f"largest difference, {name}": value for name, value in far.items()}
    if missing:
        figures["no products of fp8 rows"] = missing
    return figures


def scaled_differ(place: Place, model: RealModel) -> float:
    """torch's products of fp8 rows, beside the plain products of what the rows' bytes stand for."""
    device, dtype, far = device_of(place), torch.float32 if place.tiny else torch.bfloat16, 0.0
    sizes = [size // MULTIPLE * MULTIPLE for size in (TINY_OUTPUTS if place.tiny else OUTPUTS, model.hidden_size)]
    weight, fp8 = torch.empty(*sizes, device=device).normal_().to(dtype), DTYPES["fp8"]
    for bias in (None, torch.linspace(-1, 1, sizes[0], device=device).to(dtype)):
        ours, plain = ScaledLinear(weight, bias), QuantizedLinear(weight, bias, fp8)
        for rows in TINY_ROWS if place.tiny else ROWS:
            x = (torch.empty(rows, sizes[1], device=device).normal_() / sizes[1] ** 0.5).to(dtype)
            told = f"{rows} rows of {model.name}, fp8 rows"
            got = ours(x)
            far = max(far, near(place, got, partial(plain, dequantize(*quantize(x, fp8))), TOLERANCE[dtype], told))
            check_replayed(place, partial(ours, x), got, told)
    return far


EXPERTS, TINY_EXPERTS = (64, 4, 1024, 256), (6, 2, 16, 32)  # how many, of which each token takes, hidden, inner


def grouped_differ(place: Place) -> float:
    """Experts by torch's grouped product, beside the same in float64, one by one."""
    device, dtype = device_of(place), torch.float32 if place.tiny else torch.bfloat16
    if not place.tiny and not groups_on(dtype, device):
        return 0.0
    num, top_k, hidden, inner = TINY_EXPERTS if place.tiny else EXPERTS
    sizes, far = ((num, hidden), (num, 2 * inner, hidden), (num, hidden, inner)), 0.0
    router, ups, downs = (torch.empty(*size, device=device).normal_().to(dtype) / size[-1] ** 0.5 for size in sizes)
    ours = GroupedExperts(lambda x: (x @ router.T).float(), ups, downs, top_k, normalise=True)
    plain = [[PlainLinear(one.double()) for one in weights] for weights in (ups, downs)]
    exact = Experts(lambda x: (x.to(dtype) @ router.T).float(), *plain, top_k, normalise=True)

    def gated(linear: Linear, x: torch.Tensor) -> torch.Tensor:
        gate, up = linear(x).chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    for rows in TINY_ROWS if place.tiny else ROWS:
        x = torch.empty(rows, hidden, device=device).normal_().to(dtype)
        told, work = f"{rows} rows of grouped experts", partial(ours, x, gated, lambda columns: columns)
        there, wanted = work(), partial(exact, x.double(), gated, lambda columns: columns)
        far = max(far, near(place, there, wanted, TOLERANCE[dtype], told))
        check_replayed(place, work, there, told)
    return far


def products_differ(
    place: Place, ours: Any, wanted: Callable[[torch.Tensor], torch.Tensor], model: RealModel, dtype: torch.dtype
) -> float:
    far, inputs = 0.0, model.hidden_size
    for rows in TINY_ROWS if place.tiny else ROWS:
        x = (torch.empty(rows, inputs, device=device_of(place)).normal_() / inputs**0.5).to(dtype)
        told, there = f"{rows} rows of {model.name}, {type(ours).__name__}, {dtype}", ours(x)
        far = max(far, near(place, there, lambda x=x: wanted(x), TOLERANCE[dtype], told))
        for is_gelu in (False, True):
            block = kernels(place, "blocks").TritonBlocks(EPS, dtype, is_gelu)
            gated, two = block.gated(ours, x), block.gate(there)
            assert not place.computes or torch.equal(gated, two), f"{told}: gated has other bits"
    return far


BATCHES, TINY_BATCHES = (1, 16, 64, 256), (2,)


def sampling(place: Place) -> dict[str, object]:
    """Greedy, warm, top-k with top-p rows, log-probabilities and ranked candidates over real vocabularies: torch's ids
    on the same device, bit for bit."""
    most_best = 3 if place.tiny else int(kernels(place, "logprobs").MOST_BEST)
    kernels(place, "sample")
    from shared.sample.sampler_triton import rank_candidates_triton, sample_triton

    device, count = device_of(place), 0
    for vocab_size in sorted({model.vocab_size for model in models(place)}):
        for num_rows in TINY_BATCHES if place.tiny else BATCHES:
            logits = torch.empty(num_rows, vocab_size, device=device).normal_() * 3
            params = [make_params(knobs) for knobs in (KNOBS["top-p and top-k"], {}, {"temperature": 0.0})]
            some = [params[row % 3] for row in range(num_rows)]
            for kinds in (some, [params[2]] * num_rows, [make_params({}, num_logprobs=most_best)] * num_rows):
                batch = SamplingBatch.build(kinds, list(range(num_rows)), [4] * num_rows)
                rows, positions = rows_on(batch, np.arange(num_rows), logits), torch.arange(num_rows, device=device)
                got = sample_triton(logits, rows, positions, None)
                ranked = rank_candidates_triton(logits, rows, positions, None, 4)
                if not place.computes:
                    continue
                wanted, count = sample_torch(logits, rows, positions, None), count + num_rows
                told = f"{num_rows} rows of {vocab_size}"
                assert torch.equal(got.ids, wanted.ids), f"{told}: other ids"
                torch.testing.assert_close(got.top_logprobs, wanted.top_logprobs, atol=1e-5, rtol=1e-5)
                assert torch.equal(ranked[0], rank_candidates_torch(logits, rows, positions, None, 4)[0]), told
    return {"rows drawn": count}


def pages(place: Place) -> dict[str, object]:
    """Pages of real models, whole and in parts that begin and end in a word, copied and digested in one pass."""
    copies, device = kernels(place, "copy_pages"), device_of(place)
    for model in models(place):
        page_bytes = 2 * PAGE_SIZE * model.num_kv_heads * model.head_dim * 2
        source = torch.randint(0, 256, (12, page_bytes), dtype=torch.uint8, device=device)
        target = torch.zeros(9, page_bytes, dtype=torch.uint8, device=device)
        given, own = torch.tensor([3, 11, 0], device=device), torch.tensor([8, 1, 2], device=device)
        for part in (slice(0, page_bytes), slice(3, page_bytes - 2)):
            digests = copies.copy_pages(source, given, target, own, part)
            alone = copies.digest_pages(source, given, part)
            if place.computes:
                assert torch.equal(target[own][:, part], source[given][:, part]), f"{model.name}, {part}: other bytes"
                assert torch.equal(digests, sums_by_torch(source, given.tolist(), part)), f"{model.name}, {part}"
                assert torch.equal(alone, digests), f"{model.name}, {part}: two kinds of digest"
    return {"models": len(models(place))}


def preparing(place: Place) -> dict[str, object]:
    """A decode step's positions, lengths and input ids, beside torch's on the same device."""
    triton, device = kernels(place, "prepare"), device_of(place)
    relay = FutureMap(300, 8, device=str(device))
    for buffer in (relay.output_tokens_buf, relay.new_seq_lens_buf):
        buffer.copy_(torch.randint(1, 2**31, (300,)))
    relay.written_by.copy_(torch.randint(0, 3, (300,)))
    for width in (1, 5):
        rows, expected = torch.randperm(300)[:256].to(device), torch.randint(0, 3, (256,)).to(device)
        lengths = torch.where(torch.arange(256) % 2 == 0, -1, torch.randint(1, 2**31, (256,))).to(device)
        buffers = triton.Relay(relay.output_tokens_buf, relay.new_seq_lens_buf, relay.written_by)
        got = Prepared(*triton.prepare_step(rows, lengths, expected, buffers, width))
        if place.computes:
            wanted = prepare_by_torch(rows, lengths, expected, width, relay)
            for name in Prepared.__slots__:
                assert torch.equal(getattr(got, name), getattr(wanted, name)), f"{name}, width {width}"
    return {"widths": 2}
