"""Tokens per second of the engine at real shapes, how idle the device is, and transformers at the same shapes."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

import torch
import transformers as library

from benchmarks.engine_core import run_dry, submit
from shared.device.streams import make_streams
from shared.engine.boundary import PinnedCopies
from shared.model.math.config import LlamaConfig
from shared.model.math.interface import Model
from shared.model.math.weights import weights_bytes
from shared.node.assembly.assemble import CoreSizes, assemble_core
from shared.node.assembly.graph_spec import GraphSpec
from shared.node.records.core import NodeCore
from shared.sched.steps.settings import SchedSettings
from tests.gpu.failed_steps import no_failed_steps
from tests.gpu.place import Place
from tests.gpu.plan import NotHere
from tests.gpu.shapes import CONTEXT, SHAPES, random_model, random_network

PAGE_SIZE = 16
BATCHES = (1, 64)
PROMPT, OUT, CHUNK = 1024, 64, 2048  # tokens; the plain kernels' scores take heads * chunk * context floats
TINY_BATCHES, TINY_PROMPT, TINY_OUT = (1, 2), 20, 4
TINY_CONTEXT = 64  # that graphs read of the tiny shape
IDLE_STEPS = 8


@dataclass(frozen=True, slots=True)
class Way:
    """How a node runs steps. The first one of WAYS is the default."""

    overlap: bool = True
    graphs: bool = True


WAYS = {"graphs": Way(), "no overlap": Way(overlap=False), "eager": Way(graphs=False)}


def speed(place: Place, name: str) -> dict[str, object]:
    """Prefill, decode of a few rows and of many: as a node does it, without overlap of host and device, and without
    graphs."""
    model = model_of(place, name, "auto")
    figures: dict[str, object] = {}
    for told, way in WAYS.items():
        figures |= {f"{what}, {told}": value for what, value in rates_of(place, model, way).items()}
    return figures


def deterministic(place: Place, name: str) -> dict[str, object]:
    """What --deterministic costs: its rates, and how many times as fast a node is without it."""
    plain = rates_of(place, model_of(place, name, "auto"), Way())
    fixed = rates_of(place, model_of(place, name, "fixed"), Way())
    figures: dict[str, object] = {f"{what}, deterministic": value for what, value in fixed.items()}
    for what, value in plain.items():
        if what.endswith("tokens/s"):
            figures[f"{what.removesuffix(', tokens/s')}, times as fast without --deterministic"] = value / fixed[what]
    return figures


def model_of(place: Place, name: str, kernels: str) -> Model:
    """NotHere where there is no room for it. The virtual GPU has plain kernels alone: interpreted ones take minutes."""
    config = SHAPES["tiny" if place.tiny else name]
    require_room(place, config)
    return random_model(config, place.gpu.device, "torch" if place.tiny else kernels)


def rates_of(place: Place, model: Model, way: Way) -> dict[str, float]:
    core = build(place, model, way)
    try:
        with no_failed_steps():
            return rates(place, core)
    finally:
        core.close()
        del core
        gc.collect()  # a core is a ring of objects


def require_room(place: Place, config: LlamaConfig) -> None:
    """NotHere where the weights do not fit, and as much again as may be for pages and scores."""
    need = weights_bytes(config, torch.bfloat16, CONTEXT) * 8 // 5
    place.gpu.release_cached(place.gpu.device)
    free = place.gpu.memory_info(place.gpu.device).free_bytes
    if need > free:
        raise NotHere(f"{config.name} needs {need / 1e9:.0f} GB of device memory, and {free / 1e9:.0f} GB are free")


def build(place: Place, model: Model, way: Way) -> NodeCore:
    _, most = sizes(place)
    prompt, out = lengths(place)
    gpu = place.gpu
    pages = 2 + most * -(-(prompt + out + PAGE_SIZE) // PAGE_SIZE)
    settings = SchedSettings(
        page_size=PAGE_SIZE, max_context=CONTEXT, chunk_size=CHUNK, mixed_chunk_size=CHUNK, device=str(gpu.device)
    )
    boundary = PinnedCopies(gpu.device, lambda size: gpu.pinned((size,), torch.uint8))
    streams = make_streams("cuda", gpu=gpu)
    sized = CoreSizes(pages, most, prefix_cache=False)
    spec = GraphSpec(gpu, (1,), TINY_CONTEXT if place.tiny else CONTEXT) if way.graphs else None
    return assemble_core(model, streams, settings, sized, overlap=way.overlap, boundary=boundary, graphs=spec)


def sizes(place: Place) -> tuple[int, int]:
    few, most = TINY_BATCHES if place.tiny else BATCHES
    return few, most


def lengths(place: Place) -> tuple[int, int]:
    return (TINY_PROMPT, TINY_OUT) if place.tiny else (PROMPT, OUT)


def rates(place: Place, core: NodeCore) -> dict[str, float]:
    """Tokens per second, warm; of the device's idleness what can be told."""
    prompt, out = lengths(place)
    submit(core, 1, 4, prompt)
    run_dry(core, 1)
    figures: dict[str, float] = {}
    for batch in sizes(place):
        submit(core, batch, out, prompt)
        first_s, rate = run_dry(core, batch)
        figures[f"prefill of {batch} x {prompt}, tokens/s"] = batch * prompt / first_s
        figures[f"decode of {batch}, tokens/s"] = rate
    share = idle_share(place, core)
    return figures if share is None else figures | {"share of decode in which no kernel runs": share}


def idle_share(place: Place, core: NodeCore) -> float | None:
    """Of steps that decode as many rows as there may be. None where kernels can't be timed."""
    _, most = sizes(place)
    prompt, out = lengths(place)
    submit(core, most, out, prompt)
    while any(not request.output_ids for request in core.requests.values()):
        core.step(block=True)

    def some_steps() -> None:
        wanted = core.loop.num_steps + IDLE_STEPS
        while core.loop.num_steps < wanted and core.requests:
            core.step(block=True)

    busy = place.busy_share(some_steps)
    while not core.idle:
        core.step(block=True)
    core.take_events()
    return None if busy is None else max(0.0, 1 - busy)


def transformers(place: Place, name: str) -> dict[str, object]:
    """Prefill and greedy decode by the library with its own cache; all rows are equally long, which suits it."""
    config, device = SHAPES["tiny" if place.tiny else name], place.gpu.device
    require_room(place, config)
    network = random_network(config, device, "eager" if place.tiny else "sdpa")
    prompt, out = lengths(place)
    figures: dict[str, object] = {}
    for batch in (1, *sizes(place)):  # the first of all is warm-up
        ids = torch.randint(0, config.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(5))
        first_s, rest_s = library_seconds(place, network, ids, out)
        figures[f"transformers' prefill of {batch} x {prompt}, tokens/s"] = batch * prompt / first_s
        figures[f"transformers' decode of {batch}, tokens/s"] = batch * (out - 1) / rest_s
    return figures


def library_seconds(place: Place, network: library.PreTrainedModel, ids: torch.Tensor, out: int) -> tuple[float, float]:
    """Until the first token, and from then on until the last."""
    gpu, cache = place.gpu, library.DynamicCache(config=network.config)
    began, first = time.perf_counter(), 0.0
    given = ids.to(gpu.device)
    with torch.inference_mode():
        for step in range(out):
            logits = network(given, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            given = logits[:, -1].argmax(dim=-1, keepdim=True)
            if step == 0:
                gpu.synchronize(gpu.device)
                first = time.perf_counter()
    gpu.synchronize(gpu.device)
    return first - began, time.perf_counter() - first
