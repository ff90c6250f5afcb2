"""Draw drafts with the target's sampling function, noise, penalties and bias.

So a good head predicts the target's draw at any temperature.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureMap
from shared.model.math.draft_head import DraftHead
from shared.sample.candidates import rank_candidates
from shared.sample.sampler import RowOf, sample


class Draw:
    def __init__(
        self,
        fb: ForwardBatch,
        future_map: FutureMap,
        vocab_size: int,
        host_rows: npt.NDArray[np.int64],
        rows: torch.Tensor,
    ) -> None:
        """`host_rows` (N,): the rows' indices in the batch. `rows` (N,): the same, on the device."""
        self._sampling = fb.plan.sampling
        self._fb, self._host_rows, self._rows = fb, host_rows, rows
        self._row_of: RowOf = fb.row_of(host_rows, rows)
        self._committed = fb.committed[rows]
        self._pool_rows = fb.future.indices[rows]
        self._future_map = future_map
        self._vocab_size = vocab_size
        self._takes_largest = self._sampling.takes_largest
        self._history = future_map.history_of(fb.future) if self._sampling.needs_history else None

    def next(self, head: DraftHead, logits: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Write `ids` (N,) at `positions` (N,) to the history. Return the draft after each id, (N,) int64.

        `logits` (N, Vd): the head's.
        """
        self._record(ids, positions)
        logits, words = self._words(head, logits)
        drafts = sample(logits, self._sampling, self._row_of, positions, self._history).ids
        return _target_ids(drafts, words)

    def first(
        self, head: DraftHead, logits: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor, num: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do the same as `next`, but return the `num` likeliest drafts, the drawn one first.

        Return ids (N, num) and their float32 probabilities, which include noise and penalties.
        """
        self._record(ids, positions)
        logits, words = self._words(head, logits)
        drafts, log_probs = rank_candidates(logits, self._sampling, self._row_of, positions, self._history, num)
        return _target_ids(drafts, words), log_probs.exp()

    def candidates(
        self, head: DraftHead, logits: torch.Tensor, path: torch.Tensor, num: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the `num` likeliest tokens (N, n, num) after each of n tree nodes, and their log-probabilities.

        path (N, n, depth) int64: a node's drafts after the bonus token; logits (N * n, Vd).
        """
        num_rows, num_nodes, depth = path.shape
        row_of = self._fb.row_of(self._host_rows.repeat(num_nodes), self._rows.repeat_interleave(num_nodes))
        positions = (self._committed + depth).repeat_interleave(num_nodes)
        history = self._history
        if history is not None:
            common = (self._committed + 1).repeat_interleave(num_nodes)
            history = replace(history, common=common, drafted=path.flatten(0, 1).to(torch.int32))
        logits, words = self._words(head, logits)
        ids, log_probs = rank_candidates(logits, self._sampling, row_of, positions, history, num)
        return _target_ids(ids, words).view(num_rows, num_nodes, num), log_probs.view(num_rows, num_nodes, num)

    def _record(self, ids: torch.Tensor, positions: torch.Tensor) -> None:
        if self._history is not None:
            self._future_map.write_history(self._pool_rows, positions, ids)

    def _words(self, head: DraftHead, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits to draw from, and the target id of each column, or None if columns are target ids.

        If noise, penalties or bias are used, columns must be target ids.
        """
        if head.d2t is None or self._takes_largest:
            return logits, head.d2t
        full = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        return full.index_copy_(1, head.d2t, logits), None


def _target_ids(places: torch.Tensor, words: torch.Tensor | None) -> torch.Tensor:
    return places if words is None else words[places]
