"""How likely a prompt's tokens were: the reference's numbers, each once, whatever chunks, caches, drafts and
retractions did."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from shared.core.keys import RequestKey
from shared.core.sampling_params import SamplingParams
from shared.node.records.core import NodeCore
from shared.sample.sampler import score
from shared.sample.sampler_torch import SCORED_AT_ONCE, score_torch
from shared.sched.steps.events import Emitted, Scored
from tests.support.cores.core_rig import CoreKnobs, Job, Outcome, assert_streams, assert_whole, draw_jobs, make_core
from tests.support.cores.steps import submit
from tests.support.oracles.hashlm_reference import reference_run

NUM_TOP = 3


def scored(job: Job) -> Job:
    return replace(job, sampling=replace(job.sampling, prompt_logprobs=NUM_TOP))


@cache
def reference(prompt: tuple[int, ...], position: int) -> float:
    """A bias forces the prompt's token; logprobs are of the raw distribution."""
    forced = SamplingParams(1, 0.0, logit_bias=((prompt[position], 1000.0),), num_logprobs=0)
    run = reference_run(prompt[:position], forced, 0, 1)
    assert list(run.ids) == [prompt[position]]
    return run.logprobs[0]


def run(core: NodeCore, jobs: Sequence[Job], retract_every: int = 0) -> Outcome:
    """Whatever is said of a prompt comes before the first token."""
    outcome, begun, rng = Outcome(), set[RequestKey](), random.Random(0)
    submit(core, *jobs)
    for number in itertools.count(1):
        core.step(block=True)
        for event in core.queues.events:
            if isinstance(event, Emitted):
                begun.add(event.key)
            assert not isinstance(event, Scored) or event.key not in begun, f"{event.key} had its scores after a token"
        outcome.take(core)
        if retract_every and number % retract_every == 0:
            retract_any(core, rng)
        if not core.requests and core.idle:
            return outcome
    raise AssertionError("it never ends")


def retract_any(core: NodeCore, rng: random.Random) -> None:
    """Those whose prompt is being computed too."""
    holders = [req for req in core.queues.requests.values() if req.state.value in ("running", "prefilling")]
    if holders and max(req.incarnation for req in holders) < 6:
        core.queues.retract(rng.choice(holders))


def assert_scores(jobs: Sequence[Job], outcome: Outcome) -> None:
    """Of each position but the first, once and in order. `run` asserts that none follows a token."""
    for job in jobs:
        entries = outcome.scores[f"r{job.rid}"]
        assert len(entries) == (len(job.prompt) - 1 if job.sampling.prompt_logprobs >= 0 else 0), f"r{job.rid}"
        for position, entry in enumerate(entries, 1):
            assert entry.logprob == pytest.approx(reference(job.prompt, position), abs=1e-5)
            assert len(entry.top_ids) == NUM_TOP
            assert list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True)
            if job.prompt[position] in entry.top_ids:
                assert entry.logprob == entry.top_logprobs[entry.top_ids.index(job.prompt[position])]


CELLS = [
    CoreKnobs(chunk_size=16),
    CoreKnobs("simulated", chunk_size=7, page_size=4),
    CoreKnobs("simulated", chunk_size=16, width=4, mix=False, needs_cpu_seq_lens=True, overlap=False),
    CoreKnobs("inline", chunk_size=16, width=4, topk=2, steps=2, spec="eagle"),
    CoreKnobs("simulated", chunk_size=16, cold_pages=50, num_pages=30),
    CoreKnobs("inline", chunk_size=16, stages=2),
]


@pytest.mark.parametrize("knobs", CELLS, ids=range(len(CELLS)))
def test_every_prompt_token_is_scored_once_and_right(knobs: CoreKnobs) -> None:
    """Beside others that ask for nothing. Prompts share their beginnings, so caches would spare what must be read."""
    jobs = [scored(job) if job.rid % 3 else job for job in draw_jobs(random.Random(5), 12, max_prompt=60)]
    core = make_core(knobs)
    for retract_every in (0, 3):
        outcome = run(core, jobs, retract_every)
        assert_scores(jobs, outcome)
        assert_streams(jobs, outcome)
    assert_whole(core)


@pytest.mark.parametrize("known", [1, 17, 60])
def test_known_scores_are_not_computed_again_and_the_cache_helps(known: int) -> None:
    job = scored(Job(1, tuple(random.Random(1).randrange(95) for _ in range(60)), SamplingParams(4, 0.0), 1))
    core = make_core(CoreKnobs(chunk_size=16))
    run(core, [Job(0, job.prompt, SamplingParams(1, 0.0), 0)])
    request = job.request()
    request.scored = known
    core.scheduler.intake.submit(request)
    found: list[int] = []
    while core.queues.requests or not core.loop.idle:
        core.loop.step(block=True)
        for event in core.queues.take_events():
            if isinstance(event, Scored):
                found += range(event.first_pos, event.first_pos + len(event.logprobs))
    assert found == list(range(known, 60))
    cacheable = (59 if known == 60 else known - 1) // 16 * 16
    assert request.cached_tokens == cacheable and request.output_ids == job.expected()


def test_scores_on_tensors_are_those_of_the_kernels() -> None:
    """In as many parts as they take."""
    count, generator = 2 * SCORED_AT_ONCE + 9, torch.Generator().manual_seed(3)
    logits = torch.randn((count, 300), generator=generator) * 4
    ids = torch.randint(0, 300, (count,), generator=generator)
    for num_top in (0, 1, 5, 300, 500):
        own = score(logits, ids, num_top)
        other = score_torch(logits, num_top, ids)
        assert torch.equal(own.logprobs, other.logprobs) and torch.equal(own.top_ids, other.top_ids)
        assert torch.equal(own.top_logprobs, other.top_logprobs)
        softmax = torch.log_softmax(logits.double(), dim=1).gather(1, ids.unsqueeze(1)).squeeze(1)
        assert torch.allclose(own.logprobs.double(), softmax, atol=1e-5)
