"""Rounds rows of x to integers, as block_weights.py defines them.

    a row:  [integers][depth int32: starts][depth float32: units][depth words: extras], padded

`depth` is the number of blocks. A block's sum in the product begins at `start` = -zero * (sum of its integers), with
the `zero` of the weights. Layouts:

    BYTES_ONLY:   integers of one byte; extras: unit * sum
    PLANES:       of two, high * 256 + low, both signed: the row's high bytes and starts, then the low ones, as extras
    PAIRS:        for each CODE_BLOCK: each eight in PAIR_ORDER, then sum // 32 and sum % 32; else only units
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from shared.kernel.code.jit import emit_call, emit_for_floats, emitted_for_constants
from shared.kernel.code.scratch import LINE_BYTES
from shared.kernel.product.block_weights import CODE_BLOCK, MOST_INPUT, SMALLEST
from shared.kernel.product.product import COLUMNS, FLOAT, LONG, STEPS, SUMS, WORD, read_at, spread, write_at

BYTES_ONLY, PLANES, PAIRS = range(3)  # layouts
PAIR_ORDER = (0, 2, 1, 3, 4, 6, 5, 7)  # as packed_codes.py packs them: each two are multiplied together
CODED_INPUTS_BYTES = 2 * CODE_BLOCK + 4
ROUNDING = 12582912.0  # 1.5 * 2^23: adding and subtracting it rounds to nearest, ties to even
SMALLEST_BITS = int(np.float32(SMALLEST).view(np.uint32))
BYTES, HALVES = (ir.VectorType(ir.IntType(bits), COLUMNS) for bits in (8, 16))


def data_bytes_of(block: int, input_bytes: int, in_codes: bool) -> int:
    """Return the bytes of one block's integers; with codes, of PAIRS."""
    return block // CODE_BLOCK * CODED_INPUTS_BYTES if in_codes else block * input_bytes


def row_bytes_of(num_inputs: int, block: int, input_bytes: int = 1, in_codes: bool = False) -> int:
    """Return whole cache lines, which AMX reads."""
    needed = num_inputs // block * (data_bytes_of(block, input_bytes, in_codes) + 12)
    return -(-needed // LINE_BYTES) * LINE_BYTES


@emitted_for_constants
def round_block(
    typing_context: Any, block: Any, size: Any, zero: Any, is_half: Any, layout: Any, x: Any, data: Any,
    low_data: Any, start: Any, unit: Any, total: Any,
) -> Any:  # fmt: skip
    """Emit code that multiplies one block of a row by Hadamard matrices of this size, and rounds it.

    Constants: block to layout. Addresses: x (read, bfloat16 or float32); the others are written, `low_data` only with
    PLANES."""
    constants = block, size, zero, is_half, layout
    if not all(isinstance(constant, types.Literal) for constant in constants):
        raise TypeError("block, size, zero, is_half and layout must be constants")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, _, _, _, x_at, *places = args
        code = Rounding(builder)
        read = code.read(x_at, block.literal_value // COLUMNS, is_half.literal_value)
        mixed = emit_hadamard(builder, [builder.bitcast(number, SUMS) for number in read], size.literal_value)
        numbers = [builder.bitcast(number, STEPS) for number in mixed]
        code.write(numbers, zero.literal_value, layout.literal_value, *places)
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
        self, numbers: list[Any], zero: int, layout: int, data_at: Any, low_data_at: Any, start_at: Any,
        unit_at: Any, total_at: Any,
    ) -> None:  # fmt: skip
        """Write one block. Arguments as round_block's."""
        build, most = self._builder, FLOAT(MOST_INPUT[1 if layout == BYTES_ONLY else 2])
        peak, inverse = self.peak(numbers, most)
        whole = [self.rounded(number, inverse) for number in numbers]
        scale = build.fdiv(peak, most)
        write_at(build, unit_at, scale)
        if layout == PAIRS:
            self._write_pairs(whole, data_at)
            return
        total = self._sum(whole)
        if layout == BYTES_ONLY:
            for n, integers in enumerate(whole):
                write_at(build, data_at, build.trunc(integers, BYTES), num_bytes=COLUMNS * n)
            write_at(build, start_at, build.mul(total, WORD(-zero)))
            write_at(build, total_at, build.fmul(scale, build.sitofp(total, FLOAT)))
            return
        highs = [build.ashr(build.add(integers, _words(128)), _words(8)) for integers in whole]
        for n, (integers, high) in enumerate(zip(whole, highs, strict=True)):
            write_at(build, data_at, build.trunc(high, BYTES), num_bytes=COLUMNS * n)
            write_at(build, low_data_at, build.trunc(integers, BYTES), num_bytes=COLUMNS * n)
        high = self._sum(highs)
        write_at(build, start_at, build.mul(high, WORD(-zero)))
        write_at(build, total_at, build.mul(build.sub(total, build.shl(high, WORD(8))), WORD(-zero)))

    def _write_pairs(self, whole: list[Any], data_at: Any) -> None:
        build = self._builder
        for n, integers in enumerate(whole):
            part, half = divmod(n, 2)
            write_at(build, data_at, self._in_pairs(integers), num_bytes=part * CODED_INPUTS_BYTES + half * 2 * COLUMNS)
        for part in range(len(whole) // 2):
            added = self._sum(whole[2 * part : 2 * part + 2])
            mean, rest = build.ashr(added, WORD(5)), build.and_(added, WORD(CODE_BLOCK - 1))
            both = build.or_(build.and_(mean, WORD(0xFFFF)), build.shl(rest, WORD(16)))
            write_at(build, data_at, both, num_bytes=(part + 1) * CODED_INPUTS_BYTES - 4)

    def _sum(self, vectors: list[Any]) -> Any:
        total = functools.reduce(self._builder.add, vectors)
        return emit_call(self._builder, "llvm.vector.reduce.add.v16i32", WORD, [total])

    def _in_pairs(self, integers: Any) -> Any:
        order = [first + place for first in range(0, COLUMNS, len(PAIR_ORDER)) for place in PAIR_ORDER]
        return self._builder.trunc(self._builder.shuffle_vector(integers, integers, ir.Constant(STEPS, order)), HALVES)

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
