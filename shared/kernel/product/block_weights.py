"""Block-quantized weights, and the product that all their kernels must equal, bit for bit.

    weight[n, k] = scale[n, g] * (number[n, k] - zero) + low[n, g]          g = k // block

GGUF files store tensors this way. A product rounds each row of x to integers of one byte, with a scale per block:

    unit[r, g] = max |x[r, g]| / 127        input[r, k] = x[r, k] * (127 / max |x[r, g]|), to the nearest, ties to even
                                            both are 0 where the maximum is at most 2^-100
    y[r, n]    = bias[n], then for g = 0, 1, ...:
                 + (scale[n, g] * unit[r, g]) * sum over k of (number[n, k] - zero) * input[r, k]     one rounding (fma)
                 + low[n, g] * (unit[r, g] * sum over k of input[r, k])                               one rounding (fma)

Integer sums are exact, and float operations have a fixed order. In long blocks one large input would cost the others
their precision. Two formats avoid that:

    int8:    x and the weights above are multiplied by a Hadamard matrix H (QuaRot, arXiv 2404.00456):
             x w = (H x) (H w / size)
    codes:   inputs are integers of two bytes, up to 32,639 instead of 127. A file's 4-bit tensors keep their 4-bit
             codes, with three bytes for each 32 inputs (h = k // 32):
             number[n, k] = (256 * code[n, k] + nudge[n, h]) * step[n, h] // 4096 + base[n, h]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

LARGEST = 127.0
MOST_INPUT = {1: LARGEST, 2: 32639.0}  # by input_bytes; 32,639 = 127 * 256 + 127, so that both bytes are signed
SMALLEST = 2.0**-100  # blocks up to this magnitude become 0, because 127 / a tiny number overflows float32
SIGN_BIT = 128
LEAST_HADAMARD, MOST_HADAMARD, MOST_BLOCK = 32, 64, 256
MOST_CODED_BLOCK = 640  # float32 holds 640 * 128 * 128 exactly, and half a tile fits a cache
CODE_BLOCK, CODE_UNIT, STEP_UNIT, MOST_CODE, MOST_STEP, MOST_NUDGE = 32, 256, 16, 15, 255, 255
MOST_WEIGHT = 126  # of codes, in scales; rounding adds at most 1.5
TINY = torch.finfo(torch.float32).tiny
AT_ONCE = 1 << 18  # numbers that fit into caches


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """`block`: weights per scale. `half_scales`: scales and lows are float16, not float32. `hadamard`: size of H.
    `input_bytes`: of x's integers. `in_codes`: weights have Codes."""

    name: str
    bits: int  # 4 or 8
    zero: int
    has_low: bool = False
    half_scales: bool = True
    block: int = 32
    hadamard: int = 1
    input_bytes: int = 1
    in_codes: bool = False

    @property
    def bytes_per_weight(self) -> float:
        numbers = 0.5 + 3 / CODE_BLOCK if self.in_codes else self.bits / 8
        return numbers + (1 + self.has_low) * (2 if self.half_scales else 4) / self.block


def int8_format(num_inputs: int) -> BlockFormat | None:
    """Return the format of `--weight-dtype int8`, or None if no block fits."""
    size = math.gcd(num_inputs, MOST_HADAMARD)
    if size < LEAST_HADAMARD:
        return None
    block = _longest(num_inputs, size, MOST_BLOCK)
    return BlockFormat("int8", 8, SIGN_BIT, half_scales=False, block=block, hadamard=size)


def _longest(num_inputs: int, unit: int, most: int) -> int:
    return max(length for length in range(unit, most + 1, unit) if num_inputs % length == 0)


def codes_format(num_inputs: int, in_codes: bool) -> BlockFormat | None:
    """Return the format of `--weight-dtype codes`, for 4-bit weights or others, or None if no block fits."""
    form = int8_format(num_inputs)
    if form is None:
        return None
    if in_codes:
        form = replace(form, block=_longest(num_inputs, form.hadamard, MOST_CODED_BLOCK))
    return replace(form, name="codes", hadamard=1, input_bytes=2, in_codes=in_codes)


@dataclass(frozen=True, slots=True)
class Codes:
    """4-bit codes for bytes (N, K). The other tensors are (N, K / CODE_BLOCK). All are uint8."""

    codes: torch.Tensor
    steps: torch.Tensor
    nudges: torch.Tensor
    bases: torch.Tensor

    def numbers(self) -> torch.Tensor:
        """Return (N, K) uint8."""
        finer = self.codes.int().unflatten(1, (-1, CODE_BLOCK)) * CODE_UNIT + self.nudges[..., None]
        products: torch.Tensor = finer * self.steps[..., None] // (CODE_UNIT * STEP_UNIT)
        return (products + self.bases[..., None]).to(torch.uint8).flatten(1)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.codes, self.steps, self.nudges, self.bases


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """A matrix (N outputs, K inputs)."""

    format: BlockFormat
    numbers: torch.Tensor  # (N, K) uint8
    scales: torch.Tensor  # (N, K / block) float32
    lows: torch.Tensor | None = None  # (N, K / block) float32, if the format has them
    codes: Codes | None = None  # of `numbers`

    @property
    def shape(self) -> tuple[int, int]:
        return self.numbers.shape[0], self.numbers.shape[1]

    def take_rows(self, rows: torch.Tensor | slice) -> BlockWeights:
        return self._each(lambda values: values[rows])

    def to(self, device: torch.device) -> BlockWeights:
        return self._each(lambda values: values.to(device))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> BlockWeights:
        lows = None if self.lows is None else change(self.lows)
        codes = None if self.codes is None else Codes(*map(change, self.codes.tensors()))
        return BlockWeights(self.format, change(self.numbers), change(self.scales), lows, codes)


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
    """Quantize (N, K) floats to an int8_format or codes_format."""
    rows_at_once = max(1, AT_ONCE // weight.shape[1])
    return concatenate([_quantized(rows, form) for rows in weight.split(rows_at_once)])


def _quantized(weight: torch.Tensor, form: BlockFormat) -> BlockWeights:
    blocks = (hadamard(weight.float(), form.hadamard) / form.hadamard).unflatten(1, (-1, form.block))
    largest = blocks.abs().amax(dim=2)
    scales = largest / torch.full_like(largest, LARGEST)
    unit = blocks / scales.clamp(min=TINY)[..., None]
    return BlockWeights(form, unit.round_().add_(SIGN_BIT).to(torch.uint8).flatten(1), scales)


def has_codes(form: BlockFormat | None) -> bool:
    """Return whether codes can stand for the numbers."""
    return form is not None and form.bits == 4 and form.block == CODE_BLOCK


def mean_bytes_per_weight(matrices: Iterable[tuple[int, BlockFormat | None]], plain_bytes: float) -> float:
    """`matrices`: each one's number of weights, and its format (None: plain numbers)."""
    found = list(matrices)
    total = sum(size * (plain_bytes if form is None else form.bytes_per_weight) for size, form in found)
    return total / sum(size for size, _ in found)


def recode(weight: BlockWeights, form: BlockFormat) -> BlockWeights:
    """Turn a file's 4-bit blocks (N, K) into codes."""
    rows_at_once = max(1, AT_ONCE // weight.shape[1])
    starts = range(0, weight.shape[0], rows_at_once)
    return concatenate([_recoded(weight.take_rows(slice(start, start + rows_at_once)), form) for start in starts])


def _recoded(weight: BlockWeights, form: BlockFormat) -> BlockWeights:
    """Replace the line of each 32 weights by one in bytes that keeps their mean. Falling lines are turned."""
    per_scale, own = form.block // CODE_BLOCK, weight.scales.abs()
    ends = [_values_of(weight, torch.full_like(own, code)).abs() for code in (0, MOST_CODE)]
    least = torch.maximum(torch.maximum(*ends) / MOST_WEIGHT, own * (STEP_UNIT / MOST_STEP))
    scales = least.unflatten(1, (-1, per_scale)).amax(dim=2)
    wide = scales.repeat_interleave(per_scale, dim=1).clamp(min=TINY)
    steps = (own / wide * STEP_UNIT).round().clamp(max=MOST_STEP)
    numbers = weight.numbers.unflatten(1, (-1, CODE_BLOCK))
    codes = torch.where(weight.scales[..., None] < 0, MOST_CODE - numbers, numbers)
    mean = _values_of(weight, _means(numbers)) / wide + form.zero
    starts = mean + 0.5 - _means(codes) * (steps / STEP_UNIT)  # the half: numbers are rounded down
    nudged = (steps * (MOST_NUDGE / CODE_UNIT / STEP_UNIT)).clamp(max=1)  # at most
    bases = (starts + torch.where(steps > 0, (1 - nudged) / 2, 0)).floor()
    nudges = ((starts - bases) * (CODE_UNIT * STEP_UNIT) / steps.clamp(min=1)).round().clamp(0, MOST_NUDGE)
    made = Codes(codes.flatten(1), *(values.to(torch.uint8) for values in (steps, nudges, bases)))
    return BlockWeights(form, made.numbers(), scales, codes=made)


def _values_of(weight: BlockWeights, numbers: torch.Tensor) -> torch.Tensor:
    """Return the weights that one number for each scale stands for."""
    values = (numbers - weight.format.zero) * weight.scales
    return values if weight.lows is None else values + weight.lows


def _means(numbers: torch.Tensor) -> torch.Tensor:
    """Return exact means of the last dimension, the same on all processors."""
    sums: torch.Tensor = numbers.sum(dim=-1, dtype=torch.int32)
    return sums.float() / CODE_BLOCK


def concatenate(parts: list[BlockWeights]) -> BlockWeights:
    """Concatenate weights along their outputs."""
    if len(parts) == 1:
        return parts[0]
    if len({part.format for part in parts}) > 1:
        block = min(part.format.block for part in parts)
        parts = [_widened(part, block) for part in parts]
    lows = [part.lows for part in parts if part.lows is not None]
    codes = [part.codes for part in parts if part.codes is not None]
    return BlockWeights(
        parts[0].format,
        torch.cat([part.numbers for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(lows) if lows else None,
        Codes(*map(torch.cat, zip(*(part.tensors() for part in codes), strict=True))) if codes else None,
    )


def _widened(part: BlockWeights, block: int) -> BlockWeights:
    """Return the same weights as bytes, with a `zero` of 0, float32 scales, and lows that include the old `zero`."""
    assert part.format.hadamard == part.format.input_bytes == 1
    wide = BlockFormat("mixed", 8, 0, has_low=True, half_scales=False, block=block)
    repeats = part.format.block // wide.block
    lows = -part.format.zero * part.scales
    if part.lows is not None:
        lows = lows + part.lows
    scales, lows = (values.repeat_interleave(repeats, dim=1) for values in (part.scales, lows))
    return BlockWeights(wide, part.numbers, scales, lows)


def quantize_rows(x: torch.Tensor, form: BlockFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x (M, K) to integers (M, K) int16, with units (M, K / block) float32."""
    blocks = x.float().unflatten(1, (-1, form.block))
    largest = blocks.abs().amax(dim=2)
    largest = torch.where(largest <= SMALLEST, 0.0, largest)
    # torch would not divide by a plain number, but multiply by its reciprocal
    most = torch.full_like(largest, MOST_INPUT[form.input_bytes])
    inverse = torch.where(largest == 0, 0.0, most / largest)
    return (blocks * inverse[..., None]).round().to(torch.int16).flatten(1), largest / most


def product(x: torch.Tensor, weight: BlockWeights, bias: torch.Tensor) -> torch.Tensor:
    """Return y (M, N) float32 for x (M, K) of any float dtype and bias (N,) float32."""
    block = weight.format.block
    data, units = quantize_rows(hadamard(x.float(), weight.format.hadamard), weight.format)
    rows = data.double().unflatten(1, (-1, block)).transpose(0, 1)  # (G, M, block) float64: sums are exact
    numbers = (weight.numbers.double() - weight.format.zero).unflatten(1, (-1, block)).transpose(0, 1)
    total = bias.float().expand(len(x), -1)
    for g, (row, number) in enumerate(zip(rows, numbers, strict=True)):
        scale = weight.scales[:, g] * units[:, g, None]
        total = fma((row @ number.T).float(), scale, total)
        if weight.lows is not None:
            total = fma(row.sum(dim=1, keepdim=True).float() * units[:, g, None], weight.lows[:, g], total)
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
