"""How fast the kernels are: attention of one layer of an 8B model, its norms, gates and products, and the sampler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from shared.kernel.attention.attention import AttentionInputs, AttentionShape
from shared.kernel.code.quantized import DTYPES
from shared.kernel.code.step_layout import HostLengths, Layout
from shared.kernel.product.linear import Linear, PlainLinear
from shared.kernel.product.scaled_product import ScaledLinear, why_not_scaled
from shared.sample.interface import SamplingBatch
from tests.gpu.checks.kernels import EPS, KNOBS, device_of, kernels
from tests.gpu.checks.rates import host_seconds, replayed_seconds
from tests.gpu.place import Place
from tests.support.cores.sampling_cases import make_params, rows_on
from tests.support.kernels.attention_cases import shape_of
from tests.support.kernels.paged_steps import tables_of


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
        if not place.tiny and not why_not_scaled(device, dtype):
            ways["rows and weights in bytes"] = lambda weight=weight: ScaledLinear(weight)
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
    per_key = (
        2 * shape.num_kv_heads * (shape.head_dim * (1 if rows.pages else dtype.itemsize) + (4 if rows.pages else 0))
    )
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
    host = HostLengths(starts, np.full(rows.batch, before), num_running)
    inputs = AttentionInputs(
        positions=torch.arange(before, rows.keys, device=device).repeat(rows.batch),
        layout=Layout(
            cu_q_lens=torch.from_numpy(starts).to(device),
            page_tables=(order.to(torch.int32).view(rows.batch, per_row).to(device),),
            max_q_len=rows.queries,
            max_seq_len=rows.bound or rows.keys,
            host=host,
        ),
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
