"""Rounds rows of x to integers, as block_weights.py defines them.

    a row:  [K integers][depth int32: starts][depth float32: units][float32: for each low, unit * sum of its integers],
            padded

`depth` is the number of blocks. A block's sum in the product begins at `start` = -zero * (sum of its integers), with
the `zero` of the weights. Integers have one byte (BYTES_ONLY), or two in one of two layouts:

    PLANES:   first the high bytes of the whole row, then the low ones; high * 256 + low, both signed
    PAIRS:    each eight integers in PAIR_ORDER
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from shared.kernel.block_weights import MOST_INPUT, SMALLEST
from shared.kernel.jit import emit_call, emit_for_floats, emitted_for_constants
from shared.kernel.product import COLUMNS, FLOAT, LONG, STEPS, SUMS, WORD, read_at, spread, write_at
from shared.kernel.scratch import LINE_BYTES

BYTES_ONLY, PLANES, PAIRS = range(3)  # layouts
PAIR_ORDER = (0, 2, 4, 6, 5, 7, 1, 3)  # as packed_codes.py packs them: each two are multiplied together
ROUNDING = 12582912.0  # 1.5 * 2^23: adding and subtracting it rounds to nearest, ties to even
SMALLEST_BITS = int(np.float32(SMALLEST).view(np.uint32))
BYTES, HALVES = (ir.VectorType(ir.IntType(bits), COLUMNS) for bits in (8, 16))


def row_bytes_of(num_inputs: int, block: int, low_block: int = 0, input_bytes: int = 1) -> int:
    """Return whole cache lines, which AMX reads. `low_block`: inputs per low; 0: a block."""
    needed = num_inputs * input_bytes + num_inputs // block * 8 + num_inputs // (low_block or block) * 4
    return -(-needed // LINE_BYTES) * LINE_BYTES


@emitted_for_constants
def round_block(
    typing_context: Any, block: Any, low_block: Any, size: Any, zero: Any, is_half: Any, layout: Any, x: Any, data: Any,
    second: Any, start: Any, unit: Any, totals: Any,
) -> Any:  # fmt: skip
    """Emit code that multiplies one block of a row by Hadamard matrices of this size, and rounds it.

    Constants: block to layout. Addresses: x (read, bfloat16 or float32); the others are written, `second` only with
    PLANES."""
    constants = block, low_block, size, zero, is_half, layout
    if not all(isinstance(constant, types.Literal) for constant in constants):
        raise TypeError("block, low_block, size, zero, is_half and layout must be constants")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, _, _, _, _, x_at, *places = args
        code = Rounding(builder)
        read = code.read(x_at, block.literal_value // COLUMNS, is_half.literal_value)
        mixed = emit_hadamard(builder, [builder.bitcast(number, SUMS) for number in read], size.literal_value)
        numbers = [builder.bitcast(number, STEPS) for number in mixed]
        code.write(numbers, low_block.literal_value, zero.literal_value, layout.literal_value, *places)
        return context.get_dummy_value()

    return types.void(*constants, *(types.int64,) * 6), codegen


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

    def write(
        self, numbers: list[Any], low_block: int, zero: int, layout: int, data_at: Any, second_at: Any, start_at: Any,
        unit_at: Any, totals_at: Any,
    ) -> None:  # fmt: skip
        """Write one block. Arguments as round_block's."""
        build, most = self._builder, FLOAT(MOST_INPUT[1 if layout == BYTES_ONLY else 2])
        peak, inverse = self.peak(numbers, most)
        whole = [self.rounded(number, inverse) for number in numbers]
        for n, integers in enumerate(whole):
            place = LONG(COLUMNS * n)
            if layout == PAIRS:
                write_at(build, build.add(data_at, LONG(2 * COLUMNS * n)), self._in_pairs(integers))
            elif layout == PLANES:
                high = build.ashr(build.add(integers, _words(128)), _words(8))
                write_at(build, build.add(data_at, place), build.trunc(high, BYTES))
                write_at(build, build.add(second_at, place), build.trunc(integers, BYTES))
            else:
                write_at(build, build.add(data_at, place), build.trunc(integers, BYTES))
        step, scale = low_block // COLUMNS, build.fdiv(peak, most)
        sums = [self._sum(whole[first : first + step]) for first in range(0, len(whole), step)]
        write_at(build, start_at, build.mul(functools.reduce(build.add, sums), WORD(-zero)))
        write_at(build, unit_at, scale)
        for n, added in enumerate(sums):
            write_at(build, build.add(totals_at, LONG(4 * n)), build.fmul(scale, build.sitofp(added, FLOAT)))

    def _in_pairs(self, integers: Any) -> Any:
        order = [first + place for first in range(0, COLUMNS, len(PAIR_ORDER)) for place in PAIR_ORDER]
        return self._builder.trunc(self._builder.shuffle_vector(integers, integers, ir.Constant(STEPS, order)), HALVES)

    def _sum(self, vectors: list[Any]) -> Any:
        total = functools.reduce(self._builder.add, vectors)
        return emit_call(self._builder, "llvm.vector.reduce.add.v16i32", WORD, [total])

    def peak(self, numbers: list[Any], most: Any) -> tuple[Any, Any]:
        """Return the largest magnitude (float32), and a vector of most / that magnitude.

        Magnitudes sort like their bits."""
        build = self._builder
        magnitudes = [build.and_(number, _words(0x7FFFFFFF)) for number in numbers]
        top = magnitudes[0]
        for other in magnitudes[1:]:
            top = build.select(build.icmp_unsigned(">", other, top), other, top)
        bits = emit_call(build, "llvm.vector.reduce.umax.v16i32", WORD, [top])
        is_seen = build.icmp_unsigned(">", bits, WORD(SMALLEST_BITS))
        peak = build.select(is_seen, build.bitcast(bits, FLOAT), FLOAT(0.0))
        inverse = build.select(is_seen, build.fdiv(most, peak), FLOAT(0.0))
        return peak, build.bitcast(spread(build, build.bitcast(inverse, WORD)), SUMS)

    def rounded(self, number: Any, inverse: Any) -> Any:
        build, big = self._builder, ir.Constant(SUMS, [ROUNDING] * COLUMNS)
        scaled = build.fmul(build.bitcast(number, SUMS), inverse)
        return build.fptosi(build.fsub(build.fadd(scaled, big), big), STEPS)
