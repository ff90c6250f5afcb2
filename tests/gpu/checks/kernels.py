"""Triton's kernels on the device, one by one, beside the reference on the CPU; and how fast they are. Without a GPU
they run in Triton's interpreter, which shows that the checks themselves are right."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from shared.kernel.attention import AttentionInputs, AttentionShape, HostLengths, TorchAttention
from shared.kernel.blocks import TorchBlocks
from shared.kernel.linear import Linear, PlainLinear, QuantizedLinear
from shared.kernel.quantized import DTYPES
from shared.sample.interface import History, SampleOutput, SamplingBatch, TokenMasks
from shared.sample.sampler_numba import sample_cpu
from tests.gpu.checks.rates import host_seconds, replayed_seconds
from tests.gpu.place import NotHere, Place
from tests.support.attention_cases import CASES, Case, shape_of
from tests.support.paged_steps import tables_of
from tests.support.sampling_cases import Case as Draws
from tests.support.sampling_cases import make_params, rows_on

CPU = torch.device("cpu")
TINY_CASES = ("decode", "int8", "chunk")
NUM_DRAWS, NUM_TINY_DRAWS = 20, 1
# Of results around 1: the reference sums in another order, and bfloat16 rounds the weights of the keys as well.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
EPS = 1e-5


def kernels(place: Place, name: str) -> ModuleType:
    """Return a module of shared.gpu_kernel: compiled by a GPU, interpreted elsewhere."""
    if not place.tiny:
        return importlib.import_module(f"shared.gpu_kernel.{name}")
    try:
        from tests.support import interpreter
    except ImportError as missing:
        raise NotHere(f"kernels can't be interpreted here: {missing}") from missing
    return interpreter.kernels(name)


def device_of(place: Place) -> torch.device:
    """The interpreter reads the host's memory."""
    return CPU if place.tiny else place.gpu.device


def attention(place: Place) -> dict[str, object]:
    """Every case of the interpreter's tests, and in bfloat16 too where the products are real: near the reference, and
    with the same bits in a second run."""
    triton, device = kernels(place, "attention"), device_of(place)
    far: dict[torch.dtype, float] = {}
    for case in cases(place):
        step = case.step()
        wanted = step.run(TorchAttention(case.shape, tables_of(case.shape), tables_of(case.shape, 500.0)))
        tables, local = (tuple(of.to(device) for of in tables_of(case.shape, theta)) for theta in (10000.0, 500.0))
        there = step.to(device)
        got, again = (there.run(triton.TritonAttention(case.shape, tables, local)).cpu() for _ in range(2))
        assert torch.equal(got, again), f"{case}: two runs differ"
        assert got.isfinite().all(), f"{case}: a slot was read that holds nothing"
        difference = float((got.float() - wanted.float()).abs().max())
        assert difference < TOLERANCE[case.dtype], f"{case}: {difference} from the reference"
        far[case.dtype] = max(far.get(case.dtype, 0.0), difference)
    return {f"largest difference of attention, {dtype}": value for dtype, value in far.items()}


def cases(place: Place) -> Iterator[Case]:
    if place.tiny:
        yield from (CASES[name] for name in TINY_CASES)
        return
    for case in CASES.values():
        yield case
        if case.dtype == torch.float32:
            yield replace(case, dtype=torch.bfloat16)


def blocks(place: Place) -> dict[str, object]:
    """The residual sum with its norm, and the gate, beside torch's on the CPU."""
    triton, device = kernels(place, "blocks"), device_of(place)
    draw = torch.Generator().manual_seed(3)
    rows, columns = (3, 97) if place.tiny else (129, 4096)
    far = 0.0
    for dtype in (torch.float32, torch.float16) if place.tiny else TOLERANCE:
        for is_gelu in (False, True):
            ours, plain = triton.TritonBlocks(EPS, dtype, is_gelu), TorchBlocks(EPS, dtype, is_gelu)
            residual, weight = torch.randn(rows, columns, generator=draw), torch.randn(columns, generator=draw)
            delta = torch.randn(rows, columns, generator=draw).to(dtype)
            gate_up = torch.randn(rows, 2 * columns, generator=draw).to(dtype)
            here = plain.add_norm(residual.clone(), delta, weight), plain.gate(gate_up)
            there = ours.add_norm(*(of.to(device, copy=True) for of in (residual, delta, weight)))
            for wanted, got in zip(here, (there, ours.gate(gate_up.to(device))), strict=True):
                torch.testing.assert_close(got.cpu(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
                far = max(far, float((got.cpu().float() - wanted.float()).abs().max()))
    return {"largest difference of norm and gate": far}


def weights(place: Place) -> dict[str, object]:
    """Products with weights in bytes, of few rows by tiles and of many by the library's, beside torch's on the CPU; and
    gated, with the bits of two launches."""
    triton, device = kernels(place, "product"), device_of(place)
    draw = torch.Generator().manual_seed(4)
    inputs, outputs, few, many = (40, 66, 3, 5) if place.tiny else (4096, 4096, 17, triton.FEW_ROWS + 1)
    far = 0.0
    for dtype in (torch.float32,) if place.tiny else TOLERANCE:
        weight, bias = (torch.randn(shape, generator=draw) for shape in ((outputs, inputs), (outputs,)))
        plain = QuantizedLinear(weight, bias, DTYPES["fp8"])
        ours = triton.ByteLinear(weight.to(device), bias.to(device), DTYPES["fp8"])
        in_blocks = kernels(place, "blocks").TritonBlocks(EPS, dtype)
        for rows in (few, many):
            x = (torch.randn(rows, inputs, generator=draw) / inputs**0.5).to(dtype)
            wanted, there = plain(x), ours(x.to(device))
            gated = in_blocks.gated(ours, x.to(device))
            assert torch.equal(gated, in_blocks.gate(there)), f"{rows} rows, {dtype}: a gated product has other bits"
            got = there.cpu()
            torch.testing.assert_close(got, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
            far = max(far, float((got.float() - wanted.float()).abs().max()))
    return {"largest difference of products with weights in bytes": far}


def draws(place: Place) -> dict[str, object]:
    """Ids of every set of sampling parameters, and of vocabularies that many programs share: the CPU's, bit for bit."""
    kernels(place, "sample")
    from shared.sample.sampler_triton import sample_triton

    def sample(
        logits: torch.Tensor,
        batch: SamplingBatch,
        row_of: np.ndarray,
        positions: torch.Tensor,
        history: History | None,
        masks: TokenMasks | None = None,
    ) -> SampleOutput:
        return sample_triton(logits, rows_on(batch, row_of, logits), positions, history)

    device, count = str(device_of(place)), NUM_TINY_DRAWS if place.tiny else NUM_DRAWS
    for seed in range(count):
        case = Draws(seed, 1 if place.tiny else 3, num_logprobs=seed % 5 - 1)
        assert torch.equal(case.run(sample, device).ids.cpu(), case.run(sample_cpu).ids), f"ids of case {seed}"
    num_rows = 3 if place.tiny else 66
    for vocab_size in (97,) if place.tiny else (32_000, 151_936):
        logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
        kinds = [make_params({"top_p": 0.9, "top_k": 50}), make_params({}), make_params({"temperature": 0.0})]
        batch = SamplingBatch.build(kinds * (num_rows // 3), list(range(num_rows)), [4] * num_rows)
        given = (batch, np.arange(num_rows), torch.arange(num_rows))
        wanted = sample_cpu(logits, *given, None).ids
        there = sample(logits.to(device), *given[:2], given[2].to(device), None).ids
        assert torch.equal(there.cpu(), wanted), f"ids of {vocab_size}"
    return {"batches drawn by kernels": count}


@dataclass(frozen=True, slots=True)
class Rows:
    """A step's attention: each of `batch` rows has `keys` keys, and its last `queries` tokens are the step's. The host
    knows that no row has more than `bound` keys; 0: it knows `keys`."""

    batch: int
    keys: int
    queries: int = 1
    pages: str = ""
    bound: int = 0

    def __str__(self) -> str:
        bound = f", bound {self.bound}" if self.bound else ""
        return f"{self.batch} x {self.keys}{bound}{f', {self.pages}' if self.pages else ''}"


FAR_BOUND = 131_072  # what graphs read of a model with that context
DECODE = (
    Rows(1, 2048), Rows(32, 2048), Rows(64, 2048), Rows(256, 512), Rows(1, 131_072),
    Rows(1, 2048, bound=FAR_BOUND), Rows(32, 2048, bound=FAR_BOUND), Rows(64, 2048, bound=FAR_BOUND),
    Rows(256, 512, bound=FAR_BOUND), Rows(256, 512, bound=8192),
    Rows(64, 2048, 1, "int8"), Rows(64, 2048, 1, "fp8"), Rows(64, 2048, 4),
)  # fmt: skip
TINY_DECODE = (Rows(2, 40), Rows(2, 40, 1, "int8"))
PREFILL, TINY_PREFILL = (Rows(1, 2048, 2048), Rows(1, 8192, 8192), Rows(1, 32_768, 2048)), (Rows(1, 20, 20),)
DRAWN, TINY_DRAWN = ((1, 128_256), (64, 128_256), (256, 128_256), (64, 151_936)), ((1, 97),)
# An 8B model's products: inputs and outputs
PRODUCTS = {"qkv": (4096, 6144), "out": (4096, 4096), "gate and up": (4096, 28_672), "down": (14_336, 4096)}
TINY_PRODUCTS = {"out": (40, 33)}
BATCHES, TINY_BATCHES = (1, 64, 256), (2,)
KNOBS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "top-p and top-k": {"top_p": 0.9, "top_k": 50}}
PAGE_SIZE = 16
ROTATED_BYTES = 120 << 20  # of buffers read in turn: twice what an L2 cache holds


def speed(place: Place) -> dict[str, object]:
    """Attention of one layer of an 8B model, its norms, gates and products, and the sampler: by the device's clock from
    captured graphs, on random numbers. And what a call costs the host."""
    with torch.inference_mode():
        return {**attention_speed(place), **block_speed(place), **product_speed(place), **drawing_speed(place)}


def attention_speed(place: Place) -> dict[str, object]:
    device, dtype = device_of(place), torch.float32 if place.tiny else torch.bfloat16
    triton, shape = kernels(place, "attention"), shape_of(4, 2, 16) if place.tiny else shape_of(32, 8, 128)
    figures: dict[str, object] = {}
    for rows in TINY_DECODE if place.tiny else DECODE:
        works, num_bytes = attending(triton, shape, rows, dtype, device)
        spent = replayed_seconds(place, works)
        figures[f"decode attention of {rows}, {rows.queries} tokens, us"] = spent * 1e6
        figures[f"decode attention of {rows}, {rows.queries} tokens, GB/s"] = num_bytes / spent / 1e9
        if rows == DECODE[0]:
            figures["decode attention, host us a call"] = host_seconds(place, works[0]) * 1e6
        del works
    for rows in TINY_PREFILL if place.tiny else PREFILL:
        works, _ = attending(triton, shape, rows, dtype, device)
        before = rows.keys - rows.queries
        scores = rows.queries * before + rows.queries**2 // 2
        spent = replayed_seconds(place, works[:1])
        figures[f"prefill attention of {rows.queries} after {before}, TFLOP/s"] = (
            4 * shape.num_heads * shape.head_dim * scores / spent / 1e12
        )
        del works
    return figures


def block_speed(place: Place) -> dict[str, object]:
    device, dtype = device_of(place), torch.float32 if place.tiny else torch.bfloat16
    in_blocks = kernels(place, "blocks").TritonBlocks(EPS, dtype)
    figures: dict[str, object] = {}
    hidden, inner = (32, 48) if place.tiny else (4096, 14_336)
    weight = torch.randn(hidden, device=device)
    for rows in TINY_BATCHES if place.tiny else BATCHES:
        residual = torch.randn(rows, hidden, device=device)
        delta, gate_up = (torch.randn(rows, of, device=device).to(dtype) for of in (hidden, 2 * inner))
        works = {
            "norm": partial(in_blocks.add_norm, residual, delta, weight),
            "gate": partial(in_blocks.gate, gate_up),
        }
        for name, work in works.items():
            figures[f"{name} of {rows} rows, us"] = replayed_seconds(place, [work]) * 1e6
            figures[f"{name} of {rows} rows, host us a call"] = host_seconds(place, work) * 1e6
    return figures


def product_speed(place: Place) -> dict[str, object]:
    device, dtype = device_of(place), torch.float32 if place.tiny else torch.bfloat16
    triton = kernels(place, "product")
    figures: dict[str, object] = {}
    for name, (inputs, outputs) in (TINY_PRODUCTS if place.tiny else PRODUCTS).items():
        weight = torch.randn(outputs, inputs, device=device).to(dtype) / inputs**0.5
        ways: dict[str, Callable[[], Linear]] = {
            "library's": lambda weight=weight: PlainLinear(weight.clone()),
            "fixed tiles": lambda weight=weight: triton.FixedLinear(weight.clone()),
            "weights in bytes": lambda weight=weight: triton.ByteLinear(weight, None, DTYPES["fp8"]),
        }
        for way, make in ways.items():
            count = 1 if place.tiny else -(-ROTATED_BYTES // (weight.nbytes // (2 if "bytes" in way else 1)))
            linears = [make() for _ in range(count)]
            for rows in TINY_BATCHES if place.tiny else BATCHES:
                x = torch.randn(rows, inputs, device=device).to(dtype)
                spent = replayed_seconds(place, [partial(linear, x) for linear in linears])
                figures[f"product {name} of {rows} rows, {way}, us"] = spent * 1e6
    return figures


def drawing_speed(place: Place) -> dict[str, object]:
    figures: dict[str, object] = {}
    for num_rows, vocab_size in TINY_DRAWN if place.tiny else DRAWN:
        for name, knobs in list(KNOBS.items())[: 1 if place.tiny else None]:  # interpreted, the second takes long
            work = drawing(place, knobs, num_rows, vocab_size, device_of(place))
            figures[f"sampling {num_rows} x {vocab_size}, {name}, us"] = replayed_seconds(place, [work]) * 1e6
            figures[f"sampling {num_rows} x {vocab_size}, {name}, host us a call"] = host_seconds(place, work) * 1e6
    return figures


def attending(
    triton: ModuleType, shape: AttentionShape, rows: Rows, dtype: torch.dtype, device: torch.device
) -> tuple[list[Callable[[], object]], int]:
    """Return the attention of each layer of a pool in a drawn order of pages, as many layers as do not fit into a
    cache, and the bytes of KV that one reads."""
    per_row = -(-rows.keys // PAGE_SIZE)
    per_key = 2 * shape.num_kv_heads * (shape.head_dim * (1 if rows.pages else dtype.itemsize) + (4 if rows.pages else 0))
    num_bytes = rows.batch * rows.keys * per_key
    layers = min(32, max(2, -(-ROTATED_BYTES // num_bytes))) if device.type == "cuda" else 2
    plane = (1 + rows.batch * per_row, layers, 2, shape.num_kv_heads, PAGE_SIZE, shape.head_dim)
    kv = torch.empty(plane, dtype=dtype, device=device).normal_()
    kv = (kv * 40).to(DTYPES[rows.pages]) if rows.pages else kv
    scales = torch.rand(plane[:-1], device=device) if rows.pages else None
    order = 1 + torch.randperm(rows.batch * per_row, generator=torch.Generator().manual_seed(1))
    starts = np.arange(rows.batch + 1, dtype=np.int32) * rows.queries
    before = rows.keys - rows.queries
    num_running = 0 if rows in PREFILL + TINY_PREFILL else rows.batch
    host = HostLengths(starts, np.full(rows.batch, before), rows.batch * before, num_running)
    inputs = AttentionInputs(
        positions=torch.arange(before, rows.keys, device=device).repeat(rows.batch),
        cu_q_lens=torch.from_numpy(starts).to(device),
        page_table=order.to(torch.int32).view(rows.batch, per_row).to(device),
        max_q_len=rows.queries,
        max_seq_len=rows.bound or rows.keys,
        host=host,
    )
    columns = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    qkv = torch.randn(rows.batch * rows.queries, columns, device=device).to(dtype)
    backend = triton.TritonAttention(shape, tuple(of.to(device) for of in tables_of(shape, num=rows.keys)))
    backend.begin(inputs, kv, scales)
    return [partial(backend.attend, layer, qkv, None, None) for layer in range(layers)], num_bytes


def drawing(
    place: Place, knobs: dict[str, Any], num_rows: int, vocab_size: int, device: torch.device
) -> Callable[[], object]:
    kernels(place, "sample")
    from shared.sample.sampler_triton import sample_triton

    logits = (torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 3).to(device)
    batch = SamplingBatch.build([make_params(knobs)] * num_rows, list(range(num_rows)), [4] * num_rows)
    rows, positions = rows_on(batch, np.arange(num_rows), logits), torch.arange(num_rows, device=device)
    return lambda: sample_triton(logits, rows, positions, None)
