"""Find the page that each token writes and the keys that it reads, in one launch per step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shared.gpu_kernel.launch.launcher import launch, recorded
from shared.gpu_kernel.launch.signatures import ALIGNMENT, REAL_BATCH, Signature

BLOCK = 128  # tokens per program
ALIGNED_TOKENS = ALIGNMENT // 4  # int32 numbers per ALIGNMENT bytes


@dataclass(frozen=True, slots=True)
class Places:
    """The places of T tokens, all int32 (T,).

    A token reads every slot before `base`. From `base` to its own slot, it reads only slots whose bits in `visible` are
    set. Outside a draft tree, `base` is the token's own slot + 1."""

    page: torch.Tensor
    slot: torch.Tensor  # in the row, not in the page
    base: torch.Tensor
    num_read: torch.Tensor  # number of keys that the token reads, its own included; ignores windows


@triton.jit
def ones_of(bits):
    """Count the set bits of int64 numbers >= 0."""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    bits = bits + (bits >> 8)
    bits = bits + (bits >> 16)
    bits = bits + (bits >> 32)
    return (bits & 0x7F).to(tl.int32)


@triton.jit
def width_of(bits):
    """Return the place of the highest set bit, counted from 1, of int64 numbers > 0."""
    bits = bits | (bits >> 1)
    bits = bits | (bits >> 2)
    bits = bits | (bits >> 4)
    bits = bits | (bits >> 8)
    bits = bits | (bits >> 16)
    bits = bits | (bits >> 32)
    return ones_of(bits)


@triton.jit(do_not_specialize=["num_tokens", "room", "num_rows", "table_stride", "num_halvings"])
def places_kernel(
    slots, visible, cu_q_lens, page_table, places,
    num_tokens, room, num_rows, table_stride, num_halvings,
    PAGE_SIZE: tl.constexpr, TREES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write places (4, room) int32; `room`: num_tokens, rounded up. Tokens after the last row get the sink page."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < num_tokens
    row = tl.zeros([BLOCK], tl.int32)  # first row that ends after the token
    above = tl.zeros([BLOCK], tl.int32) + num_rows
    for _ in range(num_halvings):
        middle = (row + above) // 2
        is_open = row < above
        ends_before = tl.load(cu_q_lens + 1 + middle, is_open, other=0) <= token
        row = tl.where(is_open & ends_before, middle + 1, row)
        above = tl.where(is_open & (ends_before == 0), middle, above)
    slot = tl.load(slots + token, is_token, other=0).to(tl.int32)
    entry = row.to(tl.int64) * table_stride + slot // PAGE_SIZE
    page = tl.load(page_table + entry, is_token & (row < num_rows), other=0)
    base, num_read = slot + 1, slot + 1
    if TREES:
        bits = tl.load(visible + token, is_token, other=-1)
        width = width_of(tl.maximum(bits, 1))
        base = tl.where(bits >= 0, slot + 1 - width, base)
        num_read = tl.where(bits >= 0, base + ones_of(tl.maximum(bits, 0)), num_read)
    tl.store(places + token, page, is_token)
    tl.store(places + room + token, slot, is_token)
    tl.store(places + 2 * room + token, base, is_token)
    tl.store(places + 3 * room + token, num_read, is_token)


def find_places(
    slots: torch.Tensor, visible: torch.Tensor | None, cu_q_lens: torch.Tensor, page_table: torch.Tensor, page_size: int
) -> Places:
    """Return the places for slots and visible (T,) int64, cu_q_lens (B + 1,) int32, page_table (B, P) int32.

    All are contiguous. Every result starts at a multiple of 16 bytes. For other addresses, Triton would compile more
    variants of the kernels that read the result."""
    num_tokens, num_rows = len(slots), len(page_table)
    room = -(-num_tokens // ALIGNED_TOKENS) * ALIGNED_TOKENS
    found = torch.empty((4, room), dtype=torch.int32, device=slots.device)
    launch(
        places_kernel, (-(-num_tokens // BLOCK),),
        slots, slots if visible is None else visible, cu_q_lens, page_table, found,
        num_tokens, room, num_rows, page_table.stride(0), num_rows.bit_length(),
        PAGE_SIZE=page_size, TREES=visible is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return Places(*found[:, :num_tokens].unbind(0))


def real_signatures() -> set[Signature]:
    slots = torch.empty(REAL_BATCH, dtype=torch.int64, device="meta")
    bounds = torch.empty(REAL_BATCH + 1, dtype=torch.int32, device="meta")
    table = torch.empty(REAL_BATCH, 64, dtype=torch.int32, device="meta")
    with recorded() as signatures:
        for visible in (None, slots):
            find_places(slots, visible, bounds, table, page_size=16)
    return signatures
