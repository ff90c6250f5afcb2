"""Block-quantized weights, and the product that all their kernels must equal, bit for bit.

    weight[n, k] = scale[n, g] * (number[n, k] - zero) + low[n, g]          g = k // block

GGUF files store tensors this way. In int8's longer blocks a large input would cost the others their precision. So there
x and the weights below are multiplied by a Hadamard matrix H (QuaRot, arXiv 2404.00456): x w = (H x) (H w / size). A
product rounds each row of x to bytes, with a scale per block:

    unit[r, g] = max |x[r, g]| / 127          byte[r, k] = x[r, k] * (127 / max |x[r, g]|), to the nearest, ties to even
                                              both are 0 where the maximum is at most 2^-100
    y[r, n]    = bias[n], then for g = 0, 1, ...:
                 + (scale[n, g] * unit[r, g]) * sum over k of (number[n, k] - zero) * byte[r, k]      one rounding (fma)
                 + low[n, g] * (unit[r, g] * sum over k of byte[r, k])                                one rounding (fma)

Integer sums are exact, and float operations have a fixed order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

LARGEST = 127.0
SMALLEST = 2.0**-100  # blocks up to this magnitude become 0, because 127 / a tiny number overflows float32
SIGN_BIT = 128
LEAST_HADAMARD, MOST_HADAMARD, MOST_BLOCK = 32, 64, 256  # of int8_format
AT_ONCE = 1 << 18  # numbers that fit into caches


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """`block`: weights per scale. `half_scales`: scales and lows are float16, not float32. `hadamard`: size of H."""

    name: str
    bits: int  # 4 or 8
    zero: int
    has_low: bool = False
    half_scales: bool = True
    block: int = 32
    hadamard: int = 1

    @property
    def bytes_per_weight(self) -> float:
        return self.bits / 8 + (1 + self.has_low) * (2 if self.half_scales else 4) / self.block


def int8_format(num_inputs: int) -> BlockFormat | None:
    """Return the format of `--weight-dtype int8`, or None if no block fits."""
    size = math.gcd(num_inputs, MOST_HADAMARD)
    if size < LEAST_HADAMARD:
        return None
    block = max(length for length in range(size, MOST_BLOCK + 1, size) if num_inputs % length == 0)
    return BlockFormat("int8", 8, SIGN_BIT, half_scales=False, block=block, hadamard=size)


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """A matrix (N outputs, K inputs)."""

    format: BlockFormat
    numbers: torch.Tensor  # (N, K) uint8
    scales: torch.Tensor  # (N, K / block) float32
    lows: torch.Tensor | None = None  # (N, K / block) float32, if the format has them

    @property
    def shape(self) -> tuple[int, int]:
        return self.numbers.shape[0], self.numbers.shape[1]

    def take(self, rows: torch.Tensor | slice) -> BlockWeights:
        lows = None if self.lows is None else self.lows[rows]
        return replace(self, numbers=self.numbers[rows], scales=self.scales[rows], lows=lows)

    def to(self, device: torch.device) -> BlockWeights:
        lows = None if self.lows is None else self.lows.to(device)
        return replace(self, numbers=self.numbers.to(device), scales=self.scales.to(device), lows=lows)

    def dense(self) -> torch.Tensor:
        """Return (N, K) float32."""
        block = self.format.block
        values = (self.numbers.float() - self.format.zero) * self.scales.repeat_interleave(block, dim=1)
        values = values if self.lows is None else values + self.lows.repeat_interleave(block, dim=1)
        return hadamard(values, self.format.hadamard)


def hadamard(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Multiply each `size` numbers of rows (..., K) float32 by H, in a fixed order: neighbours are added last."""
    rows = rows.clone()
    for apart in (size >> stage for stage in range(1, size.bit_length())):
        left, right = rows.unflatten(-1, (-1, 2, apart)).unbind(-2)
        difference = left - right
        left += right
        right.copy_(difference)
    return rows


def quantize_weight(weight: torch.Tensor, form: BlockFormat) -> BlockWeights:
    """Quantize (N, K) floats to an int8_format."""
    rows_at_once = max(1, AT_ONCE // weight.shape[1])
    return concatenate([_quantized(rows, form) for rows in weight.split(rows_at_once)])


def _quantized(weight: torch.Tensor, form: BlockFormat) -> BlockWeights:
    blocks = (hadamard(weight.float(), form.hadamard) / form.hadamard).unflatten(1, (-1, form.block))
    largest = blocks.abs().amax(dim=2)
    scales = largest / torch.full_like(largest, LARGEST)
    unit = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    return BlockWeights(form, unit.round_().add_(SIGN_BIT).to(torch.uint8).flatten(1), scales)


def concatenate(parts: list[BlockWeights]) -> BlockWeights:
    """Concatenate weights along their outputs."""
    if len(parts) == 1:
        return parts[0]
    if len({part.format for part in parts}) > 1:
        block = min(part.format.block for part in parts)
        parts = [_widened(part, block) for part in parts]
    lows = [part.lows for part in parts if part.lows is not None]
    return BlockWeights(
        parts[0].format,
        torch.cat([part.numbers for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(lows) if lows else None,
    )


def _widened(part: BlockWeights, block: int) -> BlockWeights:
    """Return the same weights as bytes, with a `zero` of 0, float32 scales, and lows that include the old `zero`."""
    assert part.format.hadamard == 1
    wide = BlockFormat("mixed", 8, 0, has_low=True, half_scales=False, block=block)
    repeats = part.format.block // wide.block
    lows = -part.format.zero * part.scales
    if part.lows is not None:
        lows = lows + part.lows
    spread = (values.repeat_interleave(repeats, dim=1) for values in (part.scales, lows))
    return BlockWeights(wide, part.numbers, *spread)


def quantize_rows(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x (M, K) to bytes (M, K) int8, with units (M, K / block) float32."""
    blocks = x.float().unflatten(1, (-1, block))
    largest = blocks.abs().amax(dim=2)
    largest = torch.where(largest <= SMALLEST, 0.0, largest)
    # torch would not divide by a plain 127, but multiply by its reciprocal
    top = torch.full_like(largest, LARGEST)
    inverse = torch.where(largest == 0, 0.0, top / largest)
    return (blocks * inverse[..., None]).round().to(torch.int8).flatten(1), largest / top


def product(x: torch.Tensor, weight: BlockWeights, bias: torch.Tensor) -> torch.Tensor:
    """Return y (M, N) float32 for x (M, K) of any float dtype and bias (N,) float32."""
    block = weight.format.block
    data, units = quantize_rows(hadamard(x.float(), weight.format.hadamard), block)
    rows = data.double().unflatten(1, (-1, block)).transpose(0, 1)  # (G, M, block) float64: sums are exact
    numbers = (weight.numbers.double() - weight.format.zero).unflatten(1, (-1, block)).transpose(0, 1)
    total = bias.float().expand(len(x), -1)
    for g, (row, number) in enumerate(zip(rows, numbers, strict=True)):
        scale = weight.scales[:, g] * units[:, g, None]
        total = fma((row @ number.T).float(), scale, total)
        if weight.lows is not None:
            total = fma((units[:, g] * row.sum(dim=1).float())[:, None], weight.lows[:, g], total)
    return total


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return a * b + c of float32 tensors, rounded once.

    In float64 the product is exact, but rounding the sum twice may give a wrong last bit. So the sum is first rounded
    to odd (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008)."""
    product, c = a.double() * b.double(), c.double()
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = total.view(torch.int64)
    is_even = (bits & 1) == 0
    outwards = (error > 0) == (total > 0)
    odd = torch.where(outwards, bits + 1, bits - 1).view(torch.float64)
    return torch.where((error != 0) & is_even & total.isfinite(), odd, total).float()
