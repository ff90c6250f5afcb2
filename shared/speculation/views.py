"""Make a step's attention inputs for draft layers."""

from __future__ import annotations

import torch

from shared.engine.forward_batch import ForwardBatch
from shared.kernel.attention.attention import AttentionInputs
from shared.kernel.code.step_layout import HostLengths, Layout, equal_bounds
from shared.model.math.interface import ModelOutput


def view_of(fb: ForwardBatch) -> AttentionInputs:
    """Return the inputs for the step's T tokens, at the target's slots."""
    return AttentionInputs(fb.inputs.positions, fb.inputs.layout.of_group())


def window_of(fb: ForwardBatch, positions: torch.Tensor) -> AttentionInputs:
    """Return the inputs for D decode rows with n slots each, at ascending `positions` (D, n)."""
    return AttentionInputs(positions.reshape(-1), _layout(fb, *positions.shape))


def alternatives_of(fb: ForwardBatch, depth: int, slots: torch.Tensor, visible: torch.Tensor) -> AttentionInputs:
    """Return the inputs for D decode rows of n alternative tokens, all at position committed + depth.

    `slots` (n,): slots in the window; visible (D, n) as in AttentionInputs.
    """
    committed = fb.committed[fb.plan.num_prefill :].unsqueeze(1)
    return AttentionInputs(
        positions=(committed + depth).expand_as(visible).reshape(-1),
        layout=_layout(fb, *visible.shape),
        slots=(committed + slots).view(-1),
        visible=visible.reshape(-1),
    )


def _layout(fb: ForwardBatch, num_rows: int, num_slots: int) -> Layout[torch.Tensor]:
    """Return the layout of the step's decode rows with `num_slots` tokens each."""
    return fb.inputs.layout.of_group().part(
        slice(fb.plan.num_prefill, None),
        cu_q_lens=torch.arange(num_rows + 1, dtype=torch.int32, device=fb.committed.device) * num_slots,
        max_q_len=num_slots,
        host=HostLengths(equal_bounds(num_rows, num_slots), seq_lens=None, num_running=num_rows),
    )


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
