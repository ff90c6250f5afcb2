"""What a step begins with, in one launch: lengths, positions and input ids from the plan's arrays and the relay (S9).

        tokens     | chunk of row 0 | chunk of row 1 | window of row 2 | window of row 3 |
        ids          the plan's       the plan's       r  0  0  0        r  0  0  0         r: from the relay
        positions    L  L+1  L+2      L  L+1           L  L+1  L+2  L+3  ...

Padded rows have pool row 0: their length is 0 whatever the relay holds there, their ids are 0, and their tag is right.
The other ids of a window are the drafter's to fill in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shared.gpu_kernel.launcher import launch, recorded
from shared.gpu_kernel.signatures import REAL_BATCH, Signature

TOKENS = tl.constexpr(256)  # of a row that a program takes


@dataclass(frozen=True, slots=True)
class Relay:
    """Buffers of shared/engine/future_map.py, (rows,) int64."""

    tokens: torch.Tensor  # each row's next input token
    lengths: torch.Tensor  # committed
    written_by: torch.Tensor  # the step that wrote the token


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step of B rows and T tokens as the forward takes it."""

    committed: torch.Tensor  # (B,) int64
    tag_ok: torch.Tensor  # (B,) bool, True for chunk rows
    positions: torch.Tensor  # (T,) int64
    input_ids: torch.Tensor  # (T,) int64


@triton.jit(do_not_specialize=["num_prefill", "is_relayed"])
def prepare_kernel(
    rows, seq_lens, expect_step, cu_q_lens, chunk_ids, relayed_tokens, relayed_lengths, written_by,
    committed, tag_ok, positions, input_ids, num_prefill, is_relayed,
):  # fmt: skip
    """Program (b, n): tokens [256 n, 256 n + 256) of batch row b."""
    batch_row, block = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + batch_row)
    reads_relay = (batch_row >= num_prefill) & (row != 0)
    length = tl.load(seq_lens + batch_row, mask=row != 0, other=0)
    length = tl.load(relayed_lengths + row, mask=reads_relay & (is_relayed != 0), other=length)
    first = tl.load(relayed_tokens + row, mask=reads_relay, other=0)
    if block == 0:
        expected = tl.load(expect_step + batch_row)
        tl.store(committed + batch_row, length)
        tl.store(tag_ok + batch_row, tl.load(written_by + row, mask=reads_relay, other=expected) == expected)
    begin, end = tl.load(cu_q_lens + batch_row), tl.load(cu_q_lens + batch_row + 1)
    places = block * TOKENS + tl.arange(0, TOKENS)
    is_token = begin + places < end
    is_given = is_token & (batch_row < num_prefill)
    ids = tl.load(chunk_ids + begin + places, mask=is_given, other=0)
    ids = tl.where(is_given | (places > 0), ids, first)
    tl.store(positions + begin + places, length + places, mask=is_token)
    tl.store(input_ids + begin + places, ids, mask=is_token)


def prepare_step(
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    expect_step: torch.Tensor,
    cu_q_lens: torch.Tensor,
    chunk_ids: torch.Tensor,
    relay: Relay,
    num_tokens: int,
    max_q_len: int,
    num_prefill: int,
    lengths_relayed: bool,
) -> Prepared:
    """Return what `ForwardBatch.init_new` and `resolve_forward_inputs` make of the same arrays.

    rows, seq_lens, expect_step (B,) int64, cu_q_lens (B + 1,) int32, chunk_ids (tokens of chunks,) int64: as in
    shared/engine/step_arrays.py, contiguous. The first `num_prefill` rows are chunks. `max_q_len`: of any row at most.
    `lengths_relayed`: the relay has the lengths of rows that decode.
    """
    num, device = len(rows), rows.device
    prepared = Prepared(
        committed=torch.empty(num, dtype=torch.int64, device=device),
        tag_ok=torch.empty(num, dtype=torch.bool, device=device),
        positions=torch.empty(num_tokens, dtype=torch.int64, device=device),
        input_ids=torch.empty(num_tokens, dtype=torch.int64, device=device),
    )
    launch(
        prepare_kernel, (num, triton.cdiv(max_q_len, TOKENS.value)), rows, seq_lens, expect_step, cu_q_lens, chunk_ids,
        relay.tokens, relay.lengths, relay.written_by, prepared.committed, prepared.tag_ok, prepared.positions,
        prepared.input_ids, num_prefill, int(lengths_relayed),
    )  # fmt: skip
    return prepared


def real_signatures() -> set[Signature]:
    """Return that of every model's step."""
    integers = torch.empty(REAL_BATCH, dtype=torch.int64, device="meta")
    cu_q_lens = torch.empty(REAL_BATCH + 1, dtype=torch.int32, device="meta")
    relay = Relay(integers, integers, integers)
    with recorded() as signatures:
        prepare_step(integers, integers, integers, cu_q_lens, integers, relay, REAL_BATCH, 1, 0, True)
    return signatures
