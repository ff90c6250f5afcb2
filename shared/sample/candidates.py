"""What may come next, best first: for drafts, which the verifier judges. Runs where the sampler does.

The first candidate is the one that `sample` draws from these logits. The others follow by logit + temperature * noise,
the order in which they would be drawn if those before them were not there. Knows nothing of drafts.
"""

from __future__ import annotations

import torch

from shared.sample.interface import History, SamplingBatch
from shared.sample.sampler import RowOf, runs_triton
from shared.sample.sampler_torch import OutputRows, rank_candidates_torch


def rank_candidates(
    logits: torch.Tensor,
    batch: SamplingBatch,
    row_of: RowOf,
    positions: torch.Tensor,
    history: History | None,
    num: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments as of `sample`; ids (E, num) int64, and (E, num) float32 the logarithm of how likely each is drawn, as
    far as these logits know. num is at most the vocabulary."""
    if isinstance(row_of, OutputRows):
        if runs_triton(logits.device):
            from shared.sample.sampler_triton import rank_candidates_triton

            return rank_candidates_triton(logits, row_of, positions, history, num)
        return rank_candidates_torch(logits, row_of, positions, history, num)
    from shared.sample.sampler_numba import rank_candidates_cpu  # a node of another device does without numba

    return rank_candidates_cpu(logits, batch, row_of, positions, history, num)
