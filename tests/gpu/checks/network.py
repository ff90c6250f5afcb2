"""A network of an 8B model's widths with long contexts: decode beside plain torch, and rows that outgrow a graph."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from shared.core.keys import RequestKey
from shared.core.request import NodeAsk, Request
from shared.core.sampling_params import SamplingParams
from shared.device.streams import make_streams
from shared.engine.boundary import PinnedCopies
from shared.kernel.code.step_layout import HostLengths, Layout
from shared.kv.layout import page_windows
from shared.kv.pool import KVPool
from shared.model.math.interface import Model, ModelInputs
from shared.node.assembly.assemble import CoreSizes, assemble_core
from shared.node.assembly.graph_spec import GraphSpec
from shared.sched.steps.events import Emitted
from shared.sched.steps.settings import SchedSettings
from tests.gpu.checks.real import captured
from tests.gpu.failed_steps import no_failed_steps
from tests.gpu.place import Place
from tests.gpu.shapes import random_model, shape

PAGE_SIZE = 16
WIDE = shape("two layers of 8B", "llama", 4096, 14_336, 2, (32, 8, 128), 32_000, tied=False)
TINY = shape("two tiny layers", "llama", 32, 48, 2, (4, 2, 8), 97, tied=False)
CONTEXTS, TINY_CONTEXTS = (4096, 600, 257, 30), (40, 17)
CHUNK = 2048
FAR_LOGITS = 3e-2  # root mean square of differences, of that of the logits


def network(place: Place) -> dict[str, object]:
    """Two layers of an 8B model at 4k tokens of context, on Triton's kernels beside plain torch: a prompt's chunks and
    a decode step, and the step from a captured graph."""
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
    return {
        f"logits at {context} tokens differ, of their size": float(of)
        for context, of in zip(contexts, far, strict=True)
    }


def decode(
    model: Model, contexts: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """Logits of a step of all rows behind prompts of `contexts` tokens, and the step itself."""
    per_row = -(-(max(contexts) + 1) // PAGE_SIZE)
    planes = model.kv_planes(PAGE_SIZE)
    shape = (len(page_windows(planes)), len(contexts), per_row)
    pool = KVPool(planes, 1 + math.prod(shape), PAGE_SIZE, device)
    order = torch.randperm(math.prod(shape), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    tables = (1 + order).view(shape).to(device).unbind()
    ids = torch.randint(
        0, model.spec.vocab_size, (len(contexts), max(contexts) + 1), generator=torch.Generator().manual_seed(4)
    )
    ids = ids.to(device)
    for row, context in enumerate(contexts):
        for start in range(0, context, CHUNK):
            stop = min(context, start + CHUNK)
            bounds = np.asarray([0, stop - start], np.int32)
            model.forward(
                ModelInputs(
                    ids[row, start:stop],
                    torch.arange(start, stop, device=device),
                    Layout(
                        torch.from_numpy(bounds).to(device),
                        tuple(table[row : row + 1] for table in tables),
                        stop - start,
                        stop,
                        host=HostLengths(bounds, np.asarray([start]), 0),
                    ),
                    torch.tensor([stop - start - 1], device=device),
                ),
                pool,
            )
    places = torch.tensor(contexts, device=device)
    bounds = np.arange(len(contexts) + 1, dtype=np.int32)
    inputs = ModelInputs(
        ids[torch.arange(len(contexts), device=device), places],
        places,
        Layout(
            torch.from_numpy(bounds).to(device),
            tables,
            1,
            max(contexts) + 1,
            host=HostLengths(bounds, None, len(contexts)),
        ),
        torch.arange(len(contexts), device=device),
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
    sized = CoreSizes(
        2 + sum(-(-(of + out + PAGE_SIZE) // PAGE_SIZE) for of in prompts), len(prompts), prefix_cache=False
    )
    spec = None if most_tokens is None else GraphSpec(gpu, (1,), most_tokens)
    core = assemble_core(model, make_streams("cuda", gpu=gpu), settings, sized, boundary=boundary, graphs=spec)
    rng, found = np.random.default_rng(9), {}
    try:
        with no_failed_steps():
            for number, length in enumerate(prompts):
                key = RequestKey("growth", 1, f"r{number}", 0, 0)
                found[key.rid] = []
                prompt = rng.integers(2, model.spec.vocab_size, length).astype(np.int64)
                core.scheduler.intake.submit(
                    Request(key, NodeAsk(prompt, SamplingParams(out, temperature=0.0), 0), number)
                )
            while core.queues.requests or not core.loop.idle:
                core.loop.step(block=True)
                for event in core.queues.take_events():
                    if isinstance(event, Emitted):
                        found[event.key.rid].extend(int(one) for one in event.ids)
        return found, {} if core.graphs is None else core.graphs.totals()
    finally:
        core.close()
