"""Sums of float32 numbers with the same bits on every processor that fuses a product and a sum."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from shared.kernel.code.jit import emit_fence, emit_for_floats, emitted_for_constants

LANES = 16
FLOAT, LONG, WORD, HALF = ir.FloatType(), ir.IntType(64), ir.IntType(32), ir.IntType(16)


@emitted_for_constants
def sum_of(typing_context: Any, address: Any, count: Any, is_half: Any, is_square: Any) -> Any:
    """Emit the sum of `count` numbers at `address`, or of their squares.

    Lane l sums numbers l, l + 16, ... Then halves are added until one lane is left. The last count % 16 numbers are
    added one by one. Constants: is_half, is_square."""
    if not all(isinstance(constant, types.Literal) for constant in (is_half, is_square)):
        raise TypeError("is_half and is_square must be constants")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at, length, _, _ = args
        code = _Sum(builder, at, is_half.literal_value, is_square.literal_value)
        whole = builder.and_(length, LONG(-LANES))
        lanes = code.run(LONG(0), whole, LANES, ir.Constant(ir.VectorType(FLOAT, LANES), [0.0] * LANES))
        return code.run(whole, length, 1, folded(builder, lanes))

    return types.float32(types.int64, types.int64, is_half, is_square), codegen


class _Sum:
    def __init__(self, builder: Any, address: Any, is_half: bool, is_square: bool) -> None:
        self._builder, self._address = builder, address
        self._is_half, self._is_square = is_half, is_square

    def run(self, first: Any, end: Any, width: int, start: Any) -> Any:
        total = cgutils.alloca_once(self._builder, start.type)
        self._builder.store(start, total)
        with cgutils.for_range_slice(self._builder, first, end, LONG(width), LONG) as (index, _):
            self._builder.store(self._added(self._builder.load(total), self._read(index, width)), total)
        return self._builder.load(total)

    def _read(self, index: Any, width: int) -> Any:
        build, size = self._builder, 2 if self._is_half else 4
        place = build.add(self._address, build.mul(index, LONG(size)))
        if not self._is_half:
            return build.load(build.inttoptr(place, _of(FLOAT, width).as_pointer()), align=size)
        halves = build.load(build.inttoptr(place, _of(HALF, width).as_pointer()), align=size)
        words = _of(WORD, width)
        upper = ir.Constant(words, [16] * width) if width > 1 else WORD(16)
        return build.bitcast(build.shl(build.zext(halves, words), upper), _of(FLOAT, width))

    def _added(self, total: Any, numbers: Any) -> Any:
        """The fence keeps the compiler from splitting the sum."""
        if self._is_square:
            squares = emit_for_floats(self._builder, "llvm.fmuladd", numbers, numbers, total)
            return emit_fence(self._builder, squares)
        return emit_fence(self._builder, self._builder.fadd(total, numbers))  # sums


def folded(builder: Any, vector: Any) -> Any:
    """Add halves until one lane is left."""
    half = LANES // 2
    while half:
        kind = ir.VectorType(WORD, half)
        lower, upper = (ir.Constant(kind, list(range(first, first + half))) for first in (0, half))
        vector = builder.fadd(
            builder.shuffle_vector(vector, vector, lower), builder.shuffle_vector(vector, vector, upper)
        )
        half //= 2
    return builder.extract_element(vector, WORD(0))


def _of(item: Any, width: int) -> Any:
    return ir.VectorType(item, width) if width > 1 else item
