"""Begin a step of decode rows in one launch: compute positions and read the relay's tokens (S9)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.engine.future_map import FutureIndices, FutureMap
from shared.kernel.product import libraries


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step of B rows and T tokens."""

    committed: torch.Tensor  # (B,) int64, before the step
    tag_ok: torch.Tensor  # (B,) bool: whether the expected step wrote the row's relay
    positions: torch.Tensor  # (T,) int64
    input_ids: torch.Tensor  # (T,) int64


def prepare_windows(
    rows: torch.Tensor, lengths: torch.Tensor, expect_step: torch.Tensor, width: int, relay: FutureMap
) -> Prepared:
    """Begin a step of B rows with `width` tokens each: one launch on CUDA, on the forward stream.

    rows, lengths, expect_step: (B,) int64, contiguous. A length below 0 means that the relay has the exact length. The
    drafter fills in each row's ids after the first id.
    """
    if libraries.runs_triton(rows.device):
        from shared.gpu_kernel.prepare import Relay, prepare_step

        buffers = Relay(relay.output_tokens_buf, relay.new_seq_lens_buf, relay.written_by)
        return Prepared(*prepare_step(rows, lengths, expect_step, buffers, width))
    return prepare_by_torch(rows, lengths, expect_step, width, relay)


def prepare_by_torch(
    rows: torch.Tensor, lengths: torch.Tensor, expect_step: torch.Tensor, width: int, relay: FutureMap
) -> Prepared:
    """Do the same as `prepare_windows` with torch's operators, on any device."""
    future = FutureIndices(rows)
    committed = torch.where(lengths < 0, relay.published(future), lengths)
    tokens, tag_ok = relay.gather(future, expect_step)
    positions = committed.unsqueeze(1) + torch.arange(width, device=rows.device)
    input_ids = torch.zeros_like(positions)
    input_ids[:, 0] = tokens
    return Prepared(committed, tag_ok, positions.flatten(), input_ids.flatten())
