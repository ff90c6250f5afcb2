"""Noise without a generator: hash(seed, position, token id) -> Gumbel.

Only additions, multiplications, divisions and bit operations are used, each rounded as IEEE float32, in a fixed order.
So Python, torch, numba, all devices and all vector widths agree bit for bit. Logarithm and exponential are our own,
because libraries differ in the last bit, which decides ties.

    (seed low, seed high, position) --> two 32-bit row keys --(token id)--> 23 bits --> u in (0, 1) --> -log(-log(u))
"""

from __future__ import annotations

import numpy as np
import torch

MASK32 = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
MULTIPLIER_A = 0x7FEB352D
MULTIPLIER_B = 0x846CA68B
NOISE_BITS = 23
WEIGHT_BITS = 40  # weights are integers in units of 2^-40 of the largest weight, so sums are exact
EXP_FLOOR = -60.0  # the weight of smaller numbers is 0 anyway

HALF_ROOT = 0x3F3504F3  # bits of sqrt(1/2), the smallest mantissa
LN2 = float(np.float32(0.6931471805599453))
LN2_HIGH = 0.693359375  # log(2) in 9 bits, so its product with a small integer is exact
LN2_LOW = float(np.float32(0.6931471805599453 - 0.693359375))
LOG2E = float(np.float32(1.4426950408889634))
ATANH = tuple(float(np.float32(1 / k)) for k in (3, 5, 7, 9))
TAYLOR = tuple(float(np.float32(1 / k)) for k in (2, 6, 24, 120, 720, 5040))


# --- Python: the definition, on plain ints --------------------------------------------------------------------------


def mix32(value: int) -> int:
    """Mix 32 bits, as a bijection."""
    value ^= value >> 16
    value = value * MULTIPLIER_A & MASK32
    value ^= value >> 15
    value = value * MULTIPLIER_B & MASK32
    return value ^ (value >> 16)


def row_keys(seed: int, position: int) -> tuple[int, int]:
    """Return keys for the token drawn at `position`."""
    key = mix32((position * GOLDEN + 1) & MASK32)
    first = mix32((mix32(key ^ (seed & MASK32)) + (seed >> 32 & MASK32)) & MASK32)
    return first, mix32(first ^ key ^ GOLDEN)


def noise_bits(first: int, second: int, token_id: int) -> int:
    value = (token_id * GOLDEN & MASK32) ^ first
    value = (value ^ (value >> 16)) * MULTIPLIER_A & MASK32
    value = ((value ^ (value >> 15)) + second & MASK32) * MULTIPLIER_B & MASK32
    return (value ^ (value >> 16)) >> (32 - NOISE_BITS)


# --- torch: the same operations on tensors of any device ------------------------------------------------------------


def torch_mix32(value: torch.Tensor) -> torch.Tensor:
    """Take and return int32 bit patterns. Products wrap; a mask makes right shifts logical."""
    value = (value ^ _shift(value, 16)) * _signed(MULTIPLIER_A)
    value = (value ^ _shift(value, 15)) * _signed(MULTIPLIER_B)
    return value ^ _shift(value, 16)


def torch_row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two (E,) int32 keys for positions (E,) int64 and seeds (E,) int64 (bit patterns)."""
    low, high = seeds.to(torch.int32), (seeds >> 32).to(torch.int32)
    key = torch_mix32(positions.to(torch.int32) * _signed(GOLDEN) + 1)
    first = torch_mix32(torch_mix32(key ^ low) + high)
    return first, torch_mix32(first ^ key ^ _signed(GOLDEN))


def torch_noise_bits(first: torch.Tensor, second: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return (E, V) int32 below 2^23 for keys (E, 1) and ids (V,), both int32."""
    value = (token_ids * _signed(GOLDEN)) ^ first
    value = (value ^ _shift(value, 16)) * _signed(MULTIPLIER_A)
    value = ((value ^ _shift(value, 15)) + second) * _signed(MULTIPLIER_B)
    return _shift(value ^ _shift(value, 16), 32 - NOISE_BITS)


def torch_log(value: torch.Tensor) -> torch.Tensor:
    shifted = value.view(torch.int32) - HALF_ROOT
    exponent = shifted >> 23
    part = ((shifted & 0x7FFFFF) + HALF_ROOT).view(torch.float32) - 1.0
    s = part / (part + 2.0)
    z = s * s
    series = ((z * ATANH[3] + ATANH[2]) * z + ATANH[1]) * z + ATANH[0]
    double = s + s
    return exponent.to(torch.float32) * LN2 + (double + double * z * series)


def torch_exp(value: torch.Tensor) -> torch.Tensor:
    value = value.clamp(min=EXP_FLOOR)
    power = torch.floor(value * LOG2E + 0.5)
    rest = (value - power * LN2_HIGH) - power * LN2_LOW
    series = rest * TAYLOR[5] + TAYLOR[4]
    for coefficient in TAYLOR[3::-1]:
        series = series * rest + coefficient
    total = series * rest * rest + rest + 1.0
    return total * ((power.to(torch.int32) + 127) << 23).view(torch.float32)


def torch_weight(value: torch.Tensor) -> torch.Tensor:
    return (torch_exp(value) * 2.0**WEIGHT_BITS).to(torch.int64)


def torch_gumbel(bits: torch.Tensor) -> torch.Tensor:
    return -torch_log(-torch_log((bits.to(torch.float32) + 0.5) * 2.0**-NOISE_BITS))


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def _shift(value: torch.Tensor, num_bits: int) -> torch.Tensor:
    return (value >> num_bits) & ((1 << (32 - num_bits)) - 1)
