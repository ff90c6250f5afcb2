"""Make a step's attention inputs for draft layers."""

from __future__ import annotations

import numpy as np
import torch

from shared.engine.forward_batch import ForwardBatch
from shared.kernel.attention import AttentionInputs, HostLengths
from shared.model.interface import ModelOutput


def view_of(fb: ForwardBatch) -> AttentionInputs:
    """Return the inputs for the step's T tokens, at the target's slots."""
    inputs = fb.inputs
    bounds = (inputs.max_q_len, inputs.max_seq_len)
    return AttentionInputs(inputs.positions, inputs.cu_q_lens, inputs.page_table, *bounds, host=inputs.host)


def window_of(fb: ForwardBatch, positions: torch.Tensor) -> AttentionInputs:
    """Return the inputs for D decode rows with n slots each, at ascending `positions` (D, n)."""
    num_rows, num_slots = positions.shape
    return AttentionInputs(
        positions=positions.reshape(-1),
        cu_q_lens=torch.arange(num_rows + 1, dtype=torch.int32, device=positions.device) * num_slots,
        page_table=fb.inputs.page_table[fb.plan.num_prefill :],
        max_q_len=num_slots,
        max_seq_len=fb.plan.max_seq_len,
        host=_of_equal_windows(num_rows, num_slots),
    )


def alternatives_of(fb: ForwardBatch, depth: int, slots: torch.Tensor, visible: torch.Tensor) -> AttentionInputs:
    """Return the inputs for D decode rows of n alternative tokens, all at position committed + depth.

    `slots` (n,): slots in the window; visible (D, n) as in AttentionInputs.
    """
    num_rows, num_slots = visible.shape
    committed = fb.committed[fb.plan.num_prefill :].unsqueeze(1)
    return AttentionInputs(
        positions=(committed + depth).expand_as(visible).reshape(-1),
        cu_q_lens=torch.arange(num_rows + 1, dtype=torch.int32, device=visible.device) * num_slots,
        page_table=fb.inputs.page_table[fb.plan.num_prefill :],
        max_q_len=num_slots,
        max_seq_len=fb.plan.max_seq_len,
        slots=(committed + slots).view(-1),
        visible=visible.reshape(-1),
        host=_of_equal_windows(num_rows, num_slots),
    )


def _of_equal_windows(num_rows: int, num_slots: int) -> HostLengths:
    bounds = np.arange(num_rows + 1, dtype=np.int32) * np.int32(num_slots)
    return HostLengths(bounds, seq_lens=None, num_running=num_rows)


def aux_of(output: ModelOutput) -> torch.Tensor:
    """Return what the target leaves for heads, (T, A)."""
    if output.aux is None:
        raise ValueError("the target leaves no features: capture_aux was not called")
    return output.aux


def per_row(state: dict[str, torch.Tensor], rows: torch.Tensor, batch_size: int) -> dict[str, torch.Tensor]:
    """Spread the values (N, ...) of batch rows `rows` (N,) to all B rows, (B, ...). Other rows get zeros."""
    spread = {}
    for name, value in state.items():
        spread[name] = value.new_zeros((batch_size, *value.shape[1:]))
        spread[name][rows] = value
    return spread
