"""Draft with one head, which runs on its own hidden states (EAGLE-3, arXiv 2503.01840).

EagleWorkerV2 drafts a tree (shared/speculation/draft_tree.py) or a chain:

    slot                  L-1                L            L+1
    head reads    (bonus, feature)   (draft 1, hidden)  (draft 2, hidden)        L = committed, feature: the target's
    head draws         draft 1            draft 2           draft 3
                  `- extend of the       `- propose: width - 2 forwards, whose slots the next extend
                     step before            writes again, with the target's own features
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureIndices, FutureMap, RelaySpec
from shared.engine.verify import Drafts, Verified, last_token_idx, next_ids
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.math.draft_head import DraftHead
from shared.model.math.interface import ModelOutput
from shared.speculation.draft_tree import Level, grow
from shared.speculation.draw import Draw
from shared.speculation.views import aux_of, per_row, view_of, window_of


class EagleWorkerV2:
    """A Drafter.

    Relayed per row:
    - topk_index (topk,) int64: the first drafts, the drawn one first
    - topk_p (topk,) float32, for a tree: the probabilities of these drafts
    - hidden_states: the head's state at slot L - 1
    """

    key_lookahead = 1
    reads_history = False

    def __init__(self, head: DraftHead, vocab_size: int, topk: int = 1, steps: int = 1) -> None:
        self._head = head
        self._vocab_size = vocab_size
        self._topk, self._steps = topk, steps
        self.drafts_trees = topk > 1
        self.state_name = f"eagle, topk {topk}, head {head.weights_hash}"
        self.relay_specs: Sequence[RelaySpec] = (
            *((RelaySpec("topk_p", (topk,), torch.float32),) if topk > 1 else ()),
            RelaySpec("topk_index", (topk,), torch.int64),
            RelaySpec("hidden_states", head.hidden_shape, head.hidden_dtype),
        )

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        return self._head.kv_planes(page_size)

    def propose(self, fb: ForwardBatch, future_map: FutureMap, kv: KVPool) -> Drafts:
        rows = FutureIndices(fb.future.indices[fb.plan.num_prefill :])
        ids, hidden = future_map.relayed("topk_index", rows), future_map.relayed("hidden_states", rows)
        draw = Draw(fb, future_map, self._vocab_size, *fb.decode_rows())
        if self._topk > 1:
            level = Level(ids, future_map.relayed("topk_p", rows).log(), torch.full_like(ids, -1))
            return grow(self._head, draw, fb, kv, level, hidden, self._steps)
        return self._chain(fb, draw, kv, ids[:, 0], hidden)

    def _chain(self, fb: ForwardBatch, draw: Draw, kv: KVPool, draft: torch.Tensor, hidden: torch.Tensor) -> Drafts:
        plan = fb.plan
        committed, drafts = fb.committed[plan.num_prefill :], [draft]
        for i in range(plan.width - 2):
            output = self._head.forward(draft, hidden, window_of(fb, (committed + i).unsqueeze(1)), kv)
            draft, hidden = draw.next(self._head, output.logits, draft, committed + i + 1), output.hidden
            drafts.append(draft)
        return Drafts(torch.stack(drafts, dim=1))

    def extend(
        self, fb: ForwardBatch, output: ModelOutput, verified: Verified, future_map: FutureMap, kv: KVPool
    ) -> dict[str, torch.Tensor]:
        ids, aux, rows = next_ids(fb, verified), aux_of(output), fb.arrays.emitting
        inputs = (ids, aux, view_of(fb), kv)
        if not (fb.plan.drafts_next and len(rows)):
            self._head.write(*inputs)
            return {}
        last = self._head.extend(*inputs, last_token_idx(fb, verified)[rows])
        draw = Draw(fb, future_map, self._vocab_size, fb.host.emitting, rows)
        bonus, positions = verified.next_token[rows], verified.seq_lens[rows]
        state = {"hidden_states": last.hidden}
        if self._topk > 1:
            state["topk_index"], state["topk_p"] = draw.first(self._head, last.logits, bonus, positions, self._topk)
        else:
            state["topk_index"] = draw.next(self._head, last.logits, bonus, positions).unsqueeze(1)
        return per_row(state, rows, fb.plan.batch_size)
