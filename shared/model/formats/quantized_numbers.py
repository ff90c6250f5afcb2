"""Turn the numbers and scales of a quantised matrix into weights.

All formats follow one rule, for output n and input k:

    weight[n, k] = (number[n, k] - zero[r, g]) * scale[r, g]        r = n // rows, g = k // columns

With act order (GPTQ), g = groups[k] instead. The difference is exact. The product is rounded once, to float32, and then
once more to the dtype that is asked for. A scale of a float format with at most 16 bits gives exact products. NVFP4 has
such scales, and one more for the whole matrix, by which the exact product is multiplied or divided.

bitsandbytes counts its blocks through all rows, and looks numbers up in a table (`widen_looked_up`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.kernel.product.block_weights import CODE_BLOCK, SIGN_BIT, BlockFormat, BlockWeights

WORD = 32  # bits
BLOCK = CODE_BLOCK  # inputs; codes can stand for such blocks
AT_ONCE = 1 << 20  # weights that are widened at a time, so that memory holds little besides the result
# E2M1 (OCP Microscaling Formats 1.0): sign, two bits of exponent, one of mantissa; fp8 has all of its values
FP4_AS_FP8 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).to(torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix (N outputs, K inputs)."""

    numbers: torch.Tensor  # (N, K) uint8, int8 or fp8
    scales: torch.Tensor  # (R, G) of a float dtype
    zeros: torch.Tensor | float  # (R, G), or one for all
    rows: int  # outputs of each row of scales
    columns: int  # inputs of each column of scales
    groups: torch.Tensor | None  # (K,) int64: each input's column of scales, if these inputs are not neighbours
    bits: int = 8  # of whole numbers
    factor: torch.Tensor | None = None  # one float32 for the whole matrix
    divisor: torch.Tensor | None = None  # the same


def widen(matrix: Quantized, out: torch.Tensor) -> None:
    """Write the weights into `out` (N, K), of a float dtype. Raises ValueError."""
    if matrix.numbers.shape != out.shape:
        raise ValueError(f"numbers of shape {tuple(matrix.numbers.shape)} for {tuple(out.shape)} weights")
    height = max(1, AT_ONCE // max(1, out.shape[1]))
    for first in range(0, len(out), height):
        part = slice(first, first + height)
        numbers = matrix.numbers[part].float()
        at = torch.arange(first, first + len(numbers)) // matrix.rows
        numbers -= _by_input(matrix.zeros[at], matrix) if isinstance(matrix.zeros, torch.Tensor) else matrix.zeros
        numbers.mul_(_by_input(matrix.scales[at], matrix))
        if matrix.factor is not None:
            numbers.mul_(matrix.factor.reshape(()))
        if matrix.divisor is not None:
            numbers.div_(matrix.divisor.reshape(()))
        out[part] = numbers


def widen_looked_up(
    packed: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, block: int, out: torch.Tensor
) -> None:
    """Write `table[number] * scale` into `out`, for numbers of 4 bits, higher halves first. Raises ValueError.

    `scales`: float32, one for `block` numbers, which are counted through all rows."""
    packed, flat = packed.flatten(), out.view(-1)
    if block < 2 or block % 2:  # a block that begins within a byte
        raise ValueError(f"blocks of {block}")
    if len(packed) != -(-len(flat) // 2) or len(scales) != -(-len(flat) // block) or len(table) != 16:
        raise ValueError(f"{len(packed)} bytes, {len(scales)} scales and {len(table)} values for {len(flat)} weights")
    step = max(1, AT_ONCE // block) * block
    for first in range(0, len(flat), step):
        part = flat[first : first + step]
        own = packed[first // 2 : (first + len(part) + 1) // 2]
        numbers = torch.stack((own >> 4, own & 15), 1).flatten()[: len(part)]
        at = torch.arange(first, first + len(part)) // block
        part.copy_(table[numbers.long()] * scales[at])


def _by_input(values: torch.Tensor, matrix: Quantized) -> torch.Tensor:
    """Repeat values (M, G) for each input: (M, K) float32."""
    if matrix.groups is not None:
        return values.float()[:, matrix.groups]
    return values.float()[:, :, None].expand(-1, -1, matrix.columns).flatten(1)[:, : matrix.numbers.shape[1]]


def spread(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | float = 0,
    groups: torch.Tensor | None = None,
    block: tuple[int, int] | None = None,
    bits: int = 8,
) -> Quantized:
    """Find the scale of each number. Scales: one, (N,), (N, 1), (N, G), or one for each block. Raises ValueError.

    Only a `block` may be cut off at the edge. `groups` (K,): each input's group, if groups are not neighbours.
    """
    if numbers.dim() != 2 or scales.dim() > 2:
        raise ValueError(f"numbers of shape {tuple(numbers.shape)}, scales of shape {tuple(scales.shape)}")
    scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
    if isinstance(zeros, torch.Tensor):
        zeros = zeros.reshape(scales.shape)
    sizes = zip(scales.shape, numbers.shape, block or (None, None), strict=True)
    rows, columns = (_step(*one) for one in sizes)
    if groups is not None:
        groups = _shuffled(groups.long(), numbers.shape[1], scales.shape[1], columns)
    return Quantized(numbers, scales, zeros, rows, columns, groups, bits)


def _shuffled(groups: torch.Tensor, num_inputs: int, num_groups: int, columns: int) -> torch.Tensor | None:
    """Return the groups, or None if neighbours share them. Raises ValueError."""
    if len(groups) != num_inputs or int(groups.max()) >= num_groups:
        raise ValueError(f"{len(groups)} inputs in groups up to {int(groups.max())}")
    # compressed-tensors writes -1 for groups of neighbours
    is_plain = (groups < 0).any() or torch.equal(groups, torch.arange(num_inputs) // columns)
    return None if is_plain else groups


def _step(num_scales: int, size: int, block: int | None) -> int:
    """Return how many neighbours share a scale."""
    if num_scales == 1:
        return size
    if block is not None and -(-size // block) == num_scales:
        return block
    if num_scales < 1 or size % num_scales:
        raise ValueError(f"{num_scales} scales for {size}")
    return size // num_scales


def as_blocks(matrix: Quantized) -> BlockWeights | None:
    """Return the same weights in blocks, or None if these can't hold them: FP4 and fp8 numbers, and act order."""
    numbers = matrix.numbers
    if numbers.is_floating_point() or numbers.shape[1] % BLOCK or matrix.columns % BLOCK or matrix.groups is not None:
        return None
    at = torch.arange(len(numbers)) // matrix.rows
    columns = torch.arange(0, numbers.shape[1], BLOCK) // matrix.columns

    def cells(values: torch.Tensor) -> torch.Tensor:
        return values[at].float()[:, columns]

    sign = SIGN_BIT if numbers.dtype == torch.int8 else 0
    numbers, scales = numbers.contiguous().view(torch.uint8) ^ sign, cells(matrix.scales)
    lows, zero, bits = None, 0, max(4, matrix.bits)
    if isinstance(matrix.zeros, torch.Tensor):
        lows = -(cells(matrix.zeros) + sign) * scales
    else:
        zero = int(matrix.zeros) + sign
    form = BlockFormat(f"W{bits}", bits, zero, has_low=lows is not None, half_scales=False, block=BLOCK)
    return BlockWeights(form, numbers, scales, lows)


def fields(words: torch.Tensor, bits: int, count: int, order: Sequence[int] = ()) -> torch.Tensor:
    """Unpack words (M, W) int32 into (M, count) uint8. Field i of a word, from the lowest bits up, is its column
    `order[i]`, or else i."""
    packed = words.contiguous().view(torch.uint8)  # the lowest byte first, as on all processors that run this
    out = torch.empty(*packed.shape, 8 // bits, dtype=torch.uint8)
    for field in range(8 // bits):
        torch.bitwise_and(packed >> (bits * field), (1 << bits) - 1, out=out[..., field])
    if order:
        by_word, out = out.view(len(words), -1, len(order)), torch.empty(*words.shape, len(order), dtype=torch.uint8)
        out[..., list(order)] = by_word
    return out.flatten(1)[:, :count]


def add_one(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Add 1 to all fields of int32 words at once, as GPTQModel takes it away: with carries between fields."""
    ones = ((1 << WORD) - 1) // ((1 << bits) - 1)
    return words + ones


def fp4_numbers(packed: torch.Tensor) -> torch.Tensor:
    """Unpack bytes (..., n) into fp8 numbers (..., 2 n), lower halves first."""
    table = FP4_AS_FP8.view(torch.uint8)
    out = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=torch.uint8)
    out[..., 0::2], out[..., 1::2] = table[(packed & 15).int()], table[(packed >> 4).int()]
    return out.view(torch.float8_e4m3fn)


def powers(scales: torch.Tensor) -> torch.Tensor:
    """Read bytes as powers of two (E8M0: exponent + 127); other scales are floats already."""
    return scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
