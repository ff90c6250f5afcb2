"""Scalar versions of noise.py's functions, which LLVM inlines and vectorises."""

from __future__ import annotations

import numpy as np

from shared.kernel.code.jit import bits_of, float_of, kernel
from shared.kernel.sampling.noise import (
    ATANH,
    EXP_FLOOR,
    GOLDEN,
    HALF_ROOT,
    LN2,
    LN2_HIGH,
    LN2_LOW,
    LOG2E,
    MASK32,
    MULTIPLIER_A,
    MULTIPLIER_B,
    NOISE_BITS,
    TAYLOR,
    WEIGHT_BITS,
)

exact = kernel(fastmath=False)  # float operations are neither reordered nor fused

_f32 = np.float32
_u32 = np.uint32
_i32 = np.int32


@exact
def nb_mix32(value: np.uint32) -> np.uint32:
    value = _u32(value ^ (value >> _u32(16)))
    value = _u32(value * _u32(MULTIPLIER_A))
    value = _u32(value ^ (value >> _u32(15)))
    value = _u32(value * _u32(MULTIPLIER_B))
    return _u32(value ^ (value >> _u32(16)))


@exact
def nb_row_keys(seed: np.uint64, position: int) -> tuple[np.uint32, np.uint32]:
    low, high = _u32(seed & np.uint64(MASK32)), _u32(seed >> np.uint64(32))
    key = nb_mix32(_u32(_u32(_u32(position) * _u32(GOLDEN)) + _u32(1)))
    first = nb_mix32(_u32(nb_mix32(_u32(key ^ low)) + high))
    return first, nb_mix32(_u32(_u32(first ^ key) ^ _u32(GOLDEN)))


@exact
def nb_noise_bits(first: np.uint32, second: np.uint32, token_id: int) -> np.int32:
    value = _u32(_u32(_u32(token_id) * _u32(GOLDEN)) ^ first)
    value = _u32(_u32(value ^ (value >> _u32(16))) * _u32(MULTIPLIER_A))
    value = _u32(_u32(_u32(value ^ (value >> _u32(15))) + second) * _u32(MULTIPLIER_B))
    return _i32(_u32(value ^ (value >> _u32(16))) >> _u32(32 - NOISE_BITS))


@exact
def nb_log(value: np.float32) -> np.float32:
    """Return log of a positive normal float32, within 2 units in the last place."""
    shifted = _i32(_i32(bits_of(value)) - _i32(HALF_ROOT))
    exponent = _i32(shifted >> _i32(23))
    mantissa = float_of(_u32(_i32(_i32(shifted & _i32(0x7FFFFF)) + _i32(HALF_ROOT))))
    part = _f32(mantissa - _f32(1))
    s = _f32(part / _f32(_f32(2) + part))
    z = _f32(s * s)
    series = _f32(_f32(ATANH[3]) * z + _f32(ATANH[2]))
    series = _f32(_f32(series * z) + _f32(ATANH[1]))
    series = _f32(_f32(series * z) + _f32(ATANH[0]))
    double = _f32(s + s)
    return _f32(_f32(_f32(exponent) * _f32(LN2)) + _f32(double + _f32(_f32(double * z) * series)))


@exact
def nb_exp(value: np.float32) -> np.float32:
    """Return exp of a float32 <= 0, within 2 units in the last place. Below EXP_FLOOR return exp(EXP_FLOOR)."""
    value = max(value, _f32(EXP_FLOOR))
    power = _f32(np.floor(_f32(_f32(value * _f32(LOG2E)) + _f32(0.5))))
    rest = _f32(_f32(value - _f32(power * _f32(LN2_HIGH))) - _f32(power * _f32(LN2_LOW)))
    series = _f32(_f32(_f32(TAYLOR[5]) * rest) + _f32(TAYLOR[4]))
    series = _f32(_f32(series * rest) + _f32(TAYLOR[3]))
    series = _f32(_f32(series * rest) + _f32(TAYLOR[2]))
    series = _f32(_f32(series * rest) + _f32(TAYLOR[1]))
    series = _f32(_f32(series * rest) + _f32(TAYLOR[0]))
    total = _f32(_f32(_f32(_f32(series * rest) * rest) + rest) + _f32(1))
    return _f32(total * float_of(_u32(_i32(_i32(_i32(power) + _i32(127)) << _i32(23)))))


@exact
def nb_weight(value: np.float32) -> np.int64:
    """Return exp(value), value <= 0, as an integer in units of 2^-WEIGHT_BITS."""
    return np.int64(_f32(nb_exp(value) * _f32(2.0**WEIGHT_BITS)))


@exact
def nb_gumbel(bits: np.int32) -> np.float32:
    """Return -log(-log(u)) at u = (bits + 1/2) / 2^23: from -2.82 to 16.64."""
    uniform = _f32(_f32(_f32(bits) + _f32(0.5)) * _f32(2.0**-NOISE_BITS))
    return _f32(-nb_log(_f32(-nb_log(uniform))))
