"""Drafts are drawn as the target draws: same function, same noise at the position of the token that is drafted, same
penalties and bias. So a draft head that knows the target well foresees its draw at every temperature. Knows nothing of
where hidden states come from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureMap
from shared.model.draft_head import DraftHead
from shared.sample.sampler import sample


class Draw:
    """Draws for N of a step's rows, one draft each per call. `batch_rows` (N,) are their places in the batch."""

    def __init__(
        self, fb: ForwardBatch, future_map: FutureMap, vocab_size: int, batch_rows: npt.NDArray[np.int64]
    ) -> None:
        self._sampling = fb.plan.sampling
        self._batch_rows = batch_rows
        self._pool_rows = fb.future.indices[torch.from_numpy(batch_rows).to(fb.future.indices.device)]
        self._future_map = future_map
        self._vocab_size = vocab_size
        reads = fb.plan.history_rows.any()
        self._history = future_map.history_of(fb.plan.req_pool_indices) if reads else None

    def next(
        self, head: DraftHead, hidden: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts (N,) int64 of the tokens after `ids` (N,), which lie at `positions` (N,), and the probability (N,)
        float32 that the head gives them before penalties and temperature. The history gets the ids first."""
        if self._history is not None:
            self._future_map.write_history(self._pool_rows, positions, ids)
        logits = head.logits(hidden)
        full = logits if head.d2t is None else _scattered(logits, head.d2t, self._vocab_size)
        drafts = sample(full, self._sampling, self._batch_rows, positions, self._history).ids
        chosen = full.gather(1, drafts.unsqueeze(1)).squeeze(1)
        return drafts, (chosen - logits.logsumexp(dim=1)).exp()


def _scattered(logits: torch.Tensor, d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """(N, Vd) -> (N, vocab_size): what the head has no id for is never drafted."""
    full = logits.new_full((len(logits), vocab_size), -torch.inf)
    return full.index_copy_(1, d2t, logits)
