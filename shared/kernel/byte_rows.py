"""Rounds rows of x to bytes, as block_weights.py defines them.

    a row:  [K bytes][depth int32: starts][depth float32: units][depth float32: unit * sum of the block's bytes], padded

`depth` is the number of blocks. A block's integer sum in the product begins at `start` = -zero * (sum of the block's
bytes), with the `zero` of the weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from shared.kernel.block_weights import LARGEST, SMALLEST
from shared.kernel.jit import emit_call, emit_for_floats, emitted_for_constants
from shared.kernel.product import COLUMNS, FLOAT, LONG, STEPS, SUMS, WORD, read_at, spread, write_at
from shared.kernel.scratch import LINE_BYTES

EXTRA_BYTES = 12  # bytes per block, in addition to its numbers
ROUNDING = 12582912.0  # 1.5 * 2^23: adding and subtracting it rounds to nearest, ties to even
SMALLEST_BITS = int(np.float32(SMALLEST).view(np.uint32))
BYTES, HALVES = (ir.VectorType(ir.IntType(bits), COLUMNS) for bits in (8, 16))


def row_bytes_of(num_inputs: int, block: int) -> int:
    """Return whole cache lines, which AMX reads."""
    needed = num_inputs + num_inputs // block * EXTRA_BYTES
    return -(-needed // LINE_BYTES) * LINE_BYTES


@emitted_for_constants
def round_block(
    typing_context: Any, block: Any, size: Any, zero: Any, is_half: Any, x: Any, data: Any, start: Any, unit: Any,
    total: Any,
) -> Any:  # fmt: skip
    """Emit code that multiplies one block of a row by Hadamard matrices of this size, and rounds it.

    Constants: block, size, zero, is_half. Addresses: x (read, bfloat16 or float32); data, start, unit, total (written).
    """
    if not all(isinstance(constant, types.Literal) for constant in (block, size, zero, is_half)):
        raise TypeError("block, size, zero and is_half must be constants")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, _, _, x_at, data_at, start_at, unit_at, sum_at = args
        code = Rounding(builder)
        read = code.read(x_at, block.literal_value // COLUMNS, is_half.literal_value)
        mixed = emit_hadamard(builder, [builder.bitcast(number, SUMS) for number in read], size.literal_value)
        numbers = [builder.bitcast(number, STEPS) for number in mixed]
        code.write(numbers, zero.literal_value, data_at, start_at, unit_at, sum_at)
        return context.get_dummy_value()

    return types.void(block, size, zero, is_half, *(types.int64,) * 5), codegen


def emit_hadamard(builder: Any, numbers: list[Any], size: int) -> list[Any]:
    """As block_weights.hadamard. `numbers`: vectors of 16 float32."""
    floats, apart = list(numbers), size // 2
    while apart >= COLUMNS:
        step = apart // COLUMNS
        for first in (n for n in range(len(floats)) if not n & step):
            left, right = floats[first], floats[first + step]
            floats[first], floats[first + step] = builder.fadd(left, right), builder.fsub(left, right)
        apart //= 2
    while apart:
        floats = [_hadamard_lanes(builder, number, apart) for number in floats]
        apart //= 2
    return floats


def _hadamard_lanes(builder: Any, number: Any, apart: int) -> Any:
    """Return sums with, or differences from, lanes `apart` away."""
    lanes = range(COLUMNS)
    other = builder.shuffle_vector(number, number, ir.Constant(STEPS, [lane ^ apart for lane in lanes]))
    signs = ir.Constant(SUMS, [-1.0 if lane & apart else 1.0 for lane in lanes])
    return emit_for_floats(builder, "llvm.fma", number, signs, other)


def _words(value: int) -> Any:
    return ir.Constant(STEPS, [value] * COLUMNS)


class Rounding:
    """Numbers of x are vectors of 16 float32 bit patterns."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder

    def read(self, x_at: Any, count: int, is_half: bool) -> list[Any]:
        build = self._builder
        if not is_half:
            return [read_at(build, x_at, LONG(4 * COLUMNS * n), STEPS) for n in range(count)]
        places = [build.inttoptr(build.add(x_at, LONG(2 * COLUMNS * n)), HALVES.as_pointer()) for n in range(count)]
        return [build.shl(build.zext(build.load(place, align=2), STEPS), _words(16)) for place in places]

    def write(self, numbers: list[Any], zero: int, data_at: Any, start_at: Any, unit_at: Any, sum_at: Any) -> None:
        """Write one block. Arguments as round_block's."""
        build = self._builder
        peak, inverse = self.peak(numbers)
        total = _words(0)
        for n, number in enumerate(numbers):
            whole = self.rounded(number, inverse)
            total = build.add(total, whole)
            write_at(build, build.add(data_at, LONG(COLUMNS * n)), build.trunc(whole, BYTES))
        added = emit_call(build, "llvm.vector.reduce.add.v16i32", WORD, [total])
        scale = build.fdiv(peak, FLOAT(LARGEST))
        write_at(build, start_at, build.mul(added, WORD(-zero)))
        write_at(build, unit_at, scale)
        write_at(build, sum_at, build.fmul(scale, build.sitofp(added, FLOAT)))

    def peak(self, numbers: list[Any]) -> tuple[Any, Any]:
        """Return the largest magnitude (float32), and a vector of 127 / that magnitude.

        Magnitudes sort like their bits."""
        build = self._builder
        magnitudes = [build.and_(number, _words(0x7FFFFFFF)) for number in numbers]
        top = magnitudes[0]
        for other in magnitudes[1:]:
            top = build.select(build.icmp_unsigned(">", other, top), other, top)
        bits = emit_call(build, "llvm.vector.reduce.umax.v16i32", WORD, [top])
        is_seen = build.icmp_unsigned(">", bits, WORD(SMALLEST_BITS))
        peak = build.select(is_seen, build.bitcast(bits, FLOAT), FLOAT(0.0))
        inverse = build.select(is_seen, build.fdiv(FLOAT(LARGEST), peak), FLOAT(0.0))
        return peak, build.bitcast(spread(build, build.bitcast(inverse, WORD)), SUMS)

    def rounded(self, number: Any, inverse: Any) -> Any:
        build, big = self._builder, ir.Constant(SUMS, [ROUNDING] * COLUMNS)
        scaled = build.fmul(build.bitcast(number, SUMS), inverse)
        return build.fptosi(build.fsub(build.fadd(scaled, big), big), STEPS)
