"""Noise without a generator: hash(seed, position, token id) -> Gumbel, the same bits in Python, numba and torch.

Only additions, multiplications, divisions and bit operations are used, each rounded as IEEE float32 asks for, in a
fixed order: so every implementation (and every device) gets the same bits, whatever the width of its vectors. The
logarithm and the exponential are therefore ours: libraries differ in the last bit, and the last bit decides a tie.

    (seed low, seed high, position) --> two 32-bit row keys --(token id)--> 23 bits --> u in (0, 1) --> -log(-log(u))

23 bits and not 24: (2^24 - 1 + .5) / 2^24 rounds to 1.0 in float32, and noise would be infinite once in 2^24.
Knows nothing of requests or logits.
"""

from __future__ import annotations

import numpy as np
import torch

from shared.kernel.jit import bits_of, float_of, kernel

MASK32 = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
MULTIPLIER_A = 0x7FEB352D
MULTIPLIER_B = 0x846CA68B
NOISE_BITS = 23
WEIGHT_BITS = 40  # a probability weight is an integer in units of 2^-40 of the largest: sums have no order
EXP_FLOOR = -60.0  # below it a weight is 0 anyway

_HALF_ROOT = 0x3F3504F3  # bits of sqrt(1/2): mantissas are brought to [sqrt(1/2), sqrt(2))
_LN2 = float(np.float32(0.6931471805599453))
_LN2_HIGH = 0.693359375  # 9 bits: its product with a small integer is exact
_LN2_LOW = float(np.float32(0.6931471805599453 - 0.693359375))
_LOG2E = float(np.float32(1.4426950408889634))
_ATANH = tuple(float(np.float32(1 / k)) for k in (3, 5, 7, 9))
_TAYLOR = tuple(float(np.float32(1 / k)) for k in (2, 6, 24, 120, 720, 5040))


# --- Python: the definition, on plain ints --------------------------------------------------------------------------


def mix32(value: int) -> int:
    """A bijection of 32 bits in which every input bit moves every output bit."""
    value ^= value >> 16
    value = value * MULTIPLIER_A & MASK32
    value ^= value >> 15
    value = value * MULTIPLIER_B & MASK32
    return value ^ (value >> 16)


def row_keys(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys of one sampled token. `position` is that of the token being drawn."""
    key = mix32((position * GOLDEN + 1) & MASK32)
    first = mix32((mix32(key ^ (seed & MASK32)) + (seed >> 32 & MASK32)) & MASK32)
    return first, mix32(first ^ key ^ GOLDEN)


def noise_bits(first: int, second: int, token_id: int) -> int:
    """The 23 bits of one token id under one row's keys."""
    value = (token_id * GOLDEN & MASK32) ^ first
    value = (value ^ (value >> 16)) * MULTIPLIER_A & MASK32
    value = ((value ^ (value >> 15)) + second & MASK32) * MULTIPLIER_B & MASK32
    return (value ^ (value >> 16)) >> (32 - NOISE_BITS)


# --- numba: scalars that LLVM inlines and vectorises ----------------------------------------------------------------


exact = kernel(fastmath=False)  # floats are never reordered or fused: bits are the contract

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
    """log of a positive normal float32, within 2 units in the last place: log(2^e m) = e log 2 + 2 atanh(s)."""
    shifted = _i32(_i32(bits_of(value)) - _i32(_HALF_ROOT))
    exponent = _i32(shifted >> _i32(23))
    mantissa = float_of(_u32(_i32(_i32(shifted & _i32(0x7FFFFF)) + _i32(_HALF_ROOT))))
    part = _f32(mantissa - _f32(1))
    s = _f32(part / _f32(_f32(2) + part))
    z = _f32(s * s)
    series = _f32(_f32(_ATANH[3]) * z + _f32(_ATANH[2]))
    series = _f32(_f32(series * z) + _f32(_ATANH[1]))
    series = _f32(_f32(series * z) + _f32(_ATANH[0]))
    double = _f32(s + s)
    return _f32(_f32(_f32(exponent) * _f32(_LN2)) + _f32(double + _f32(_f32(double * z) * series)))


@exact
def nb_exp(value: np.float32) -> np.float32:
    """exp of a float32 <= 0, within 2 units in the last place; below EXP_FLOOR it stays at exp(EXP_FLOOR)."""
    value = max(value, _f32(EXP_FLOOR))
    power = _f32(np.floor(_f32(_f32(value * _f32(_LOG2E)) + _f32(0.5))))
    rest = _f32(_f32(value - _f32(power * _f32(_LN2_HIGH))) - _f32(power * _f32(_LN2_LOW)))
    series = _f32(_f32(_f32(_TAYLOR[5]) * rest) + _f32(_TAYLOR[4]))
    series = _f32(_f32(series * rest) + _f32(_TAYLOR[3]))
    series = _f32(_f32(series * rest) + _f32(_TAYLOR[2]))
    series = _f32(_f32(series * rest) + _f32(_TAYLOR[1]))
    series = _f32(_f32(series * rest) + _f32(_TAYLOR[0]))
    total = _f32(_f32(_f32(_f32(series * rest) * rest) + rest) + _f32(1))
    return _f32(total * float_of(_u32(_i32(_i32(_i32(power) + _i32(127)) << _i32(23)))))


@exact
def nb_weight(value: np.float32) -> np.int64:
    """exp(value <= 0) as an integer in units of 2^-WEIGHT_BITS."""
    return np.int64(_f32(nb_exp(value) * _f32(2.0**WEIGHT_BITS)))


@exact
def nb_gumbel(bits: np.int32) -> np.float32:
    """-log(-log(u)) at u = (bits + 1/2) / 2^23: from -2.82 to 16.64, never infinite."""
    uniform = _f32(_f32(_f32(bits) + _f32(0.5)) * _f32(2.0**-NOISE_BITS))
    return _f32(-nb_log(_f32(-nb_log(uniform))))


# --- torch: the same operations on tensors of any device ------------------------------------------------------------


def torch_mix32(value: torch.Tensor) -> torch.Tensor:
    """int32 bit patterns in and out; products wrap, and a shift right is made logical by a mask."""
    value = (value ^ _shift(value, 16)) * _signed(MULTIPLIER_A)
    value = (value ^ _shift(value, 15)) * _signed(MULTIPLIER_B)
    return value ^ _shift(value, 16)


def torch_row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(E,) int64 bit patterns of the seeds and (E,) int64 positions -> two (E,) int32 keys."""
    low, high = seeds.to(torch.int32), (seeds >> 32).to(torch.int32)
    key = torch_mix32(positions.to(torch.int32) * _signed(GOLDEN) + 1)
    first = torch_mix32(torch_mix32(key ^ low) + high)
    return first, torch_mix32(first ^ key ^ _signed(GOLDEN))


def torch_noise_bits(first: torch.Tensor, second: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Keys (E, 1) int32, ids (V,) int32 -> (E, V) int32 below 2^23."""
    value = (token_ids * _signed(GOLDEN)) ^ first
    value = (value ^ _shift(value, 16)) * _signed(MULTIPLIER_A)
    value = ((value ^ _shift(value, 15)) + second) * _signed(MULTIPLIER_B)
    return _shift(value ^ _shift(value, 16), 32 - NOISE_BITS)


def torch_log(value: torch.Tensor) -> torch.Tensor:
    shifted = value.view(torch.int32) - _HALF_ROOT
    exponent = shifted >> 23
    part = ((shifted & 0x7FFFFF) + _HALF_ROOT).view(torch.float32) - 1.0
    s = part / (part + 2.0)
    z = s * s
    series = ((z * _ATANH[3] + _ATANH[2]) * z + _ATANH[1]) * z + _ATANH[0]
    double = s + s
    return exponent.to(torch.float32) * _LN2 + (double + double * z * series)


def torch_exp(value: torch.Tensor) -> torch.Tensor:
    value = value.clamp(min=EXP_FLOOR)
    power = torch.floor(value * _LOG2E + 0.5)
    rest = (value - power * _LN2_HIGH) - power * _LN2_LOW
    series = rest * _TAYLOR[5] + _TAYLOR[4]
    for coefficient in _TAYLOR[3::-1]:
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
