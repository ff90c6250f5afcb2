"""Sample tokens: one function of (logits, parameters, seed, position, history), without state.

    penalties -> bias -> masks -> temperature -> top-k -> top-p -> min-p -> Gumbel-max; ties go to the lowest id

The token at position p + 1 is drawn from the logits at p with noise hash(seed, p + 1, id). So other rows, chunks,
speculation and the choice of the node do not change the token. Three implementations return equal ids: numba on a CPU,
Triton on CUDA, and torch on a GPU without Triton.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from shared.kernel.product import libraries
from shared.sample.interface import DeviceMasks, History, SampleOutput, SamplingBatch, TokenMasks
from shared.sample.sampler_torch import OutputRows, sample_torch, score_torch

RowOf = npt.NDArray[np.int64] | OutputRows


def sample(
    logits: torch.Tensor,
    batch: SamplingBatch,
    row_of: RowOf,
    positions: torch.Tensor,
    history: History | None = None,
    masks: TokenMasks | DeviceMasks | None = None,
) -> SampleOutput:
    """Draw one token for each of E outputs, on the stream that made the logits.

    - logits (E, vocab) float32, left unchanged
    - row_of (E,), each output's batch row: on the host for CPU kernels, else OutputRows
    - positions (E,) int64, of the input tokens, on the logits' device
    - history, on host or device like `row_of`: may be None if no row has penalties or bad words of several tokens
    - masks, on host or device like `row_of`: None without grammars"""
    if logits.dtype != torch.float32:
        raise TypeError(f"logits are {logits.dtype}: sampling needs float32 logits")
    if history is None and batch.needs_history:
        raise ValueError("a row has penalties or bad words, but there is no history of its tokens")
    if isinstance(row_of, OutputRows):
        assert not isinstance(masks, TokenMasks)
        if libraries.runs_triton(logits.device):
            from shared.sample.sampler_triton import sample_triton

            return sample_triton(logits, row_of, positions, history, masks)
        return sample_torch(logits, row_of, positions, history, masks)
    assert not isinstance(masks, DeviceMasks)
    from shared.sample.sampler_numba import sample_cpu  # GPU nodes do not load numba

    return sample_cpu(logits, batch, row_of, positions, history, masks)


def score(logits: torch.Tensor, ids: torch.Tensor, num_top: int) -> SampleOutput:
    """Return the log-probabilities of E given tokens, and the `num_top` likeliest tokens of each row of logits.

    logits (E, vocab) float32, ids (E,) int64 on the same device. As in `sample`, log-probabilities come from the raw
    logits."""
    if libraries.runs_triton(logits.device):
        from shared.sample.sampler_triton import score_triton

        return score_triton(logits, num_top, ids)
    if logits.device.type != "cpu":
        return score_torch(logits, num_top, ids)
    from shared.sample.sampler_numba import with_logprobs

    num_best = np.full(len(ids), min(num_top, logits.shape[1]), dtype=np.int32)
    return with_logprobs(logits.contiguous().numpy(), num_best, ids.numpy())
