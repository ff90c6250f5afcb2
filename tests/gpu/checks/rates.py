"""What the machine can do: copies to the device and back, bfloat16 products, and reads of KV pages in two layouts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shared.device.gpu import GpuGraph
from tests.gpu.place import Place

ROUNDS = 10
CALLS = 20  # in a captured graph


@dataclass(frozen=True, slots=True)
class Sizes:
    """`pages` of `layers` layers, of which a step reads `read`; the rest as the names say."""

    copied_bytes: int
    product: int
    pages: int
    layers: int
    read: int
    layer_page_bytes: int


REAL = Sizes(256 << 20, 8192, 2048, 32, 1024, 64 << 10)  # of an 8B model's: 16 tokens, 8 heads of 128, keys and values
TINY = Sizes(64 << 10, 32, 16, 4, 8, 1 << 10)


def rates(place: Place) -> dict[str, object]:
    """GB/s and TFLOP/s, medians of some rounds."""
    sizes = TINY if place.tiny else REAL
    return {**copies(place, sizes.copied_bytes), **products(place, sizes.product), **reads(place, sizes)}


def copies(place: Place, num_bytes: int) -> dict[str, object]:
    gpu = place.gpu
    device = torch.empty(num_bytes, dtype=torch.uint8, device=gpu.device)
    other = torch.empty_like(device)
    figures: dict[str, object] = {}
    for kind, host in (
        ("pinned", gpu.pinned((num_bytes,), torch.uint8)),
        ("pageable", torch.zeros(num_bytes, dtype=torch.uint8)),
    ):
        to_device = seconds(place, lambda host=host: device.copy_(host, non_blocking=True))
        to_host = seconds(place, lambda host=host: host.copy_(device, non_blocking=True))
        figures[f"host to device, {kind}, GB/s"] = num_bytes / to_device / 1e9
        figures[f"device to host, {kind}, GB/s"] = num_bytes / to_host / 1e9
    within = seconds(place, lambda: other.copy_(device))
    return figures | {"device to device, read and written, GB/s": 2 * num_bytes / within / 1e9}


def products(place: Place, size: int) -> dict[str, object]:
    left, right = (torch.randn(size, size, device=place.gpu.device).to(torch.bfloat16) for _ in range(2))
    spent = seconds(place, lambda: torch.mm(left, right))
    return {f"bfloat16 product of {size}, TFLOP/s": 2 * size**3 / spent / 1e12}


def reads(place: Place, sizes: Sizes) -> dict[str, object]:
    """Gather the same pages for all layers of a step, from page-major and from layer-major memory."""
    shape = (sizes.pages, sizes.layers, sizes.layer_page_bytes)
    by_page = torch.randint(0, 256, shape, dtype=torch.uint8, device=place.gpu.device)
    by_layer = by_page.transpose(0, 1).contiguous()
    order = torch.randperm(sizes.pages, generator=torch.Generator().manual_seed(1))[: sizes.read]
    table = order.to(place.gpu.device)
    num_bytes = sizes.read * sizes.layers * sizes.layer_page_bytes

    def page_major() -> None:
        for layer in range(sizes.layers):
            by_page[table, layer]

    def layer_major() -> None:
        for layer in range(sizes.layers):
            by_layer[layer][table]

    return {
        "KV pages read, page-major, GB/s": num_bytes / seconds(place, page_major) / 1e9,
        "KV pages read, layer-major, GB/s": num_bytes / seconds(place, layer_major) / 1e9,
    }


def seconds(place: Place, work: Callable[[], object]) -> float:
    """By the device's clock, the median of ROUNDS after one that warms up."""
    gpu = place.gpu
    work()
    spans = []
    for _ in range(1 if place.tiny else ROUNDS):
        begin, end = gpu.new_event(timing=True), gpu.new_event(timing=True)
        begin.record()
        work()
        end.record()
        gpu.synchronize(gpu.device)
        spans.append(begin.elapsed_time(end) / 1000)
    return max(sorted(spans)[len(spans) // 2], 1e-9)


def capture(place: Place, work: Callable[[], object]) -> GpuGraph:
    """`work` as a graph. It must have run before: kernels are compiled, libraries have their work space."""
    gpu = place.gpu
    gpu.synchronize(gpu.device)
    with gpu.use_stream(gpu.new_stream(gpu.device)), gpu.capture(gpu.new_graph_memory()) as graph:
        work()
    return graph


def replayed_seconds(place: Place, works: Sequence[Callable[[], object]]) -> float:
    """Seconds of a call by the device's clock, without the host's launches: `works` in turn, from a captured graph.

    They should read buffers of their own, together larger than the L2 cache, as a step's layers do."""
    for work in works:
        work()
    if place.tiny:
        return seconds(place, works[0])
    calls = [works[number % len(works)] for number in range(max(CALLS, len(works)))]
    graph = capture(place, lambda: run_all(calls))
    return seconds(place, graph.replay) / len(calls)


def run_all(works: Sequence[Callable[[], object]]) -> None:
    for work in works:
        work()


def host_seconds(place: Place, work: Callable[[], object]) -> float:
    """Seconds that the host takes to enqueue `work`, while the device is far behind or done."""
    gpu = place.gpu
    work()
    spans = []
    for _ in range(1 if place.tiny else ROUNDS):
        gpu.synchronize(gpu.device)
        began = time.perf_counter()
        for _ in range(CALLS):
            work()
        spans.append((time.perf_counter() - began) / CALLS)
    return sorted(spans)[len(spans) // 2]
