"""HashDraft as a drafter: reads the relayed state, draws drafts with the request's own noise and penalties, so that
they equal what the target will draw. Knows nothing of acceptance."""

from __future__ import annotations

import numpy as np
import torch

from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureIndices, FutureMap, RelaySpec
from shared.engine.verify import Drafts, Verified
from shared.kv.pool import KVPool
from shared.model.hashdraft import HashDraft
from shared.model.interface import ModelOutput
from shared.sample.sampler import sample


class HashDrafter:
    """The relay carries HashLM's running state under the name that EAGLE's heads use for theirs."""

    relay_specs = (RelaySpec("hidden_states", (1,), torch.int64),)
    key_lookahead = 1

    def __init__(self, draft: HashDraft) -> None:
        self._draft = draft

    def propose(self, fb: ForwardBatch, future_map: FutureMap, kv: KVPool) -> Drafts:
        plan, first = fb.plan, fb.plan.num_prefill
        pool_rows = fb.future.indices[first:]
        batch_rows = np.arange(first, plan.batch_size)
        history = future_map.history_of(plan.req_pool_indices) if plan.history_rows.any() else None

        def next_token(logits: torch.Tensor, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            if history is not None:
                future_map.write_history(pool_rows, positions, input_ids)
            return sample(logits, plan.sampling, batch_rows, positions, history).ids

        ids = self._draft.propose(
            bonus_ids=fb.inputs.input_ids[fb.num_chunk_tokens :: plan.width].clone(),
            committed=fb.committed[first:],
            hidden=future_map.relayed("hidden_states", FutureIndices(pool_rows)),
            page_table=fb.inputs.page_table[first:].contiguous(),
            kv=kv,
            width=plan.width,
            next_token=next_token,
        )
        return Drafts(ids)

    def extend(self, fb: ForwardBatch, output: ModelOutput, verified: Verified, kv: KVPool) -> dict[str, torch.Tensor]:
        inputs = fb.inputs
        self._draft.extend(
            inputs.input_ids, verified.next_ids, inputs.positions, inputs.cu_q_lens, inputs.page_table, kv
        )
        hidden = output.hidden if len(output.hidden) else output.hidden.new_zeros(1, 1)  # chunks only, none emits
        return {"hidden_states": hidden[verified.last_output_idx]}
