"""Normalise and rotate queries and keys, and write keys and values to their pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.gpu_kernel.launch.launcher import launch, recorded
from shared.gpu_kernel.launch.signatures import Signature
from shared.gpu_kernel.places import Places
from shared.gpu_kernel.real_steps import real_steps
from shared.gpu_kernel.stored_bytes import as_bytes, kind_of, scale_of, to_bytes
from shared.kernel.attention.attention import page_hadamard

BLOCK_H = 8  # heads per program
RopeTables = tuple[torch.Tensor, torch.Tensor]
EXACT = True  # the written bytes must equal a CPU's


@triton.jit
def rope_write_kernel(
    qkv, q_norm, k_norm, cos, sin, positions, pages, slots, q_out, kv, scales,
    eps, qkv_stride, page_stride, scale_stride, num_heads, num_kv_heads,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, KIND: tl.constexpr,
    HAS_NORM: tl.constexpr, SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Program (t, i) handles token t and block i of its heads: q's blocks come first, then k's, then v's.

    cos, sin: (positions, D / 2) float32. pages, slots: (T,) int32. SIZE: see page_hadamard."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks = tl.cdiv(num_heads, BLOCK_H)
    kv_blocks = tl.cdiv(num_kv_heads, BLOCK_H)
    part = (block >= q_blocks).to(tl.int32) + (block >= q_blocks + kv_blocks).to(tl.int32)  # q, k, v
    first = (block - (part > 0) * q_blocks - (part > 1) * kv_blocks) * BLOCK_H
    head = first + tl.arange(0, BLOCK_H)
    count = tl.where(part == 0, num_heads, num_kv_heads)
    before = (part > 0) * num_heads + (part > 1) * num_kv_heads
    half = tl.arange(0, BLOCK_HALF)
    is_dim = half < HEAD_DIM // 2
    mask = (head < count)[:, None] & is_dim[None, :]
    source = qkv + token * qkv_stride + (before + head)[:, None] * HEAD_DIM + half[None, :]
    left_in, right_in = tl.load(source, mask, other=0.0), tl.load(source + HEAD_DIM // 2, mask, other=0.0)
    left, right = left_in.to(tl.float32), right_in.to(tl.float32)
    if part < 2:
        if HAS_NORM:
            norm = q_norm if part == 0 else k_norm
            squares = tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)
            root = tl.math.sqrt_rn(tl.math.div_rn(squares, tl.full([BLOCK_H], HEAD_DIM, tl.float32)) + eps)
            factor = tl.math.div_rn(tl.full([BLOCK_H], 1.0, tl.float32), root)[:, None]
            left = left * factor * tl.load(norm + half, is_dim, other=0.0)[None, :]
            right = right * factor * tl.load(norm + HEAD_DIM // 2 + half, is_dim, other=0.0)[None, :]
        turn = tl.load(positions + token) * (HEAD_DIM // 2) + half
        c, s = tl.load(cos + turn, is_dim, other=0.0)[None, :], tl.load(sin + turn, is_dim, other=0.0)[None, :]
        left, right = left * c - right * s, right * c + left * s
    left, right = left.to(qkv.dtype.element_ty).to(tl.float32), right.to(qkv.dtype.element_ty).to(tl.float32)
    if SIZE > 1:
        if part < 2:
            left, right = mixed(left, right, SIZE, BLOCK_H, BLOCK_HALF)
        if part == 1:
            left, right = left * (1.0 / SIZE), right * (1.0 / SIZE)
    if part == 0:
        target = q_out + (token * num_heads + head)[:, None] * HEAD_DIM + half[None, :]
        tl.store(target, left, mask)
        tl.store(target + HEAD_DIM // 2, right, mask)
    else:
        page = tl.load(pages + token).to(tl.int64)
        line = ((part - 1) * num_kv_heads + head) * PAGE_SIZE + tl.load(slots + token) % PAGE_SIZE
        stored = kv + page * page_stride + line[:, None] * HEAD_DIM + half[None, :]
        if KIND != 0:
            largest = tl.maximum(tl.max(tl.abs(left), axis=1), tl.max(tl.abs(right), axis=1))
            scale = scale_of(largest, KIND)
            tl.store(scales + page * scale_stride + line, scale, head < count)
            tl.store(stored, to_bytes(left, scale, KIND), mask)
            tl.store(stored + HEAD_DIM // 2, to_bytes(right, scale, KIND), mask)
        else:
            tl.store(stored, left, mask)
            tl.store(stored + HEAD_DIM // 2, right, mask)


@triton.jit
def mixed(left, right, SIZE: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Multiply each SIZE numbers of heads, given as halves, by a Hadamard matrix, in block_weights.hadamard's order."""
    if SIZE > HALF:
        left, right = left + right, left - right
    tl.static_assert(SIZE == 64)
    for stage in tl.static_range(6):
        if SIZE >> (stage + 1) < HALF:
            left = with_neighbours(left, SIZE >> (stage + 1), ROWS, HALF)
            right = with_neighbours(right, SIZE >> (stage + 1), ROWS, HALF)
    return left, right


@triton.jit
def with_neighbours(x, APART: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return sums with, and differences from, the columns APART away."""
    pairs = tl.permute(tl.reshape(x, (ROWS, COLUMNS // (2 * APART), 2, APART)), (0, 1, 3, 2))
    first, second = tl.split(pairs)
    both = tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2))
    return tl.reshape(both, (ROWS, COLUMNS))


def rope_write(
    qkv: torch.Tensor, norms: RopeTables | None, eps: float, tables: RopeTables, positions: torch.Tensor,
    places: Places, num_heads: int, kv: torch.Tensor, scales: torch.Tensor | None, size: int = 1,
) -> torch.Tensor:  # fmt: skip
    """Write keys and values to their pages. Return q, rotated: (T, heads, D). `size`: page_hadamard's, for q and k.

    qkv: (T, (heads + 2 * kv_heads) * D), rows of any stride. norms: of q and k, each (D,) float32, or None. positions:
    (T,) int64. kv: one layer of the pool, (num_pages, 2, kv_heads, page_size, D), contiguous within a page. scales:
    kv's shape without D, or None."""
    _, _, kv_heads, page_size, head_dim = kv.shape
    q = torch.empty((len(qkv), num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm = norms or tables
    blocks = -(-num_heads // BLOCK_H) + 2 * -(-kv_heads // BLOCK_H)
    launch(
        rope_write_kernel, (len(qkv), blocks),
        qkv, q_norm, k_norm, *tables, positions, places.page, places.slot, q,
        as_bytes(kv), kv if scales is None else scales,
        eps, qkv.stride(0), kv.stride(0), 0 if scales is None else scales.stride(0), num_heads, kv_heads,
        HEAD_DIM=head_dim, PAGE_SIZE=page_size, KIND=kind_of(kv),
        HAS_NORM=norms is not None, SIZE=size, BLOCK_H=BLOCK_H, BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=1,
    )  # fmt: skip
    return q


def real_signatures() -> set[Signature]:
    with recorded() as signatures:
        for step in real_steps():
            layer, model = step.layer, step.model
            columns = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
            qkv = torch.empty(len(step.queries), columns, dtype=step.dtype, device="meta")
            table = torch.empty(step.context, model.head_dim // 2, device="meta")
            norm, positions = (
                torch.empty(model.head_dim, device="meta"),
                torch.empty(len(qkv), dtype=torch.int64, device="meta"),
            )
            size = page_hadamard(step.shape, layer.kv.dtype)
            for norms in (None, (norm, norm)):
                rope_write(
                    qkv, norms, 1e-5, (table, table), positions, step.places, model.num_heads, layer.kv, layer.scales,
                    size,
                )  # fmt: skip
    return signatures
