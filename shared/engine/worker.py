"""Run one step as two closures on the forward stream: target forward and sampling.

        forward   init_new -> resolve inputs -> draft -> target
        sample    verify -> compact (a tree) -> on_verify_complete (publish) -> draft-extend -> stash

At each `yield` the simulated backend may run another stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Protocol

import numpy as np
import torch

from shared.core.held_result import release
from shared.engine.boundary import Boundary, Packed, SameMemory
from shared.engine.drafter import Drafter
from shared.engine.forward_batch import ForwardBatch, resolve_forward_inputs
from shared.engine.future_map import FutureIndices, FutureMap
from shared.engine.lease import Carry, StepLease
from shared.engine.plan import StepPlan
from shared.engine.results import named_results
from shared.engine.scores import take_scores
from shared.engine.verify import Drafts, Verified, verify
from shared.engine.window import compact, counted_tokens, lay_out, with_forced
from shared.kv.pool import KVPool
from shared.model.math.interface import Carried, Model, ModelInputs, ModelOutput
from shared.sample.interface import DeviceMasks, SampleOutput, SamplingBatch, TokenMasks
from shared.sample.params import Params, params_of
from shared.sample.sampler import sample

OnVerifyComplete = Callable[[FutureIndices, torch.Tensor], None]  # takes the relay rows and their new lengths (B,)


class Runner(Protocol):
    """Run the model, for example across ranks, or as graphs."""

    def forward(self, model: Model, inputs: ModelInputs, kv: KVPool) -> Carried | ModelOutput: ...


class Whole:
    def forward(self, model: Model, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        return model.forward(inputs, kv)


class Worker:
    """Owns the model's part of a step. The worker never writes the plan: all changes go to the ForwardBatch (S8)."""

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        future_map: FutureMap,
        drafter: Drafter | None = None,
        boundary: Boundary | None = None,
        runner: Runner | None = None,
    ) -> None:
        """`runner` runs a model that is divided among ranks, or captured as graphs."""
        self.model = model
        self.kv = kv
        self.future_map = future_map
        self.drafter = drafter
        self.boundary: Boundary = boundary or SameMemory()
        self._is_program = getattr(model, "is_program", False)
        self._runner = runner or Whole()
        self._params_of = functools.partial(params_of, vocab_size=model.spec.vocab_size)

    def forward(self, plan: StepPlan, lease: StepLease) -> Generator[None, None, None]:
        lease.times.mark()
        fb = ForwardBatch.init_new(plan, lease, self.future_map, self.boundary, self.params)
        yield
        self.resolve(fb)
        yield
        drafts: Drafts | None = None
        if self.has_drafts(plan):
            with lease.times.drafting():
                drafts = self.propose(fb)
            lay_out(fb, drafts)
            if lease.drafts is not None:
                lease.drafts.pack(drafts, self.boundary)
            yield
        fb.inputs.layers = lease.layers
        output = self.run_model(fb)
        if lease.layers is not None:
            lease.layers.reached_all()
        lease.carry = Carry(fb, output, drafts)
        yield

    def sample(
        self, plan: StepPlan, lease: StepLease, on_verify_complete: OnVerifyComplete
    ) -> Generator[None, None, Packed]:
        carry = lease.carry
        assert carry is not None and isinstance(carry.output, ModelOutput), "sampling runs behind the last stage"
        fb, output, drafts = carry.fb, carry.output, carry.drafts
        scores: list[SampleOutput] = []
        if plan.scores:
            scores, output = take_scores(fb, output)
            yield
        sampled = self.draw(fb, output.logits, drafts, self._masks_of(lease))
        verified = verify(fb, sampled, drafts)
        verified.scores = scores
        yield
        if verified.order is not None:
            compact(fb, output, verified.order, self.kv)
            yield
        on_verify_complete(fb.future, verified.seq_lens)
        self.record_drafts(fb, verified)
        yield
        if self.drafter is not None:
            with lease.times.drafting():
                self.extend(fb, output, verified)
            yield
        self.stash(fb, verified, plan.step)
        packed = self.boundary.pack(named_results(plan, verified))
        lease.times.mark()
        lease.carry = None
        yield
        return packed

    def params(self, batch: SamplingBatch) -> Params[np.ndarray]:
        return batch.kept(self._params_of)

    # Parts of a step, on the forward stream

    def resolve(self, fb: ForwardBatch) -> None:
        resolve_forward_inputs(fb, self.future_map)
        self.future_map.seed_history(fb.plan.history_seeds, fb.arrays.seeded)
        self.record_inputs(fb)

    def has_drafts(self, plan: StepPlan) -> bool:
        return self.drafter is not None and plan.width > 1 and plan.num_prefill < plan.batch_size

    def propose(self, fb: ForwardBatch) -> Drafts:
        assert self.drafter is not None
        self._release_early()
        return with_forced(fb, self.drafter.propose(fb, self.future_map, self.kv))

    def run_model(self, fb: ForwardBatch) -> Carried | ModelOutput:
        self._release_early()
        return self._runner.forward(self.model, fb.inputs, self.kv)

    def _release_early(self) -> None:
        # A program releases results itself, after its preparation.
        if not self._is_program:
            release()

    def extend(self, fb: ForwardBatch, output: ModelOutput, verified: Verified) -> None:
        if self.drafter is not None:
            verified.draft_state = self.drafter.extend(fb, output, verified, self.future_map, self.kv)

    def stash(self, fb: ForwardBatch, verified: Verified, step: int) -> None:
        future, tokens, state = fb.future, verified.next_token, verified.draft_state
        emitting = fb.arrays.emitting
        if len(emitting) < fb.plan.batch_size:
            future, tokens = FutureIndices(future.indices[emitting]), tokens[emitting]
            state = {name: value[emitting] for name, value in state.items()}
        self.future_map.stash(future, tokens, step, **state)

    def record_inputs(self, fb: ForwardBatch) -> None:
        """Write chunk tokens and decode rows' first tokens to the history."""
        tokens = fb.arrays.history_tokens
        if not len(tokens):
            return
        rows = fb.future.indices[fb.arrays.token_rows[tokens]]
        self.future_map.write_history(rows, fb.inputs.positions[tokens], fb.inputs.input_ids[tokens])

    def record_drafts(self, fb: ForwardBatch, verified: Verified) -> None:
        """Write accepted drafts to the history. Later steps overwrite rejected drafts before a penalty counts them."""
        rows = fb.arrays.history_rows
        if fb.plan.width == 1 or not len(rows):
            return
        drafts = verified.tokens[rows, :-1]
        offsets = torch.arange(1, fb.plan.width, device=drafts.device)
        positions = fb.committed[rows].unsqueeze(1) + offsets
        self.future_map.write_history(fb.future.indices[rows].unsqueeze(1), positions, drafts)

    def draw(
        self, fb: ForwardBatch, logits: torch.Tensor, drafts: Drafts | None, masks: TokenMasks | DeviceMasks | None
    ) -> SampleOutput:
        history = None
        if fb.plan.sampling.needs_history:
            history = self.future_map.history_of(fb.future)
            if drafts is not None:
                history.common, history.drafted = counted_tokens(fb, drafts)
        positions = fb.inputs.positions if fb.plan.num_prefill == 0 else fb.inputs.positions[fb.inputs.logits_idx]
        host_rows, rows, left = fb.host.output_rows, fb.arrays.output_rows, fb.arrays.sampled
        if left is not None:
            host_rows, rows = host_rows[fb.host.sampled], rows[left]
        return sample(logits, fb.plan.sampling, fb.row_of(host_rows, rows), positions, history, masks)

    def _masks_of(self, lease: StepLease) -> TokenMasks | DeviceMasks | None:
        """Bring the masks from the host to the device.

        The masks are made after the step's upload, so they need another upload.
        """
        masks = lease.masks.value if lease.masks is not None else None
        if masks is None or not self.boundary.is_device:
            return masks
        if not (masks.rows >= 0).any():
            return None
        sent = self.boundary.upload({"rows": masks.rows, "bits": masks.bits.view(np.int32)}, lease)
        return DeviceMasks(**sent)
