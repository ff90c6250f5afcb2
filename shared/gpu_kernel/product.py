"""Multiply rows by a weight in tiles of one size.

So a row's result has the same bits in a batch of any size. torch's products choose their tiles, and so the order of
sums, by the number of rows. For weights in the model's dtype they are faster, and our tiles serve only
`--deterministic`.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl

from shared.gpu_kernel.gate import gate, gated
from shared.gpu_kernel.launch.launcher import launch, recorded
from shared.gpu_kernel.launch.real_models import REAL_MODELS
from shared.gpu_kernel.launch.signatures import REAL_BATCH, REAL_DTYPES, Signature
from shared.gpu_kernel.stored_bytes import as_bytes, kind_of, unit_of, widened
from shared.kernel.code.quantized import quantize

BLOCK_M = BLOCK_N = 64
INPUT_BYTES = 128  # bytes of a row that a program reads at a time
GATES = (None, False, True)  # values of is_gelu: no gate, silu, gelu
# with more rows, converting the bytes for torch's product is faster
FEW_ROWS = 256


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    x,
    weight,
    scale,  # or None
    bias,  # or None
    out,
    num_rows,
    num_columns,  # columns of `out`
    num_inputs,
    KIND: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (m, n) computes one tile, over all inputs in order.

    With IS_GATED, each gate value is followed by its up value, so that one thread gets both."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = row < num_rows, output < num_columns
    if IS_GATED:
        is_output = output // 2 < num_columns
        output = output // 2 + output % 2 * num_columns
    x_at = x + row.to(tl.int64)[:, None] * num_inputs
    weight_at = weight + output.to(tl.int64)[:, None] * num_inputs
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        place = start + tl.arange(0, BLOCK_K)
        is_input = (place < num_inputs)[None, :]
        left = tl.load(x_at + place[None, :], is_row[:, None] & is_input, other=0.0)
        right = tl.load(weight_at + place[None, :], is_output[:, None] & is_input, other=0)
        sums = tl.dot(left, tl.trans(widened(right, left.dtype, KIND)), sums, input_precision="ieee")
    if scale is not None:
        sums *= unit_of(tl.load(scale + output, is_output, other=0.0), KIND)[None, :]
    if bias is not None:
        sums += tl.load(bias + output, is_output, other=0.0).to(tl.float32)[None, :]
    column, result = output, sums.to(out.dtype.element_ty)
    if IS_GATED:  # `result` is rounded first, as by a separate launch of `gate`
        column = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        of_gate, of_up = tl.split(tl.reshape(result, [BLOCK_M, BLOCK_N // 2, 2]))
        result = gated(of_gate.to(tl.float32), of_up.to(tl.float32), IS_GELU).to(out.dtype.element_ty)
    there = out + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(there, result, is_row[:, None] & (column < num_columns)[None, :])


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None = None,
    scale: torch.Tensor | None = None,
    is_gelu: bool | None = None,
) -> torch.Tensor:
    """Return x (M, in) times weight (out, in) plus bias (out,): (M, out) in `out_dtype`, by default x's dtype.

    All tensors are contiguous. The weight has x's dtype, or is bytes (shared/kernel/code/quantized.py) with a scale
    (out,) float32. Sums are float32. Unless `is_gelu` is None, return gate(product), (M, out / 2), with the same
    bits."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    is_gated = is_gelu is not None
    columns = outputs // 2 if is_gated else outputs
    out = torch.empty(rows, columns, dtype=out_dtype or x.dtype, device=x.device)
    grid = (triton.cdiv(rows, BLOCK_M), triton.cdiv(outputs, BLOCK_N))
    launch(
        product_kernel, grid, x, as_bytes(weight), scale, bias, out, rows, columns, inputs,
        num_stages=3, KIND=kind_of(weight), IS_GATED=is_gated, IS_GELU=bool(is_gelu),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=INPUT_BYTES // x.element_size(),
    )  # fmt: skip
    return out


class FixedLinear:
    """Serve as a Linear or, with `out_dtype`, as a Head."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight, self._out_dtype = weight.contiguous(), out_dtype
        self._bias = None if bias is None else bias.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return product(x.to(self._weight.dtype).contiguous(), self._weight, self._bias, self._out_dtype)

    def gated(self, x: torch.Tensor, is_gelu: bool) -> torch.Tensor:
        """Return (M, out / 2)."""
        return product(x.to(self._weight.dtype).contiguous(), self._weight, self._bias, is_gelu=is_gelu)


class ByteLinear:
    """Multiply by byte weights. Activations are not rounded, so only the order of sums differs from the CPU's."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, *, is_fixed: bool = False
    ) -> None:
        """`dtype`: the bytes' dtype. `is_fixed`: whether the tiles also multiply more than FEW_ROWS rows."""
        self.out_features, self.in_features = weight.shape
        self._data, self._scale = quantize(weight, dtype)
        self._bias, self._is_fixed = None if bias is None else bias.float(), is_fixed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._tiles(x, None) if self._takes_tiles(x) else self._library(x)

    def gated(self, x: torch.Tensor, is_gelu: bool) -> torch.Tensor:
        """Return (M, out / 2)."""
        return self._tiles(x, is_gelu) if self._takes_tiles(x) else gate(self._library(x), is_gelu, x.dtype)

    def _takes_tiles(self, x: torch.Tensor) -> bool:
        return len(x) <= FEW_ROWS or self._is_fixed

    def _tiles(self, x: torch.Tensor, is_gelu: bool | None) -> torch.Tensor:
        return product(x.contiguous(), self._data, self._bias, scale=self._scale, is_gelu=is_gelu)

    def _library(self, x: torch.Tensor) -> torch.Tensor:
        columns = self._data.to(x.dtype).T  # every byte converts exactly
        sums = torch.mm(x, columns) if x.itemsize == 4 else torch.mm(x, columns, out_dtype=torch.float32)
        sums *= self._scale
        return (sums if self._bias is None else sums.add_(self._bias)).to(x.dtype)


def real_signatures() -> set[Signature]:
    with recorded() as signatures:
        for dtype in (*REAL_DTYPES, torch.float32):
            for model in REAL_MODELS:
                x = torch.empty(REAL_BATCH, model.hidden_size, dtype=dtype, device="meta")
                weight = torch.empty(model.vocab_size, model.hidden_size, dtype=dtype, device="meta")
                for is_gelu in GATES:
                    product(x, weight, None, is_gelu=is_gelu)
                    product(x, weight, weight[:, 0].contiguous(), is_gelu=is_gelu)
                product(x, weight, None, torch.float32)
                if dtype == torch.float32:
                    continue
                in_bytes, scale = weight.to(torch.float8_e4m3fn), torch.empty(model.vocab_size, device="meta")
                for bias, is_gelu in itertools.product((None, scale), GATES):
                    product(x, in_bytes, bias, scale=scale, is_gelu=is_gelu)
    return signatures
