"""Copy a plan to the device, for the forward stream. The worker writes only this copy (S8)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from shared.engine.boundary import Boundary, SlotHolder
from shared.engine.future_map import FutureIndices, FutureMap
from shared.engine.plan import Int64s, StepPlan
from shared.engine.prepare import Prepared, prepare_windows
from shared.engine.step_arrays import NOTHING, StepArrays, step_arrays
from shared.kernel.code.step_layout import HostLengths
from shared.model.math.interface import ModelInputs
from shared.sample.interface import SamplingBatch
from shared.sample.params import Params
from shared.sample.sampler import RowOf
from shared.sample.sampler_torch import OutputRows

ParamsOf = Callable[[SamplingBatch], Params[np.ndarray]]
UNRESOLVED = torch.zeros(0, dtype=torch.int64)
PARAM = "param."  # prefix of the sampling parameters' names in an upload


class Staged(SlotHolder, Protocol):
    def take_staging(self) -> torch.Tensor:
        """Return the prompt tokens. Only the first call succeeds."""
        ...


@dataclass(frozen=True, slots=True)
class BothParams:
    host: Params[np.ndarray]
    device: Params[torch.Tensor]


@dataclass(slots=True)
class ForwardBatch:
    """One step on the device. `arrays` is read-only.

    - committed: (B,) int64, each row's exact length before the step.
    - tag_ok: (B,) bool, as in Prepared; True for chunk rows. UNRESOLVED, like inputs.input_ids, until
      `resolve_forward_inputs`. In a step that `prepare_windows` begins, so are committed and inputs.positions.
    - params: None on a CPU, because CPU kernels read the plan's sampling parameters.
    """

    plan: StepPlan
    host: StepArrays[np.ndarray]
    arrays: StepArrays[torch.Tensor]
    params: BothParams | None
    future: FutureIndices
    committed: torch.Tensor
    tag_ok: torch.Tensor
    inputs: ModelInputs

    @classmethod
    def init_new(
        cls, plan: StepPlan, lease: Staged, future_map: FutureMap, boundary: Boundary, params_of: ParamsOf
    ) -> ForwardBatch:
        """Upload the step's arrays in one copy."""
        chunk_ids = lease.take_staging().numpy() if plan.prefill_input_ids_cpu is not None else NOTHING
        host = step_arrays(plan, chunk_ids)
        sampling = params_of(plan.sampling) if boundary.is_device else None
        own, is_prepared = host.named() | _prefixed(sampling), _is_prepared(plan, future_map)
        if plan.lengths_relayed and is_prepared:
            own["seq_lens"] = np.full(plan.batch_size, -1)  # the relay has them
        sent = boundary.upload(own, lease)
        params = None
        if sampling is not None:
            params = BothParams(sampling, {name: sent.pop(PARAM + name) for name in sampling})
        arrays = host.on_device(sent, host_lengths(plan))
        future = FutureIndices(arrays.rows)
        committed = positions = UNRESOLVED
        if not is_prepared:
            committed = _committed(plan, arrays, future, future_map)
            positions = committed if plan.has_one_token_each else committed[arrays.token_rows] + arrays.offsets
        inputs = ModelInputs(
            input_ids=UNRESOLVED,
            positions=positions,
            layout=arrays.layout,
            logits_idx=arrays.logits_idx,
            adapters=arrays.adapters,
        )
        return cls(plan, host, arrays, params, future, committed, UNRESOLVED, inputs)

    def prepared_is(self, prepared: Prepared) -> None:
        self.committed, self.tag_ok = prepared.committed, prepared.tag_ok
        self.inputs.positions, self.inputs.input_ids = prepared.positions, prepared.input_ids

    @property
    def num_chunk_tokens(self) -> int:
        return int(self.plan.layout.cu_q_lens[self.plan.num_prefill])

    @property
    def seq_lens_sum(self) -> int | None:
        """Return the sum of the rows' lengths, or None if the host has only bounds (S1)."""
        host = self.inputs.layout.host
        return host.seq_lens_sum if host is not None else None

    def decode_rows(self) -> tuple[Int64s, torch.Tensor]:
        first, end = self.plan.num_prefill, self.plan.batch_size
        return np.arange(first, end), torch.arange(first, end, device=self.committed.device)

    def row_of(self, host_rows: Int64s, rows: torch.Tensor) -> RowOf:
        """Return each output's batch row. `rows`: a copy of `host_rows` on the device."""
        return host_rows if self.params is None else OutputRows(host_rows, self.params.host, rows, self.params.device)


def _is_prepared(plan: StepPlan, future_map: FutureMap) -> bool:
    """Return whether `prepare_windows` begins the step, on a device in few launches."""
    return plan.num_prefill == 0 and future_map.new_seq_lens_buf.device.type != "cpu"


def _prefixed(sampling: Params[np.ndarray] | None) -> dict[str, np.ndarray]:
    return {} if sampling is None else {PARAM + name: value for name, value in sampling.items()}


def _committed(
    plan: StepPlan, arrays: StepArrays[torch.Tensor], future: FutureIndices, future_map: FutureMap
) -> torch.Tensor:
    if not plan.lengths_relayed:
        return arrays.seq_lens
    first = plan.num_prefill
    return torch.cat([arrays.seq_lens[:first], future_map.published(future)[first:]])


def host_lengths(plan: StepPlan) -> HostLengths:
    return HostLengths(
        cu_q_lens=plan.layout.cu_q_lens,
        seq_lens=None if plan.lengths_relayed else plan.seq_lens_cpu,
        num_running=plan.batch_size - plan.num_prefill,
    )


def resolve_forward_inputs(fb: ForwardBatch, future_map: FutureMap) -> None:
    """Set input_ids (S9) and tag_ok: chunk tokens, and each decode row's relayed token. The drafter adds the drafts."""
    if _is_prepared(fb.plan, future_map):
        fb.prepared_is(
            prepare_windows(fb.arrays.rows, fb.arrays.seq_lens, fb.arrays.expect_step, fb.plan.width, future_map)
        )
        return
    plan, device = fb.plan, fb.committed.device
    if plan.has_one_token_each:
        fb.inputs.input_ids, fb.tag_ok = future_map.gather(fb.future, fb.arrays.expect_step)
        return
    num_chunk, first = fb.num_chunk_tokens, plan.num_prefill
    ids = fb.inputs.input_ids = torch.empty(len(fb.host.token_rows), dtype=torch.int64, device=device)
    fb.tag_ok = torch.ones(plan.batch_size, dtype=torch.bool, device=device)
    ids[:num_chunk] = fb.arrays.chunk_ids
    if first < plan.batch_size:
        tail = FutureIndices(fb.future.indices[first:])
        ids[num_chunk :: plan.width], fb.tag_ok[first:] = future_map.gather(tail, fb.arrays.expect_step[first:])
