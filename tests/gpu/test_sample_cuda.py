"""The sampler on CUDA draws the ids, and gives the logprobs, that the CPU does: bit for bit."""

from __future__ import annotations

import pytest
import torch

from shared.sample.sampler_numba import sample_cpu
from tests.support.sampling_cases import Case, sample_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_cuda_and_cpu_agree_bit_for_bit() -> None:
    for seed in range(20):
        case = Case(seed, num_logprobs=seed % 5 - 1)
        host, device = case.run(sample_cpu), case.run(sample_tensors, "cuda")
        for name in ("ids", "logprobs", "top_ids", "top_logprobs"):
            assert torch.equal(getattr(host, name), getattr(device, name).cpu()), name
