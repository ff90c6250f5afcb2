"""Score ids for drafts as logit + temperature * noise.

Apart from filters and rounding, the sampler draws the id with the largest score.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.gpu_kernel.launch.launcher import launch, recorded
from shared.gpu_kernel.launch.real_models import REAL_MODELS
from shared.gpu_kernel.launch.signatures import REAL_BATCH, Signature
from shared.gpu_kernel.noise import gumbel, noise_bits, row_keys
from shared.gpu_kernel.ranks import BLOCK
from shared.gpu_kernel.sample import GREEDY

EXACT = True  # see noise.py


@triton.jit
def score_kernel(logits, scores, positions, rows, mode, temperature, seeds, stride, vocab_size):
    output = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + output)
    values = tl.load(logits + output * stride + ids, mask=ids < vocab_size, other=0.0)
    if tl.load(mode + row) != GREEDY:
        first, second = row_keys(tl.load(seeds + row), tl.load(positions + output) + 1)
        values += tl.load(temperature + row) * gumbel(noise_bits(first, second, ids))
    tl.store(scores + output * vocab_size + ids, values, mask=ids < vocab_size)


def score_candidates(
    logits: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    mode: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
) -> torch.Tensor:
    """Return scores (E, vocab) float32.

    logits: (E, vocab) float32, rows of any stride. positions, rows: (E,) int64. mode, seeds: (B,) int64.
    temperature: (B,) float32, see shared/sample/params.py."""
    num, vocab_size = logits.shape
    scores = torch.empty((num, vocab_size), dtype=torch.float32, device=logits.device)
    grid = (num, triton.cdiv(vocab_size, BLOCK.value))
    columns = (positions, rows, mode, temperature, seeds)
    launch(score_kernel, grid, logits, scores, *columns, logits.stride(0), vocab_size)
    return scores


def real_signatures() -> set[Signature]:
    integers, floats = torch.empty(REAL_BATCH, dtype=torch.int64, device="meta"), torch.empty(1, device="meta")
    with recorded() as signatures:
        for model in REAL_MODELS:
            logits = torch.empty(REAL_BATCH, model.vocab_size, device="meta")
            score_candidates(logits, integers, integers, integers, floats, integers)
    return signatures
