"""Promise 1 in small: HashLM through the paged model and the sampler gives the reference stream, logprobs included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shared.core.sampling_params import SamplingParams
from shared.kernel.code.step_layout import Layout
from shared.kv.pool import KVPool
from shared.model.hashlm.model import HashLM
from shared.model.math.interface import ModelInputs
from shared.sample.interface import History, SamplingBatch
from shared.sample.sampler_numba import sample_cpu
from tests.support.cores.sampling_cases import sample_tensors
from tests.support.oracles.hashlm_reference import ReferenceRun, reference_run

NUM_TOKENS = 60
PAGE_SIZE = 4


def random_params(rng: np.random.Generator) -> SamplingParams:
    def maybe(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.5 else default

    return SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=float(rng.choice([0.0, 0.5, 0.8, 1.0, 1.7])),
        top_k=maybe(int(rng.integers(1, 60)), 0),
        top_p=maybe(float(rng.uniform(0.2, 1.0)), 1.0),
        min_p=maybe(float(rng.uniform(0.0, 0.2)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.7, 1.6)), 1.0),
        presence_penalty=maybe(float(rng.uniform(-1, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-0.5, 1)), 0.0),
        logit_bias=maybe(((7, 2.0), (11, -3.0)), ()),
        min_tokens=maybe(20, 0),
        stop_token_ids=(95, 12),
        num_logprobs=0,
    )


class Engine:
    """The least engine: all rows in every step, until each has ended."""

    def __init__(self, seed: int, sampler: Any, num_rows: int = 12) -> None:
        rng = np.random.default_rng(seed)
        self.model, self.sampler = HashLM(), sampler
        self.params = [random_params(rng) for _ in range(num_rows)]
        self.prompts = [rng.integers(0, 96, rng.integers(1, 20)).tolist() for _ in range(num_rows)]
        self.seeds = [int(s) for s in rng.integers(0, 2**64, num_rows, dtype=np.uint64)]
        pages_per_row = -(-(20 + NUM_TOKENS) // PAGE_SIZE)
        self.kv = KVPool(self.model.kv_planes(PAGE_SIZE), num_rows * pages_per_row + 1, PAGE_SIZE)
        self.table = rng.permutation(num_rows * pages_per_row).reshape(num_rows, -1).astype(np.int32) + 1
        self.history = History(torch.zeros((num_rows, 128), dtype=torch.int32), torch.arange(num_rows))
        self.runs = [ReferenceRun([], [], "length") for _ in range(num_rows)]

    def step(self, inputs: list[list[int]]) -> list[int]:
        lens = np.array([len(ids) for ids in inputs])
        starts = np.array([len(p) + len(r.ids) for p, r in zip(self.prompts, self.runs, strict=True)]) - lens
        positions = np.concatenate([start + np.arange(n) for start, n in zip(starts, lens, strict=True)])
        ids = np.concatenate(inputs).astype(np.int64)
        rows = np.repeat(np.arange(len(inputs)), lens)
        self.history.tokens[rows, positions] = torch.from_numpy(ids.astype(np.int32))
        cu_q_lens = torch.from_numpy(np.concatenate([[0], np.cumsum(lens)]).astype(np.int32))
        last = (cu_q_lens[1:] - 1).to(torch.int64)
        layout = Layout(cu_q_lens, (torch.from_numpy(self.table),), int(lens.max()), 128)
        tensors = (torch.from_numpy(ids), torch.from_numpy(positions), layout, last)
        output = self.model.forward(ModelInputs(*tensors), self.kv)
        batch = SamplingBatch.build(self.params, self.seeds, [len(p) for p in self.prompts])
        drawn = self.sampler(output.logits, batch, np.arange(len(inputs)), tensors[1][last], self.history)
        for run, token, logprob in zip(self.runs, drawn.ids.tolist(), drawn.logprobs.tolist(), strict=True):
            run.ids.append(token)
            run.logprobs.append(logprob)
        return [int(token) for token in drawn.ids]

    def run(self) -> list[ReferenceRun]:
        tokens = self.step(self.prompts)
        for _ in range(NUM_TOKENS - 1):
            tokens = self.step([[token] for token in tokens])
        return [cut(run, params) for run, params in zip(self.runs, self.params, strict=True)]


def cut(run: ReferenceRun, params: SamplingParams) -> ReferenceRun:
    ends = [k for k, token in enumerate(run.ids) if token in params.stop_token_ids]
    num = ends[0] + 1 if ends else NUM_TOKENS
    return ReferenceRun(run.ids[:num], run.logprobs[:num], "stop" if ends else "length")


@pytest.mark.parametrize("sampler", [sample_cpu, sample_tensors])
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_paged_model_and_sampler_give_the_reference_stream(sampler: Any, seed: int) -> None:
    engine = Engine(seed, sampler)
    expected = [
        reference_run(*request, num=NUM_TOKENS)
        for request in zip(engine.prompts, engine.params, engine.seeds, strict=True)
    ]
    assert engine.run() == expected


def test_the_cases_above_end_both_ways() -> None:
    reasons = [run.finish_reason for run in Engine(1, sample_cpu).run()]
    assert {"stop", "length"} == set(reasons)
