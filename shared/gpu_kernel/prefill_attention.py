"""Compute attention of prompt chunks in a ragged batch: each block of queries reads its row's keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.gpu_kernel.attention_tile import attend_keys, sink_weight
from shared.gpu_kernel.launch.launcher import launch, recorded
from shared.gpu_kernel.launch.signatures import Signature
from shared.gpu_kernel.paged_attention import NO_WINDOW
from shared.gpu_kernel.paged_step import Layer, Rows, keys_at_a_time, num_stages, padded_dim
from shared.gpu_kernel.places import Places
from shared.gpu_kernel.real_steps import real_steps
from shared.gpu_kernel.stored_bytes import as_bytes, kind_of


@triton.jit(do_not_specialize=["num_rows", "table_stride", "num_halvings"])
def attend_chunks_kernel(
    q, kv, scales, out, cu_q_lens, page_table, slots, sinks,
    num_rows, num_kv_heads, table_stride, page_stride, scale_stride, window, factor, softcap, num_halvings,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BY_TOKEN: tl.constexpr, KIND: tl.constexpr,
    SLIDING: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (h, p) computes block p of lines, for KV head h.

    Row b's blocks begin at cu_q_lens[b] * GROUP // BLOCK_M + b. So the host need not count blocks, and a row's last
    block may be empty."""
    kv_head = tl.program_id(0)
    block = tl.program_id(1)
    row = 0 * block  # last row that begins at `block` or an earlier block
    above = row + num_rows
    for _ in range(num_halvings):
        middle = (row + above) // 2
        is_open = row + 1 < above
        begins = tl.load(cu_q_lens + middle) * GROUP // BLOCK_M + middle
        row = tl.where(is_open & (begins <= block), middle, row)
        above = tl.where(is_open & (begins > block), middle, above)
    begin = tl.load(cu_q_lens + row)
    end = tl.load(cu_q_lens + row + 1)
    first_line = (block - begin * GROUP // BLOCK_M - row) * BLOCK_M
    if first_line >= (end - begin) * GROUP:
        return
    line = first_line + tl.arange(0, BLOCK_M)
    token = begin + line // GROUP
    is_line = token < end
    slot = tl.load(slots + token, is_line, other=-1)
    lowest = tl.min(tl.where(is_line, slot, 2147483647)) + 1 - window
    lowest = tl.maximum(lowest, 0) // BLOCK_N * BLOCK_N
    stop = tl.max(slot) + 1
    head = kv_head * GROUP + line % GROUP
    dim = tl.arange(0, BLOCK_D)
    mask = is_line[:, None] & (dim < HEAD_DIM)[None, :]
    of_head = (token.to(tl.int64) * (num_kv_heads * GROUP) + head)[:, None] * HEAD_DIM + dim[None, :]
    largest, total, values = attend_keys(
        tl.load(q + of_head, mask, other=0.0), kv, scales, page_table + row.to(tl.int64) * table_stride,
        kv_head, num_kv_heads, page_stride, scale_stride, lowest, stop,
        slot, slot, slot, slot, window, factor, softcap,
        HEAD_DIM, PAGE_SIZE, BY_TOKEN, KIND, False, SLIDING, CAPPED, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    if SINKS:
        total += sink_weight(sinks, head, is_line, largest)
    tl.store(out + of_head, (values / tl.where(total > 0, total, 1.0)[:, None]).to(out.dtype.element_ty), mask)


def attend_chunks(q: torch.Tensor, out: torch.Tensor, layer: Layer, rows: Rows, places: Places) -> None:
    """Read q and fill `out`, both (T, heads, D), for the step's first rows, which have no trees.

    See attend_windows."""
    num_heads, head_dim = q.shape[1:]
    _, _, kv_heads, page_size, _ = layer.kv.shape
    group = num_heads // kv_heads
    block_n = keys_at_a_time(layer, q.dtype)
    block_m = 2 * block_n
    launch(
        attend_chunks_kernel, (kv_heads, rows.num_tokens * group // block_m + rows.num_rows),
        q, as_bytes(layer.kv), layer.kv if layer.scales is None else layer.scales, out,
        rows.cu_q_lens, rows.page_table, places.slot, places.slot if layer.sinks is None else layer.sinks,
        rows.num_rows, kv_heads, rows.page_table.stride(0), layer.kv.stride(0),
        0 if layer.scales is None else layer.scales.stride(0), layer.window or NO_WINDOW, *layer.scoring(),
        rows.num_rows.bit_length(),
        HEAD_DIM=head_dim, PAGE_SIZE=page_size, BY_TOKEN=layer.by_token, KIND=kind_of(layer.kv),
        SLIDING=layer.window > 0, CAPPED=layer.softcap > 0, SINKS=layer.sinks is not None, GROUP=group,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=padded_dim(head_dim),
        num_warps=8, num_stages=2 if layer.sinks is not None else num_stages(head_dim),
    )  # fmt: skip


def real_signatures() -> set[Signature]:
    with recorded() as signatures:
        for step in real_steps():
            attend_chunks(step.queries, step.queries, step.layer, step.rows, step.places)
    return signatures
