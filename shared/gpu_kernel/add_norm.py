"""Compute residual sum and RMS norm in one pass over each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.gpu_kernel.launch.launcher import launch, recorded
from shared.gpu_kernel.launch.real_models import REAL_MODELS
from shared.gpu_kernel.launch.signatures import REAL_BATCH, REAL_DTYPES, Signature

MAX_COLUMNS = 16384
COLUMNS_A_WARP = 512
MAX_WARPS = 8  # with 16 warps, ptxas spills at 8,192 columns on sm_80


@triton.jit
def add_norm_kernel(
    x,
    delta,  # or None
    weight,
    out,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum a row's squares in float32, in an order that depends only on H."""
    row = tl.program_id(0).to(tl.int64) * H
    place = tl.arange(0, BLOCK)
    inside = place < H
    numbers = tl.load(x + row + place, mask=inside, other=0.0).to(tl.float32)
    if delta is not None:
        numbers += tl.load(delta + row + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + row + place, numbers, mask=inside)
    scale = tl.rsqrt(tl.sum(numbers * numbers, axis=0) / H + eps)
    scaled = numbers * scale * tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + place, scaled.to(out.dtype.element_ty), mask=inside)


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """Return the RMS norm of x (M, H) times weight (H,), in `dtype`. All tensors are contiguous; H <= MAX_COLUMNS.

    With a delta (M, H), x is float32, and the delta is first added to x in place."""
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    block = triton.next_power_of_2(columns)
    warps = min(max(block // COLUMNS_A_WARP, 1), MAX_WARPS)
    launch(add_norm_kernel, (rows,), x, delta, weight, out, eps, num_warps=warps, H=columns, BLOCK=block)
    return out


def real_signatures() -> set[Signature]:
    with recorded() as signatures:
        for hidden_size in {model.hidden_size for model in REAL_MODELS} | {MAX_COLUMNS}:
            weight = torch.empty(hidden_size, device="meta")
            residual = torch.empty(REAL_BATCH, hidden_size, device="meta")
            for dtype in REAL_DTYPES:
                delta = residual.to(dtype)
                add_norm(residual, delta, weight, 1e-5, dtype)
                add_norm(residual, None, weight, 1e-5, dtype)
                add_norm(delta, None, weight, 1e-5, dtype)
    return signatures
