"""What the cores of cuda_core.py are asked: prompts of less than a chunk to several, and each way to sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from shared.core.sampling_params import SamplingParams
from tests.support.cores.core_rig import Job
from tests.support.gpus.cuda_core import Kind
from tests.support.models.draft_head import VOCAB
from tests.support.oracles.grammar_oracle import JSON, KINDS, following

SAMPLINGS = (
    SamplingParams(9, temperature=0.0),
    SamplingParams(
        7, temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.4, num_logprobs=2, prompt_logprobs=1
    ),
    SamplingParams(8, temperature=0.8, top_p=0.9, presence_penalty=0.5, logit_bias=((7, 2.0),)),
    SamplingParams(9, temperature=0.7, top_k=9, bad_words=((3,), (5, 6)), min_tokens=6, stop_token_ids=(11, 12)),
)
LENGTHS = (1, 17, 16, 33, 7)
GRAMMARS = (KINDS["regex"][0], KINDS["choice"][0], "", JSON)  # the third has none, and steps with the others


def jobs(count: int = len(LENGTHS)) -> list[Job]:
    """For any core."""
    return jobs_for(Kind(), (), count)


def jobs_for(kind: Kind, adapters: Sequence[str], count: int = len(LENGTHS)) -> list[Job]:
    """`adapters`: digests of those that the core has."""
    draw = torch.Generator().manual_seed(3)
    made = []
    for rid in range(count):
        prompt = torch.randint(0, VOCAB, (LENGTHS[rid % len(LENGTHS)],), generator=draw).tolist()
        if kind.cache and made:  # of the longest one there is
            prompt = [*max(made, key=lambda job: len(job.prompt)).prompt[: 10 * rid], *prompt[:9]]
        made.append(Job(rid, tuple(prompt), SAMPLINGS[rid % len(SAMPLINGS)], rid))
    if kind.grammars:
        made = [constrained(job, GRAMMARS[job.rid % len(GRAMMARS)]) for job in made]
    if kind.adapters:
        digests = ["", *adapters]
        made = [replace(job, adapter=digests[job.rid % len(digests)]) for job in made]
    if kind.siblings:
        made += [replace(job, seq_index=index, seed=50 + index) for job in made[1:4:2] for index in (1, 2)]
    return made


def constrained(job: Job, grammar: str) -> Job:
    return replace(job, sampling=following(job.sampling, grammar)) if grammar else job
