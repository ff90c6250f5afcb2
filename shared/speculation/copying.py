"""Copy drafts from a row's own text if the row's last tokens occurred before; otherwise ask a draft head.

The method is like SuffixDecoding (arXiv 2411.04975), with a plain lookup instead of a suffix tree.
"""

from __future__ import annotations

import torch

from shared.engine.drafter import Drafter
from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureMap
from shared.engine.verify import Drafts, Verified
from shared.engine.window import merge
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.math.interface import ModelOutput
from shared.speculation.ngram import copies_of


class CopyingDrafter:
    """Wraps a head's Drafter. It adds no draft state to a hand-off, so a peer may run the head alone."""

    reads_history = True

    def __init__(self, head: Drafter, shortest: int) -> None:
        """`shortest`: length of the shortest match that a row copies, from 1 to LONGEST_MATCH tokens."""
        self._head = head
        self._shortest = shortest
        self.state_name = head.state_name
        self.relay_specs = head.relay_specs
        self.key_lookahead = head.key_lookahead
        self.drafts_trees = head.drafts_trees

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        return self._head.kv_planes(page_size)

    def propose(self, fb: ForwardBatch, future_map: FutureMap, kv: KVPool) -> Drafts:
        copies, matched = copies_of(fb, future_map)
        stood = matched >= self._shortest
        if stood.device.type == "cpu" and bool(stood.all()):  # on a GPU, the host would wait for this test
            return Drafts(copies)
        return merge(stood.unsqueeze(1), copies, self._head.propose(fb, future_map, kv))

    def extend(
        self, fb: ForwardBatch, output: ModelOutput, verified: Verified, future_map: FutureMap, kv: KVPool
    ) -> dict[str, torch.Tensor]:
        return self._head.extend(fb, output, verified, future_map, kv)
