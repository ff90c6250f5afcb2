"""shared/kernel/sampling/noise.py for Triton's kernels, bit for bit.

Divisions use `div_rn`, because Triton's own `/` is approximate. The launcher forbids fusing a product and a sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shared.kernel.sampling import noise

GOLDEN = tl.constexpr(noise.GOLDEN)
MULTIPLIER_A = tl.constexpr(noise.MULTIPLIER_A)
MULTIPLIER_B = tl.constexpr(noise.MULTIPLIER_B)
UNUSED_BITS = tl.constexpr(32 - noise.NOISE_BITS)
NOISE_UNIT = tl.constexpr(2.0**-noise.NOISE_BITS)
WEIGHT_ONE = tl.constexpr(2.0**noise.WEIGHT_BITS)
WEIGHT_UNIT = tl.constexpr(2.0**-noise.WEIGHT_BITS)
EXP_FLOOR = tl.constexpr(noise.EXP_FLOOR)
HALF_ROOT = tl.constexpr(noise.HALF_ROOT)
LN2 = tl.constexpr(noise.LN2)
LN2_HIGH = tl.constexpr(noise.LN2_HIGH)
LN2_LOW = tl.constexpr(noise.LN2_LOW)
LOG2E = tl.constexpr(noise.LOG2E)
ATANH_3, ATANH_5, ATANH_7, ATANH_9 = (tl.constexpr(value) for value in noise.ATANH)
TAYLOR_2, TAYLOR_3, TAYLOR_4, TAYLOR_5, TAYLOR_6, TAYLOR_7 = (tl.constexpr(value) for value in noise.TAYLOR)


@triton.jit
def mix32(value):
    """uint32 -> uint32"""
    value = (value ^ (value >> 16)) * MULTIPLIER_A
    value = (value ^ (value >> 15)) * MULTIPLIER_B
    return value ^ (value >> 16)


@triton.jit
def row_keys(seed, position):
    """Return two uint32 keys for a seed (int64 bits) and the drawn token's position (int64)."""
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    key = mix32(position.to(tl.uint32) * GOLDEN + 1)
    first = mix32(mix32(key ^ low) + high)
    return first, mix32(first ^ key ^ GOLDEN)


@triton.jit
def noise_bits(first, second, token_ids):
    """Return each id's noise, int32 below 2^23."""
    value = (token_ids.to(tl.uint32) * GOLDEN) ^ first
    value = (value ^ (value >> 16)) * MULTIPLIER_A
    value = ((value ^ (value >> 15)) + second) * MULTIPLIER_B
    return ((value ^ (value >> 16)) >> UNUSED_BITS).to(tl.int32)


@triton.jit
def log(value):
    """value: positive normal float32."""
    shifted = value.to(tl.int32, bitcast=True) - HALF_ROOT
    exponent = shifted >> 23
    part = ((shifted & 0x7FFFFF) + HALF_ROOT).to(tl.float32, bitcast=True) - 1.0
    s = tl.math.div_rn(part, part + 2.0)
    z = s * s
    series = ((z * ATANH_9 + ATANH_7) * z + ATANH_5) * z + ATANH_3
    double = s + s
    return exponent.to(tl.float32) * LN2 + (double + double * z * series)


@triton.jit
def exp(value):
    """value: float32 <= 0."""
    value = tl.maximum(value, EXP_FLOOR)
    power = tl.floor(value * LOG2E + 0.5)
    rest = (value - power * LN2_HIGH) - power * LN2_LOW
    series = rest * TAYLOR_7 + TAYLOR_6
    series = series * rest + TAYLOR_5
    series = series * rest + TAYLOR_4
    series = series * rest + TAYLOR_3
    series = series * rest + TAYLOR_2
    total = series * rest * rest + rest + 1.0
    return total * ((power.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def weight(value):
    """Return exp(value) as int64 in units of 2^-40, so that sums are exact. value: <= 0."""
    return (exp(value) * WEIGHT_ONE).to(tl.int64)


@triton.jit
def log_mass(mass):
    return log(mass.to(tl.float32) * WEIGHT_UNIT)


@triton.jit
def gumbel(bits):
    """Return -log(-log(u)) for u = (bits + 1/2) / 2^23."""
    return -log(-log((bits.to(tl.float32) + 0.5) * NOISE_UNIT))
