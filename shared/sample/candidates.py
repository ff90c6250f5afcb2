"""What may come next, best first: for drafts, which the verifier judges. Runs where the sampler does.

The first candidate is the one that `sample` draws from these logits. The others follow by logit + temperature * noise,
the order in which they would be drawn if those before them were not there. Knows nothing of drafts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from shared.kernel import sample_cpu
from shared.sample.interface import History, SamplingBatch
from shared.sample.sampler import kernel_inputs
from shared.sample.sampler_torch import rank_candidates_torch


def rank_candidates(
    logits: torch.Tensor,
    batch: SamplingBatch,
    row_of: npt.NDArray[np.int64],
    positions: torch.Tensor,
    history: History | None,
    num: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments as of `sample`; ids (E, num) int64, and (E, num) float32 the logarithm of how likely each is drawn, as
    far as these logits know. num is at most the vocabulary."""
    if logits.device.type != "cpu":
        return rank_candidates_torch(logits, batch, row_of, positions, history, num)
    values, params, outputs = kernel_inputs(logits, batch, row_of, positions, history)
    ids, log_probs = np.zeros((len(values), num), np.int64), np.zeros((len(values), num), np.float32)
    sample_cpu.rank_candidates(values, params, outputs, ids, log_probs)
    return torch.from_numpy(ids), torch.from_numpy(log_probs)
