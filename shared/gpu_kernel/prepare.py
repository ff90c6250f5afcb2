"""Prepare a decode step in one launch, from the plan and the relay (S9).

tokens     | window of row 0 | window of row 1 |
ids          r  0  0  0        r  0  0  0          r: the relay's token; drafts come later
positions    L  L+1  L+2  L+3  L  L+1  L+2  L+3    L: the length before the step
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shared.gpu_kernel.launch.launcher import launch, recorded
from shared.gpu_kernel.launch.signatures import REAL_BATCH, Signature

BLOCK = 128  # rows per program


@dataclass(frozen=True, slots=True)
class Relay:
    """The relay's buffers (shared/engine/future_map.py), (rows,) int64."""

    tokens: torch.Tensor  # each row's next input token
    lengths: torch.Tensor  # each row's committed tokens
    written_by: torch.Tensor  # the step that wrote each row's token


@triton.jit(do_not_specialize=["num_rows", "width"])
def prepare_kernel(
    rows, lengths, expect_step, relayed_tokens, relayed_lengths, written_by,
    committed, tag_ok, positions, input_ids, num_rows, width, BLOCK: tl.constexpr,
):  # fmt: skip
    batch_row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = batch_row < num_rows
    row = tl.load(rows + batch_row, inside, other=0)
    length = tl.load(lengths + batch_row, inside, other=0)
    length = tl.load(relayed_lengths + row, inside & (length < 0), other=length)
    expected = tl.load(expect_step + batch_row, inside, other=0)
    tl.store(committed + batch_row, length, inside)
    tl.store(tag_ok + batch_row, tl.load(written_by + row, inside, other=0) == expected, inside)
    ids = tl.load(relayed_tokens + row, inside, other=0)
    for place in range(0, width):
        token = batch_row * width + place
        tl.store(positions + token, length + place, inside)
        tl.store(input_ids + token, tl.where(place == 0, ids, 0), inside)


def prepare_step(
    rows: torch.Tensor, lengths: torch.Tensor, expect_step: torch.Tensor, relay: Relay, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return committed lengths (B,) int64, tag_ok (B,) bool, positions and input ids (B * width,) int64.

    rows, lengths, expect_step (B,) int64, contiguous. A negative length means that the relay has the length."""
    num, device = len(rows), rows.device
    committed = torch.empty(num, dtype=torch.int64, device=device)
    tag_ok = torch.empty(num, dtype=torch.bool, device=device)
    positions = torch.empty(num * width, dtype=torch.int64, device=device)
    input_ids = torch.empty(num * width, dtype=torch.int64, device=device)
    launch(
        prepare_kernel, (triton.cdiv(num, BLOCK),), rows, lengths, expect_step,
        relay.tokens, relay.lengths, relay.written_by, committed, tag_ok, positions, input_ids, num, width, BLOCK=BLOCK,
    )  # fmt: skip
    return committed, tag_ok, positions, input_ids


def real_signatures() -> set[Signature]:
    integers = torch.empty(REAL_BATCH, dtype=torch.int64, device="meta")
    with recorded() as signatures:
        prepare_step(integers, integers, integers, Relay(integers, integers, integers), 1)
    return signatures
