"""A product with a weight, in tiles of one size: a row's bits are the same in a batch of any size.

The library takes other tiles, and sums in another order, for other numbers of rows. It is faster: this is for
`--deterministic` alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.gpu_kernel.launcher import launch, recorded
from shared.gpu_kernel.signatures import REAL_BATCH, REAL_DTYPES, REAL_MODELS, Signature

BLOCK_M = BLOCK_N = 64
INPUT_BYTES = 128  # of a row, at a time


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    x,  # (M, in)
    weight,  # (out, in)
    bias,  # (out,), or None
    out,  # (M, out)
    num_rows,
    num_outputs,
    num_inputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (m, n): one tile, over all inputs in their order. Programs of one n, which read the same weights, are
    neighbours."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = row < num_rows, output < num_outputs
    x_at = x + row.to(tl.int64)[:, None] * num_inputs
    weight_at = weight + output.to(tl.int64)[:, None] * num_inputs
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        place = start + tl.arange(0, BLOCK_K)
        is_input = (place < num_inputs)[None, :]
        left = tl.load(x_at + place[None, :], is_row[:, None] & is_input, other=0.0)
        right = tl.load(weight_at + place[None, :], is_output[:, None] & is_input, other=0.0)
        sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + output, is_output, other=0.0).to(tl.float32)[None, :]
    there = out + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(there, sums.to(out.dtype.element_ty), is_row[:, None] & is_output[None, :])


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x (M, in), weight (out, in), bias (out,) -> (M, out), in the dtype of x unless another is named. x and weight
    have one dtype; sums are float32."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    out = torch.empty(rows, outputs, dtype=out_dtype or x.dtype, device=x.device)
    grid = (triton.cdiv(rows, BLOCK_M), triton.cdiv(outputs, BLOCK_N))
    launch(
        product_kernel, grid, x, weight, bias, out, rows, outputs, inputs,
        num_stages=3, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=INPUT_BYTES // x.element_size(),
    )  # fmt: skip
    return out


class FixedLinear:
    """Stands in for the library's Linear, and with `out_dtype` for its head."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight, self._out_dtype = weight.contiguous(), out_dtype
        self._bias = None if bias is None else bias.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return product(x.to(self._weight.dtype).contiguous(), self._weight, self._bias, self._out_dtype)


def real_signatures() -> set[Signature]:
    """Return those of real models' steps: a product with a bias and without, and the head."""
    with recorded() as signatures:
        for dtype in REAL_DTYPES:
            for model in REAL_MODELS:
                x = torch.empty(REAL_BATCH, model.hidden_size, dtype=dtype, device="meta")
                weight = torch.empty(model.vocab_size, model.hidden_size, dtype=dtype, device="meta")
                product(x, weight, None)
                product(x, weight, weight[:, 0].contiguous())
                product(x, weight, None, torch.float32)
    return signatures
