"""Compute the gated activation of an MLP: silu or gelu of `gate`, times `up`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.gpu_kernel.launch.launcher import launch, recorded
from shared.gpu_kernel.launch.real_models import REAL_MODELS
from shared.gpu_kernel.launch.signatures import REAL_BATCH, REAL_DTYPES, Signature

BLOCK = 1024

# gelu in its tanh form: x / 2 * (1 + tanh(u)) = x * sigmoid(2 * u)
TWICE_ROOT = tl.constexpr(1.5957691216057308)
CUBE = tl.constexpr(0.044715)


@triton.jit
def gated(gate, up, IS_GELU: tl.constexpr):
    """`gate`, `up`: float32 of any shape."""
    steep = TWICE_ROOT * (gate + CUBE * gate * gate * gate) if IS_GELU else gate
    return gate * tl.sigmoid(steep) * up


@triton.jit(do_not_specialize=["inner"])
def gate_kernel(
    gate_up,
    out,
    inner,
    IS_GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < inner
    gate = tl.load(gate_up + row * 2 * inner + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * inner + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * inner + place, gated(gate, up, IS_GELU).to(out.dtype.element_ty), mask=inside)


def gate(gate_up: torch.Tensor, is_gelu: bool, dtype: torch.dtype) -> torch.Tensor:
    """Gate the contiguous `gate_up` (M, 2 * I), with any I. Return (M, I) in `dtype`."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, inner, dtype=dtype, device=gate_up.device)
    grid = (rows, triton.cdiv(inner, BLOCK))
    launch(gate_kernel, grid, gate_up, out, inner, IS_GELU=is_gelu, BLOCK=BLOCK)
    return out


def real_signatures() -> set[Signature]:
    with recorded() as signatures:
        for model in REAL_MODELS:
            for dtype in REAL_DTYPES:
                for is_gelu in (False, True):
                    shape = (REAL_BATCH, 2 * model.intermediate_size)
                    gate(torch.empty(shape, dtype=dtype, device="meta"), is_gelu, dtype)
    return signatures
