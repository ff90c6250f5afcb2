"""The worker: one step as two closures on the forward stream, target forward and sampling.

        forward   init_new -> resolve inputs -> draft -> target
        sample    verify -> compact (a tree) -> on_verify_complete (publish) -> draft-extend -> stash

Each is a generator: a `yield` is a point where, on the simulated backend, another stream may run. Two closures, so
that rows with a grammar delay a step's sampling (masks.py), and only that.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol

import numpy as np
import torch

from shared.engine.carry import Carry
from shared.engine.compact import compact
from shared.engine.drafter import Drafter
from shared.engine.forward_batch import ForwardBatch, resolve_forward_inputs
from shared.engine.future_map import FutureIndices, FutureMap
from shared.engine.lease import StepLease
from shared.engine.plan import StepPlan
from shared.engine.scores import take_scores
from shared.engine.verify import Drafts, Verified, verify
from shared.engine.window import counted_tokens, lay_out
from shared.kv.pool import KVPool
from shared.model.interface import Carried, Model, ModelInputs, ModelOutput
from shared.sample.interface import SampleOutput, TokenMasks
from shared.sample.sampler import needs_history, sample

OnVerifyComplete = Callable[[torch.Tensor], None]


class Runner(Protocol):
    """How a step's forward runs the model: with ranks, or as a pipeline's first stage."""

    def forward(self, model: Model, inputs: ModelInputs, kv: KVPool) -> Carried | ModelOutput: ...


class Whole:
    """The model as it is."""

    def forward(self, model: Model, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        return model.forward(inputs, kv)


class Worker:
    """Owns the model's side of a step. Reads the plan, never writes it; all changes land on the ForwardBatch (S8)."""

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        future_map: FutureMap,
        drafter: Drafter | None = None,
        device: str = "cpu",
        runner: Runner | None = None,
    ) -> None:
        """`runner`: of the model, where it is not run whole."""
        self.model = model
        self.kv = kv
        self.future_map = future_map
        self.drafter = drafter
        self.device = device
        self._runner = runner or Whole()

    def forward(self, plan: StepPlan, lease: StepLease) -> Generator[None, None, None]:
        lease.times.mark()
        fb = ForwardBatch.init_new(plan, self.future_map, self.device)
        yield
        resolve_forward_inputs(fb, lease, self.future_map)
        self.future_map.seed_history(plan.history_seeds)
        self._record_inputs(fb)
        yield
        drafts: Drafts | None = None
        if self.drafter is not None and plan.width > 1 and plan.num_prefill < plan.batch_size:
            with lease.times.drafting():
                drafts = self.drafter.propose(fb, self.future_map, self.kv)
            lay_out(fb, drafts)
            lease.drafts_are(drafts)
            yield
        fb.inputs.layers = lease.layers
        output = self._runner.forward(self.model, fb.inputs, self.kv)
        if lease.layers is not None:
            lease.layers.reached_all()
        lease.carry = Carry(fb, output, drafts)
        yield

    def sample(
        self, plan: StepPlan, lease: StepLease, on_verify_complete: OnVerifyComplete
    ) -> Generator[None, None, Verified]:
        carry = lease.carry
        assert carry is not None and isinstance(carry.output, ModelOutput), "sampling runs behind the last stage"
        fb, output, drafts = carry.fb, carry.output, carry.drafts
        scores: list[SampleOutput] = []
        if plan.scores:
            scores, output = take_scores(fb, output)
            yield
        sampled = self._sample_rows(fb, output.logits, drafts, lease.masks.value if lease.masks is not None else None)
        verified = verify(fb, sampled, drafts)
        verified.scores = scores
        yield
        if verified.order is not None:
            compact(fb, output, verified.order, self.kv)
            yield
        on_verify_complete(verified.seq_lens)
        self._record_drafts(fb, verified)
        yield
        if self.drafter is not None:
            with lease.times.drafting():
                verified.draft_state = self.drafter.extend(fb, output, verified, self.future_map, self.kv)
            yield
        # The relay rows are written here: the next step gathers its input tokens from them.
        emits = torch.from_numpy(np.flatnonzero(plan.emits)).to(self.device)  # an index, not a mask: no sync
        extras = {name: value[emits] for name, value in verified.draft_state.items()}
        self.future_map.stash(FutureIndices(fb.future.indices[emits]), verified.next_token[emits], plan.step, **extras)
        lease.times.mark()
        lease.carry = None
        yield
        return verified

    def _record_inputs(self, fb: ForwardBatch) -> None:
        """Tokens of chunks, and each decode row's first: nobody knows yet what follows it."""
        wanted = fb.plan.history_rows[fb.token_rows]
        wanted[fb.num_chunk_tokens :] &= np.arange(len(wanted) - fb.num_chunk_tokens) % fb.plan.width == 0
        if not wanted.any():
            return
        tokens = torch.from_numpy(np.flatnonzero(wanted)).to(self.device)
        rows = fb.future.indices[torch.from_numpy(fb.token_rows[wanted]).to(self.device)]
        self.future_map.write_history(rows, fb.inputs.positions[tokens], fb.inputs.input_ids[tokens])

    def _record_drafts(self, fb: ForwardBatch, verified: Verified) -> None:
        """Accepted drafts; behind them lie others, which the next steps write over before anybody counts them."""
        first = fb.plan.num_prefill
        wanted = np.flatnonzero(fb.plan.history_rows[first:]) + first
        if fb.plan.width == 1 or not len(wanted):
            return
        rows = torch.from_numpy(wanted).to(self.device)
        drafts = verified.tokens[rows, :-1]
        offsets = torch.arange(1, fb.plan.width, device=drafts.device)
        positions = fb.committed[rows].unsqueeze(1) + offsets
        self.future_map.write_history(fb.future.indices[rows].unsqueeze(1), positions, drafts)

    def _sample_rows(
        self, fb: ForwardBatch, logits: torch.Tensor, drafts: Drafts | None, masks: TokenMasks | None
    ) -> SampleOutput:
        history = None
        if needs_history(fb.plan.sampling):
            history = self.future_map.history_of(fb.plan.req_pool_indices)
            if drafts is not None:
                history.common, history.drafted = counted_tokens(fb, drafts)
        positions = fb.inputs.positions[fb.inputs.logits_idx]
        return sample(logits, fb.plan.sampling, fb.output_rows, positions, history, masks)
