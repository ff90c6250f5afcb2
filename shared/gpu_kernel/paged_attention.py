"""Compute attention of short windows over long rows: decode, verify and trees.

Several programs split a row's keys; a second kernel merges their results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.gpu_kernel.attention_tile import attend_keys, sink_weight
from shared.gpu_kernel.launch.launcher import launch, recorded
from shared.gpu_kernel.launch.signatures import Signature
from shared.gpu_kernel.paged_step import Layer, Rows, keys_at_a_time, num_stages, padded_dim
from shared.gpu_kernel.places import Places
from shared.gpu_kernel.real_steps import real_steps
from shared.gpu_kernel.stored_bytes import as_bytes, kind_of

SPLIT_KEYS = 256  # keys per program; doubled until MOST_SPLITS programs cover the row
MOST_SPLITS = 32
NO_WINDOW = 2**30
MOST_KEYS = 64  # keys read at a time
MERGED_HEADS = 8  # heads per program of merge_kernel
VARYING = ["first_row", "first_token", "num_tokens", "table_stride"]


@triton.jit(do_not_specialize=VARYING)
def attend_split_kernel(
    q, kv, scales, out, sums, parts, cu_q_lens, page_table, slots, bases, num_reads, visible, sinks,
    first_row, first_token, num_tokens, num_kv_heads, table_stride, page_stride, scale_stride, window, factor, softcap,
    most_splits, split_keys,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BY_TOKEN: tl.constexpr, KIND: tl.constexpr, TREES: tl.constexpr,
    SLIDING: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, IS_SPLIT: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (b, i, s) lets a tile of one KV head's queries attend to split s of the tile's keys.

    With IS_SPLIT, results go to `sums` and `parts`, which begin at token `first_token`. sums (2, splits, tokens, heads)
    float32: the largest scores, then the sums of weights. parts (splits, tokens, heads, D) float32: the weighted sums
    of the values."""
    row = first_row + tl.program_id(0)
    kv_head = tl.program_id(1) % num_kv_heads
    begin = tl.load(cu_q_lens + row)
    end = tl.load(cu_q_lens + row + 1)
    first_line = tl.program_id(1) // num_kv_heads * BLOCK_M
    line = first_line + tl.arange(0, BLOCK_M)
    token = begin + line // GROUP
    is_line = token < end
    if begin + first_line // GROUP >= end:
        return
    slot = tl.load(slots + token, is_line, other=-1)
    num_read = tl.load(num_reads + token, is_line, other=0)
    base, bits = slot, slot.to(tl.int64)
    if TREES:
        base = tl.load(bases + token, is_line, other=0)
        bits = tl.load(visible + token, is_line, other=0)
    # A tile splits its own keys: from the first key in its sliding window to the key of its last token.
    lowest = tl.min(tl.where(is_line, tl.minimum(num_read - window, base if TREES else slot), 2147483647))
    lowest = tl.maximum(lowest, 0) // BLOCK_N * BLOCK_N
    stop = tl.max(slot) + 1
    length = split_keys
    while length * most_splits < stop - lowest:
        length *= 2
    first = lowest + tl.program_id(2) * length
    head = kv_head * GROUP + line % GROUP
    num_heads = num_kv_heads * GROUP
    at = (tl.program_id(2).to(tl.int64) * num_tokens + token - first_token) * num_heads + head
    if first >= stop:
        tl.store(sums + at, float("-inf"), is_line)
        return
    dim = tl.arange(0, BLOCK_D)
    mask = is_line[:, None] & (dim < HEAD_DIM)[None, :]
    of_head = (token.to(tl.int64) * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
    largest, total, values = attend_keys(
        tl.load(q + of_head, mask, other=0.0), kv, scales, page_table + row.to(tl.int64) * table_stride,
        kv_head, num_kv_heads, page_stride, scale_stride, first, tl.minimum(first + length, stop),
        slot, base, num_read, bits, window, factor, softcap,
        HEAD_DIM, PAGE_SIZE, BY_TOKEN, KIND, TREES, SLIDING, CAPPED, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    if IS_SPLIT:
        tl.store(sums + at, largest, is_line)
        tl.store(sums + tl.num_programs(2).to(tl.int64) * num_tokens * num_heads + at, total, is_line)
        tl.store(parts + at[:, None] * HEAD_DIM + dim[None, :], values, mask)
    else:
        if SINKS:
            total += sink_weight(sinks, head, is_line, largest)
        tl.store(out + of_head, (values / tl.where(total > 0, total, 1.0)[:, None]).to(out.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["first_row", "first_token", "num_tokens", "num_splits"])
def merge_kernel(
    sums, parts, out, cu_q_lens, sinks, first_row, first_token, num_tokens, num_splits, num_heads, blocks,
    HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (b, i) merges one query's splits, for one block of heads.

    Splits are added in order, up to the last one that has keys: empty ones would add 0 and change no bit."""
    row = first_row + tl.program_id(0)
    token = tl.load(cu_q_lens + row) + tl.program_id(1) // blocks
    if token >= tl.load(cu_q_lens + row + 1):
        return
    head = tl.program_id(1) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < num_heads
    step = tl.cast(num_tokens, tl.int64) * num_heads
    at = (token - first_token).to(tl.int64) * num_heads + head
    splits = tl.arange(0, SPLITS)
    is_there = (splits < num_splits)[:, None] & is_head[None, :]
    of_splits = tl.load(sums + splits[:, None] * step + at[None, :], is_there, other=float("-inf"))
    largest = tl.max(of_splits, 0)
    num_read = tl.max(tl.where(tl.max(of_splits, 1) > float("-inf"), splits + 1, 0), 0)
    known = tl.where(largest == float("-inf"), 0.0, largest)
    dim = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_H], tl.float32)
    if SINKS:
        total += sink_weight(sinks, head, is_head, known)
    values = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for split in range(num_read):
        there = split * step + at
        own = tl.load(sums + there, is_head, other=float("-inf"))
        has_read = own > float("-inf")
        weight = tl.where(has_read, tl.exp2(own - known), 0.0)
        total += weight * tl.load(sums + num_splits * step + there, has_read, other=0.0)
        mask = has_read[:, None] & (dim < HEAD_DIM)[None, :]
        values += weight[:, None] * tl.load(parts + there[:, None] * HEAD_DIM + dim[None, :], mask, other=0.0)
    target = (token.to(tl.int64) * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
    result = values / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + target, result.to(out.dtype.element_ty), is_head[:, None] & (dim < HEAD_DIM)[None, :])


def attend_windows(q: torch.Tensor, out: torch.Tensor, layer: Layer, rows: Rows, places: Places) -> None:
    """Read q and fill `out`, both (T, heads, D), for the rows' tokens.

    q is already rotated, and the tokens' keys and values are already in their pages."""
    num_tokens, (num_heads, head_dim) = rows.num_tokens, q.shape[1:]
    _, _, kv_heads, page_size, _ = layer.kv.shape
    group = num_heads // kv_heads
    block_m = tile_lines(group)
    tiles = -(-rows.max_q_len * group // block_m)
    num_splits, is_tree = splits_of(rows, layer.window), rows.visible is not None
    sums = parts = out
    if num_splits > 1:
        sums = torch.empty((2, num_splits, num_tokens, num_heads), dtype=torch.float32, device=q.device)
        parts = torch.empty((num_splits, num_tokens, num_heads, head_dim), dtype=torch.float32, device=q.device)
    block_d, block_n = padded_dim(head_dim), keys_at_a_time(layer, q.dtype)
    launch(
        attend_split_kernel, (rows.num_rows, kv_heads * tiles, num_splits),
        q, as_bytes(layer.kv), layer.kv if layer.scales is None else layer.scales, out, sums, parts,
        rows.cu_q_lens, rows.page_table, places.slot, places.base, places.num_read,
        places.slot if rows.visible is None else rows.visible, places.slot if layer.sinks is None else layer.sinks,
        rows.first, rows.first_token, num_tokens, kv_heads, rows.page_table.stride(0), layer.kv.stride(0),
        0 if layer.scales is None else layer.scales.stride(0), layer.window or NO_WINDOW, *layer.scoring(),
        MOST_SPLITS, SPLIT_KEYS,
        HEAD_DIM=head_dim, PAGE_SIZE=page_size, BY_TOKEN=layer.by_token, KIND=kind_of(layer.kv),
        TREES=is_tree, SLIDING=layer.window > 0, CAPPED=layer.softcap > 0,
        SINKS=layer.sinks is not None, IS_SPLIT=num_splits > 1, GROUP=group,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
        num_warps=8 if block_m == 64 else 4, num_stages=num_stages(head_dim),
        # to fit one more block, ptxas would limit registers to 128 or 168, and these would spill
        max_registers=255 if num_splits == 1 or layer.softcap or (layer.by_token and is_tree) else None,
    )  # fmt: skip
    if num_splits > 1:
        merge_splits(sums, parts, out, rows, layer.sinks)


def merge_splits(
    sums: torch.Tensor, parts: torch.Tensor, out: torch.Tensor, rows: Rows, sinks: torch.Tensor | None = None
) -> None:
    """Fill `out` (T, heads, D) for the rows' tokens. sums and parts: see attend_split_kernel; sinks: see Layer."""
    num_splits, _, num_heads, head_dim = parts.shape
    blocks = -(-num_heads // MERGED_HEADS)
    launch(
        merge_kernel, (rows.num_rows, rows.max_q_len * blocks),
        sums, parts, out, rows.cu_q_lens, sums if sinks is None else sinks,
        rows.first, rows.first_token, rows.num_tokens, num_splits, num_heads, blocks,
        HEAD_DIM=head_dim, SPLITS=int(triton.next_power_of_2(MOST_SPLITS)), SINKS=sinks is not None,
        BLOCK_H=MERGED_HEADS, BLOCK_D=padded_dim(head_dim),
        num_warps=8 if padded_dim(head_dim) > 128 else 4,  # with 4, wide heads spill on sm_100
    )  # fmt: skip


def tile_lines(group: int) -> int:
    """Return how many lines a tile has. It depends only on the model: tiles of another size sum in another order."""
    return min(64, max(16, int(triton.next_power_of_2(8 * group))))


def splits_of(rows: Rows, window: int) -> int:
    """Return the most splits that the longest row may have."""
    keys = rows.max_seq_len
    if window:
        keys = min(keys, window + 2 * rows.max_q_len + MOST_KEYS)
    return min(MOST_SPLITS, -(-keys // SPLIT_KEYS))


def real_signatures() -> set[Signature]:
    with recorded() as signatures:
        for step in real_steps():
            attend_windows(step.queries, step.queries, step.layer, step.rows, step.places)
    return signatures
