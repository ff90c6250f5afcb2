"""Rows of x as bytes, as block_weights.py defines them, for the compiled product.

    a row:  [K bytes][depth starts, int32][depth units, float32][depth unit * sum of bytes, float32]

A start is what the block's integer sum begins with: what its weights' zero takes away.
"""

from __future__ import annotations

import numpy as np

from shared.kernel.block_weights import LARGEST
from shared.kernel.jit import bits_of, bytes_at, float_of, floats_at, inlined_exactly, ints_at, load

EXTRA_BYTES = 12  # of a block, besides its bytes
ROUNDING = 12582912.0  # 1.5 * 2^23: adding and taking it away rounds to the nearest integer, ties to even
_f32, _i32, _u32 = np.float32, np.int32, np.uint32


def row_bytes_of(num_inputs: int, block: int) -> int:
    """What a row of x takes."""
    return num_inputs + num_inputs // block * EXTRA_BYTES


@inlined_exactly
def round_row(x: int, row: int, depth: int, block: int, zero: int, is_half: bool) -> None:
    """From address x, bfloat16 or float32, to address `row`. `block`, `zero` and `is_half` must be constants."""
    extra = row + depth * block
    bytes_out, starts = bytes_at(row), ints_at(extra)
    units, sums = floats_at(extra + depth * 4), floats_at(extra + depth * 8)
    for g in range(depth):
        top = _u32(0)
        for k in range(block):
            magnitude = _u32(bits_of(load(x, g * block + k, is_half)) & _u32(0x7FFFFFFF))
            top = max(top, magnitude)  # bits of magnitudes are ordered as these are, and integers vectorise
        peak = float_of(top)
        inverse = _f32(LARGEST) / peak if top > _u32(0) else _f32(0.0)
        total = _i32(0)
        for k in range(block):
            byte = _i32((load(x, g * block + k, is_half) * inverse + _f32(ROUNDING)) - _f32(ROUNDING))
            bytes_out[g * block + k] = byte
            total += byte
        starts[g] = _i32(-zero) * total
        units[g] = peak / _f32(LARGEST)
        sums[g] = units[g] * _f32(total)
