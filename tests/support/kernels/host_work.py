"""What the host does for a decode step that has a graph, beside the replay: counted on the virtual GPU.

The network is in the graph, so its size changes no count. Sampler and relay have Triton's kernels, interpreted.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from shared.core.sampling_params import SamplingParams
from tests.support.cores.core_rig import Job
from tests.support.gpus.cuda_core import Kind, make_core
from tests.support.kernels import interpreter
from tests.support.virtual_gpu.device import make_device
from tests.support.virtual_gpu.kernels import kernels_on

NUM_ROWS, STEPS = 2, 3
WAYS = {
    "greedy": (Kind(), SamplingParams(24, temperature=0.0)),
    "temperature": (Kind(), SamplingParams(24, temperature=0.8)),
    "top-k, top-p": (Kind(), SamplingParams(24, temperature=0.8, top_k=9, top_p=0.8)),
    "penalties, bias": (
        Kind(),
        SamplingParams(24, temperature=0.0, repetition_penalty=1.2, logit_bias=((3, 1.0),)),
    ),
    "log-probabilities": (Kind(), SamplingParams(24, temperature=0.0, num_logprobs=2)),
    "greedy, n-gram drafts": (Kind(spec="ngram"), SamplingParams(60, temperature=0.0)),
}


@dataclass(frozen=True, slots=True)
class HostWork:
    """Of one step. No step waits for the device."""

    uploads: int
    replays: int
    launches: int
    downloads: int


def host_work(name: str) -> HostWork:
    """Of each of some steps in a row, which are alike."""
    (kind, sampling), gpu = WAYS[name], make_device("eager", sanitize=False)
    with pytest.MonkeyPatch.context() as patch, kernels_on(gpu):
        patch.setattr(interpreter.kernels("sample"), "splits_of", lambda num_rows: 1)
        core = make_core(kind, gpu, graphs=True, max_running=NUM_ROWS)
        for rid in range(NUM_ROWS):
            core.submit(Job(rid, (5, 6, 7, rid), sampling, rid).request())
        assert core.graphs is not None
        while core.graphs.graphed == core.graphs.graphed_prompts:
            core.step(block=True)
        found = set()
        for _ in range(STEPS):
            before = core.graphs.graphed
            with gpu.counting() as counts:
                core.step(block=True)
            assert core.graphs.graphed == before + 1 and counts.syncs == counts.h2d_pageable == 0, counts.told()
            found.add(HostWork(counts.h2d_async, counts.replays, counts.launches, counts.d2h_async))
        core.close()
    (work,) = found
    return work


def counted() -> str:
    """Return a row for each way to sample."""
    lines = ["| sampling | uploads | replays | launches | downloads |", "|---|---|---|---|---|"]
    return "\n".join((*lines, *(row_of(name) for name in WAYS)))


def row_of(name: str) -> str:
    work = host_work(name)
    return f"| {name} | {work.uploads} | {work.replays} | {work.launches} | {work.downloads} |"


if __name__ == "__main__":
    print(counted())
