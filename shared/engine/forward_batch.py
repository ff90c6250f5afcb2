"""ForwardBatch: the one place where a plan's inputs become device tensors. Built, read and changed on the forward
stream by the worker; the scheduler's batch is never written from here (S8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from shared.engine.future_map import FutureIndices, FutureMap
from shared.engine.plan import Int32s, Int64s, StepPlan
from shared.model.interface import ModelInputs


@dataclass(slots=True)
class ForwardBatch:
    """One step on the device. Token t belongs to batch row `token_rows[t]`; output e is token `inputs.logits_idx[e]`.

    committed: (B,) int64, device: exact lengths before the step, from the plan or, for speculation without host
    lengths, from the relay. tag_ok: (B,) bool, True for chunk rows.
    """

    plan: StepPlan
    future: FutureIndices
    committed: torch.Tensor
    tag_ok: torch.Tensor
    inputs: ModelInputs
    token_rows: Int64s  # (T,)
    output_rows: Int64s  # (E,)
    # Attention tokens before the step, for kernels that size buffers by it (none here does yet). None when the host
    # holds bounds only (S1).
    seq_lens_sum: int | None

    @classmethod
    def init_new(cls, plan: StepPlan, future_map: FutureMap, device: str) -> ForwardBatch:
        """Everything but the token ids, which `resolve_forward_inputs` fills."""
        future = FutureIndices(torch.from_numpy(plan.req_pool_indices).to(device))
        committed = plan.seq_lens
        if plan.seq_lens_cpu is None:
            committed = _relay_lengths(plan, future, future_map)
        token_rows = np.repeat(np.arange(plan.batch_size), plan.q_lens)
        cu_q_lens = np.zeros(plan.batch_size + 1, dtype=np.int32)
        np.cumsum(plan.q_lens, out=cu_q_lens[1:])
        offsets = np.arange(len(token_rows)) - cu_q_lens[token_rows]
        token_rows_dev = torch.from_numpy(token_rows).to(device)
        logits_idx = np.sort(np.concatenate([_sampled_idx(plan, cu_q_lens), *_scored_idx(plan, cu_q_lens)]))
        inputs = ModelInputs(
            input_ids=torch.empty(len(token_rows), dtype=torch.int64, device=device),
            positions=committed[token_rows_dev] + torch.from_numpy(offsets).to(device),
            cu_q_lens=torch.from_numpy(cu_q_lens).to(device),
            page_table=torch.from_numpy(plan.page_table).to(device),
            logits_idx=torch.from_numpy(logits_idx).to(device),
            max_q_len=int(plan.q_lens.max()),
            max_seq_len=plan.max_seq_len,
            adapters=torch.from_numpy(plan.adapters[token_rows]).to(device) if plan.adapters.any() else None,
            encoder_lens=None if plan.encoder_lens is None else torch.from_numpy(plan.encoder_lens).to(device),
        )
        return cls(
            plan=plan,
            future=future,
            committed=committed,
            tag_ok=torch.ones(plan.batch_size, dtype=torch.bool, device=device),
            inputs=inputs,
            token_rows=token_rows,
            output_rows=token_rows[logits_idx],
            seq_lens_sum=None if plan.seq_lens_cpu is None else int(plan.seq_lens_cpu.sum()),
        )

    @property
    def num_chunk_tokens(self) -> int:
        return int(self.plan.q_lens[: self.plan.num_prefill].sum())


def _relay_lengths(plan: StepPlan, future: FutureIndices, future_map: FutureMap) -> torch.Tensor:
    """Chunk rows keep the plan's lengths (the host knows them), decode rows read the published ones."""
    published = future_map.published(future)
    committed = plan.seq_lens.clone()
    committed[plan.num_prefill :] = published[plan.num_prefill :]
    return committed


def _scored_idx(plan: StepPlan, cu_q_lens: Int32s) -> list[Int64s]:
    """Prompt tokens whose logits say how likely the next one was."""
    return [int(cu_q_lens[share.row]) + share.offset + np.arange(len(share.targets)) for share in plan.scores]


def _sampled_idx(plan: StepPlan, cu_q_lens: Int32s) -> Int64s:
    """Chunk rows that emit: their last token. Decode rows: every token of the window."""
    num_prefill = plan.num_prefill
    chunk_last = cu_q_lens[1 : num_prefill + 1][plan.emits[:num_prefill]] - 1
    window = np.arange(cu_q_lens[num_prefill], cu_q_lens[-1])
    return np.concatenate([chunk_last, window]).astype(np.int64)


class Staged(Protocol):
    """What holds the prompt tokens of a step: its lease."""

    def take_staging(self) -> torch.Tensor:
        """The tokens, once."""
        ...


def resolve_forward_inputs(fb: ForwardBatch, lease: Staged, future_map: FutureMap) -> None:
    """Fill input_ids (S9): chunk tokens from pinned staging, consumed once; the first token of every decode row from
    the relay. The drafter fills the rest of a verify window."""
    plan, ids = fb.plan, fb.inputs.input_ids
    num_chunk = fb.num_chunk_tokens
    if num_chunk:
        ids[:num_chunk] = lease.take_staging().to(ids.device, non_blocking=True)
    if plan.num_prefill == plan.batch_size:
        return
    tail = FutureIndices(fb.future.indices[plan.num_prefill :])
    expect = torch.from_numpy(plan.expect_step[plan.num_prefill :]).to(ids.device)
    tokens, tag_ok = future_map.gather(tail, expect)
    ids[num_chunk :: plan.width] = tokens
    fb.tag_ok[plan.num_prefill :] = tag_ok
