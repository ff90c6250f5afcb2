"""The default model in float32: sixty prompts, greedy and seeded, and every stream with drafts is the one without.

A token may differ only where the two best were as good as equal; such ties are counted and printed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch

from deploy.tools.head.prompts import OWN_PROMPTS, prompt_ids, read_kinds
from router.text.load import load_text_model
from shared.config.settings.settings import SpecConfig
from shared.core.keys import RequestKey
from shared.core.request import NodeAsk, Request
from shared.core.sampling_params import SamplingParams
from shared.device.streams import make_streams
from shared.kernel.code.step_layout import Layout
from shared.kernel.sampling.noise import noise_bits, row_keys, torch_gumbel
from shared.kernel.team.team import Team
from shared.kv.pool import KVPool
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.model.math.interface import ModelInputs
from shared.node.assembly.assemble import CoreSizes, assemble_core
from shared.sched.steps.events import Emitted
from shared.sched.steps.settings import SchedSettings
from shared.speculation.drafters import make_drafter

MODEL, CONTEXT, PAGE_SIZE, ROWS = "smollm2", 512, 16, 30
NUM_TOKENS, TIE = 24, 1e-4
TEMPERATURES = (0.0, 0.8)
SPECS = {
    "ngram": SpecConfig(spec="ngram"),
    "eagle chain": SpecConfig(spec="eagle", spec_copies=0),
    "eagle tree": SpecConfig(spec="eagle", spec_topk=2, spec_steps=3, spec_width=6, spec_copies=0),
    "eagle tree and copies": SpecConfig(spec="eagle", spec_topk=2, spec_steps=3, spec_width=6),
}
Streams = dict[tuple[int, float], list[int]]


@cache
def prompts() -> list[tuple[int, ...]]:
    text = load_text_model(MODEL)
    return [prompt_ids(text, prompt) for _, prompt in read_kinds(OWN_PROMPTS)]


def streams_with(spec: SpecConfig) -> tuple[Streams, float]:
    """By (prompt, temperature); the prompt's number is its seed. And the tokens per verify."""
    model = load_model(MODEL, LoadOptions("float32", max_context=CONTEXT))
    drafter = make_drafter(spec, MODEL, model, Team())
    settings = SchedSettings(page_size=PAGE_SIZE, max_context=CONTEXT, width=spec.width)
    sizes = CoreSizes(ROWS * (CONTEXT // PAGE_SIZE + 2), ROWS)
    core = assemble_core(model, make_streams("inline"), settings, sizes, drafter=drafter)
    streams: Streams = {(n, temperature): [] for n in range(len(prompts())) for temperature in TEMPERATURES}
    for arrival, (n, temperature) in enumerate(streams):
        key = RequestKey("test", 1, f"{n}@{temperature}", 0, 0)
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, stop_token_ids=model.spec.eos_ids)
        core.scheduler.intake.submit(Request(key, NodeAsk(np.asarray(prompts()[n], np.int64), sampling, n), arrival))
    while core.queues.requests or not core.loop.idle:
        core.loop.step(block=True)
        for event in core.queues.take_events():
            if isinstance(event, Emitted):
                n, _, temperature = event.key.rid.partition("@")
                streams[int(n), float(temperature)] += event.ids
    core.close()
    counters = core.queues.counters
    return streams, 1 + counters.spec_accepted_tokens / max(1, counters.spec_steps)


@pytest.fixture(scope="module")
def plain() -> Streams:
    return streams_with(SpecConfig())[0]


@pytest.mark.timeout(1800)
@pytest.mark.long
@pytest.mark.parametrize("name", SPECS)
def test_streams_are_those_without_speculation(name: str, plain: Streams, figures: Callable[[str], None]) -> None:
    streams, per_verify = streams_with(SPECS[name])
    assert len(streams) == len(TEMPERATURES) * len(prompts()) and len(prompts()) >= 60
    gaps = [gap(*which, stream, streams[which]) for which, stream in plain.items() if stream != streams[which]]
    figures(f"{name}: {len(streams)} streams, {per_verify:.2f} tokens per verify, {len(gaps)} ties {gaps}")
    assert per_verify > 1.1, "nothing was accepted: this shows nothing"
    assert max(gaps, default=0.0) < TIE and len(gaps) <= 1


def gap(n: int, temperature: float, first: list[int], second: list[int]) -> float:
    """How far apart the target's scores of the first two tokens are that differ; infinite where one stream ended."""
    at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    if at is None:
        return float("inf")
    context = [*prompts()[n], *first[:at]]
    scores = last_logits(context)[[first[at], second[at]]].double()
    if temperature:
        keys = row_keys(n, len(context))
        noise = torch_gumbel(torch.tensor([noise_bits(*keys, token) for token in (first[at], second[at])]))
        scores = scores / temperature + noise.double()
    return float((scores[0] - scores[1]).abs())


def last_logits(ids: list[int]) -> torch.Tensor:
    model = load_model(MODEL, LoadOptions("float32", max_context=CONTEXT))
    num_pages = len(ids) // PAGE_SIZE + 1
    inputs = ModelInputs(
        input_ids=torch.tensor(ids),
        positions=torch.arange(len(ids)),
        layout=Layout(
            cu_q_lens=torch.tensor([0, len(ids)], dtype=torch.int32),
            page_tables=(torch.arange(1, num_pages + 1, dtype=torch.int32)[None],),
            max_q_len=len(ids),
            max_seq_len=len(ids),
        ),
        logits_idx=torch.tensor([len(ids) - 1]),
    )
    with torch.inference_mode():
        return model.forward(inputs, KVPool(model.kv_planes(PAGE_SIZE), num_pages + 1, PAGE_SIZE)).logits[0]
