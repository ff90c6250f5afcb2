"""Rank likely next tokens, as drafts for the verifier.

First comes the token that `sample` draws, then the others in order of logit + temperature * noise.
"""

from __future__ import annotations

import torch

from shared.kernel.product import libraries
from shared.sample.interface import History, SamplingBatch
from shared.sample.sampler import RowOf
from shared.sample.sampler_torch import OutputRows, rank_candidates_torch


def rank_candidates(
    logits: torch.Tensor,
    batch: SamplingBatch,
    row_of: RowOf,
    positions: torch.Tensor,
    history: History | None,
    num: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids (E, num) int64 and their log-probabilities (E, num) float32.

    `num` is at most the vocabulary's size."""
    if isinstance(row_of, OutputRows):
        if libraries.runs_triton(logits.device):
            from shared.sample.sampler_triton import rank_candidates_triton

            return rank_candidates_triton(logits, row_of, positions, history, num)
        return rank_candidates_torch(logits, row_of, positions, history, num)
    from shared.sample.sampler_numba import rank_candidates_cpu  # GPU nodes do not load numba

    return rank_candidates_cpu(logits, batch, row_of, positions, history, num)
