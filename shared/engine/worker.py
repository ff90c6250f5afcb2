"""The worker: one step as two closures on the forward stream, target forward and sampling.

        forward   init_new -> resolve inputs -> draft -> target
        sample    verify -> on_verify_complete (publish) -> compact -> draft-extend -> stash

Each is a generator: a `yield` is a point where, on the simulated backend, another stream may run. Two closures, so
that a row with a grammar can delay its sampling, and only that.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
import torch

from shared.engine.drafter import Drafter
from shared.engine.forward_batch import ForwardBatch, resolve_forward_inputs
from shared.engine.future_map import FutureIndices, FutureMap
from shared.engine.lease import StepLease
from shared.engine.plan import StepPlan
from shared.kv.pool import KVPool
from shared.model.interface import Model
from shared.sample.interface import SampleOutput
from shared.sample.sampler import sample

OnVerifyComplete = Callable[[torch.Tensor], None]


@dataclass(slots=True)
class Verified:
    """Device results of a step. tokens (B, k), accept_lens (B,), seq_lens (B,) committed after the step."""

    tokens: torch.Tensor
    accept_lens: torch.Tensor
    seq_lens: torch.Tensor
    next_token: torch.Tensor  # (B,) the bonus token: next step's input
    hidden: torch.Tensor  # (B, H)
    sampled: SampleOutput
    output_of: torch.Tensor  # (B, k) index into the E outputs, clamped where a row has fewer
    tag_ok: torch.Tensor


class Worker:
    """Owns the model's side of a step. Reads the plan, never writes it; all changes land on the ForwardBatch (S8)."""

    def __init__(
        self, model: Model, kv: KVPool, future_map: FutureMap, drafter: Drafter | None = None, device: str = "cpu"
    ) -> None:
        self.model = model
        self.kv = kv
        self.future_map = future_map
        self.drafter = drafter
        self.device = device

    def forward(self, plan: StepPlan, lease: StepLease) -> Generator[None, None, None]:
        fb = ForwardBatch.init_new(plan, self.future_map, self.device)
        yield
        resolve_forward_inputs(fb, lease, self.future_map)
        self.future_map.seed_history(plan.history_seeds)
        yield
        drafts = None
        if self.drafter is not None and plan.num_prefill < plan.batch_size:
            self._record_history(fb)  # the drafter samples too: it sees the bonus token
            drafts = self.drafter.propose(fb, self.future_map, self.kv)
            window = fb.inputs.input_ids[fb.num_chunk_tokens :].view(-1, plan.width)
            window[:, 1:] = drafts
            yield
        self._record_history(fb)
        output = self.model.forward(fb.inputs, self.kv)
        lease.carry.update(fb=fb, output=output, drafts=drafts)
        yield

    def sample(
        self, plan: StepPlan, lease: StepLease, on_verify_complete: OnVerifyComplete
    ) -> Generator[None, None, Verified]:
        fb, output, drafts = lease.carry["fb"], lease.carry["output"], lease.carry["drafts"]
        sampled = self._sample_rows(fb, output.logits)
        verified = verify(fb, sampled, drafts, output.hidden)
        yield
        on_verify_complete(verified.seq_lens)
        yield
        # compact: an accepted chain already lies at its final slots
        if self.drafter is not None:
            self.drafter.extend(fb, _next_ids(fb, sampled), self.kv)
            yield
        emits = torch.from_numpy(np.flatnonzero(plan.emits)).to(self.device)  # an index, not a mask: no sync
        extras = {name: verified.hidden[emits] for name in self.future_map.extras}
        self.future_map.stash(FutureIndices(fb.future.indices[emits]), verified.next_token[emits], plan.step, **extras)
        lease.carry.clear()
        yield
        return verified

    def _record_history(self, fb: ForwardBatch) -> None:
        wanted = fb.plan.history_rows[fb.token_rows]
        if not wanted.any():
            return
        tokens = torch.from_numpy(np.flatnonzero(wanted)).to(self.device)
        rows = fb.future.indices[torch.from_numpy(fb.token_rows[wanted]).to(self.device)]
        self.future_map.write_history(rows, fb.inputs.positions[tokens], fb.inputs.input_ids[tokens])

    def _sample_rows(self, fb: ForwardBatch, logits: torch.Tensor) -> SampleOutput:
        history = None
        if fb.plan.history_rows.any():
            history = self.future_map.history_of(fb.plan.req_pool_indices)
        positions = fb.inputs.positions[fb.inputs.logits_idx]
        return sample(logits, fb.plan.sampling, fb.output_rows, positions, history)


def verify(fb: ForwardBatch, sampled: SampleOutput, drafts: torch.Tensor | None, hidden: torch.Tensor) -> Verified:
    """Accept drafts while they equal the target's own draw; accept_len counts the bonus token too.

    The emitted tokens are the target's draws, so the stream is the non-speculative one at every temperature.
    """
    plan, device = fb.plan, sampled.ids.device
    num_prefill = plan.num_prefill
    output_of = torch.from_numpy(_output_of(plan)).to(device)
    tokens = sampled.ids[output_of] if sampled.ids.numel() else torch.zeros_like(output_of)
    accept_lens = torch.from_numpy(plan.emits.astype(np.int64)).to(device)
    if drafts is not None:
        agree = (tokens[num_prefill:, :-1] == drafts).to(torch.int64)
        accept_lens[num_prefill:] += agree.cumprod(dim=1).sum(dim=1)
    advance = torch.from_numpy(plan.q_lens.astype(np.int64)).to(device)
    advance[num_prefill:] = accept_lens[num_prefill:]
    last = (accept_lens - 1).clamp(min=0).unsqueeze(1)
    rows_hidden = (
        hidden[output_of.gather(1, last).squeeze(1)] if hidden.numel() else hidden.new_zeros((plan.batch_size, 0))
    )
    return Verified(
        tokens=tokens,
        accept_lens=accept_lens,
        seq_lens=fb.committed + advance,
        next_token=tokens.gather(1, last).squeeze(1),
        hidden=rows_hidden,
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
