"""HashDraft as a drafter: reads the relayed state, draws drafts with the request's own noise and penalties, so that
they equal what the target will draw. Knows nothing of acceptance."""

from __future__ import annotations

import numpy as np
import torch

from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureIndices, FutureMap, RelaySpec
from shared.kv.pool import KVPool
from shared.model.hashdraft import HashDraft
from shared.sample.sampler import sample


class HashDrafter:
    """The relay carries HashLM's running state under the name that EAGLE's heads use for theirs."""

    relay_specs = (RelaySpec("hidden_states", (1,), torch.int64),)

    def __init__(self, draft: HashDraft) -> None:
        self._draft = draft

    def propose(self, fb: ForwardBatch, future_map: FutureMap, kv: KVPool) -> torch.Tensor:
        plan, first = fb.plan, fb.plan.num_prefill
        pool_rows = fb.future.indices[first:]
        batch_rows = np.arange(first, plan.batch_size)
        history = future_map.history_of(plan.req_pool_indices) if plan.history_rows.any() else None

        def next_token(logits: torch.Tensor, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            if history is not None:
                future_map.write_history(pool_rows, positions, input_ids)
            return sample(logits, plan.sampling, batch_rows, positions, history).ids

        return self._draft.propose(
            bonus_ids=fb.inputs.input_ids[fb.num_chunk_tokens :: plan.width].clone(),
            committed=fb.committed[first:],
            hidden=future_map.relayed("hidden_states", FutureIndices(pool_rows)),
            page_table=fb.inputs.page_table[first:].contiguous(),
            kv=kv,
            width=plan.width,
            next_token=next_token,
        )

    def extend(self, fb: ForwardBatch, next_ids: torch.Tensor, kv: KVPool) -> None:
        inputs = fb.inputs
        self._draft.extend(inputs.input_ids, next_ids, inputs.positions, inputs.cu_q_lens, inputs.page_table, kv)
