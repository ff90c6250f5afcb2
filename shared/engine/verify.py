"""The one verifier: draws the target's token at every node of a window and keeps what the drafts foresaw.

        window of a decode row:   bonus token | draft | draft | draft        (a prefill row has one output at most)
        target draws               t0           t1      t2      t3
        accepted                   t0, and t1 if draft 1 == t0, ...          accept_lens = accepted drafts + 1

Every emitted token is the target's own draw with the request's noise, so the stream is the non-speculative one at every
temperature, whatever the drafts are. Knows nothing of how drafts are made.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from shared.engine.forward_batch import ForwardBatch
from shared.engine.plan import StepPlan
from shared.sample.interface import SampleOutput


@dataclass(slots=True)
class Drafts:
    """What a drafter proposes for D decode rows: nodes 1 .. width-1 of each row's window; node 0 is the bonus token.

    ids: (D, width - 1) int64. Node i follows node i - 1: a chain.
    """

    ids: torch.Tensor


@dataclass(slots=True)
class Verified:
    """Device results of a step. B rows, k = width, T tokens, E outputs. Row b emits tokens[b, :accept_lens[b]]."""

    tokens: torch.Tensor  # (B, k) the target's draws
    accept_lens: torch.Tensor  # (B,) 0 for rows that don't emit
    seq_lens: torch.Tensor  # (B,) committed after the step
    next_token: torch.Tensor  # (B,) the bonus token: next step's input
    next_ids: torch.Tensor  # (T,) the token that follows each input token
    last_token_idx: torch.Tensor  # (B,) index into T of the last committed token
    last_output_idx: torch.Tensor  # (B,) index into E of the same; 0 where a row has no output
    sampled: SampleOutput
    output_of: torch.Tensor  # (B, k) index into the E outputs, clamped where a row has fewer
    tag_ok: torch.Tensor
    draft_state: dict[str, torch.Tensor] = field(default_factory=dict)  # (B, ...) what `extend` left for the relay


def verify(fb: ForwardBatch, sampled: SampleOutput, drafts: Drafts | None) -> Verified:
    """Accept drafts while they equal the target's own draw; accept_lens counts the bonus token too."""
    plan, device = fb.plan, sampled.ids.device
    num_prefill = plan.num_prefill
    output_of = torch.from_numpy(_output_of(plan)).to(device)
    tokens = sampled.ids[output_of] if sampled.ids.numel() else torch.zeros_like(output_of)
    accept_lens = torch.from_numpy(plan.emits.astype(np.int64)).to(device)
    if drafts is not None:
        agree = (tokens[num_prefill:, :-1] == drafts.ids).to(torch.int64)
        accept_lens[num_prefill:] += agree.cumprod(dim=1).sum(dim=1)
    advance = torch.from_numpy(plan.q_lens.astype(np.int64)).to(device)
    advance[num_prefill:] = accept_lens[num_prefill:]
    last = (accept_lens - 1).clamp(min=0).unsqueeze(1)
    return Verified(
        tokens=tokens,
        accept_lens=accept_lens,
        seq_lens=fb.committed + advance,
        next_token=tokens.gather(1, last).squeeze(1),
        next_ids=_next_ids(fb, sampled),
        last_token_idx=fb.inputs.cu_q_lens[:-1].to(torch.int64) + advance - 1,
        last_output_idx=output_of.gather(1, last).squeeze(1),
        sampled=sampled,
        output_of=output_of,
        tag_ok=fb.tag_ok,
    )


def _output_of(plan: StepPlan) -> np.ndarray:
    """(B, width) which of the E outputs is row b's j-th: chunk rows have at most one, decode rows `width`."""
    num_prefill = plan.num_prefill
    emitted = plan.emits[:num_prefill]
    num_chunk_outputs = int(emitted.sum())
    table = np.zeros((plan.batch_size, plan.width), dtype=np.int64)
    table[:num_prefill] = np.maximum(np.cumsum(emitted) - 1, 0)[:, None]
    num_decode = plan.batch_size - num_prefill
    table[num_prefill:] = num_chunk_outputs + np.arange(num_decode * plan.width).reshape(num_decode, plan.width)
    return table


def _next_ids(fb: ForwardBatch, sampled: SampleOutput) -> torch.Tensor:
    """(T,) the token after each input token: the next one of the chunk, the next prompt token at a chunk's end
    (hazard H11), the sampled token at the end of the prompt and everywhere in a verify window."""
    ids = fb.inputs.input_ids
    following = torch.roll(ids, -1)
    ends = fb.inputs.cu_q_lens[1 : fb.plan.num_prefill + 1].to(torch.int64) - 1
    following[ends] = torch.from_numpy(fb.plan.next_prompt_ids).to(ids.device)
    following[fb.inputs.logits_idx] = sampled.ids
    return following
