"""Emits the parts of attend_bytes.py that repack keys and values, and turn scores into weights."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from shared.kernel.code.items import Items
from shared.kernel.code.jit import (
    EXP_TERMS,
    LN2_HIGH,
    LN2_LOW,
    LOG2E,
    emit_call,
    emit_for_floats,
    emitted,
    emitted_for_constants,
)
from shared.kernel.code.scratch import LINE_BYTES
from shared.kernel.code.sums import folded
from shared.kernel.product.attend_places import SCALE_BYTES
from shared.kernel.product.byte_rows import BYTES_ONLY, Rounding
from shared.kernel.product.product import COLUMNS, FLOAT, LONG, STEPS, SUMS, WORD, read_at, spread, write_at
from shared.kernel.product.vectors import Vectors

LEAST_EXPONENT = -87.0
BLOCK = 64  # keys
ZERO = 128  # keys and values are repacked as unsigned bytes: number + ZERO
SIGNS = 0x80808080  # of four bytes: flipping a sign bit adds ZERO
BYTES, SHORTS = ir.VectorType(ir.IntType(8), BLOCK), ir.VectorType(ir.IntType(16), BLOCK // 2)


def tile_bytes(num_inputs: int) -> int:
    """Return the size of 64 columns of bytes, and their scales."""
    return BLOCK * (num_inputs + SCALE_BYTES)


@emitted
def largest_of(typing_context: Any, row: Any, num_keys: Any) -> Any:
    """Emit the largest score of a query. It may be NaN if any score is."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row_at, count = args
        lowest = ir.Constant(SUMS, [float("-inf")] * COLUMNS)
        top = cgutils.alloca_once_value(builder, lowest)
        with cgutils.for_range(builder, _blocks_of(builder, count)) as loop:
            tops = [builder.load(top)]
            for n, is_read in enumerate(_which_are_read(builder, loop.index, count)):
                score = read_at(builder, row_at, _place(builder, loop.index, n), SUMS)
                tops.append(builder.select(is_read, score, lowest))
            while len(tops) > 1:
                x, y, *others = tops
                tops = [*others, builder.select(builder.fcmp_ordered(">", x, y), x, y)]
            builder.store(tops[0], top)
        return emit_call(builder, "llvm.vector.reduce.fmax.v16f32", FLOAT, [builder.load(top)])

    return types.float32(types.int64, types.int64), codegen


@emitted
def soften(typing_context: Any, row: Any, scales: Any, num_keys: Any, top: Any, scale: Any) -> Any:
    """Emit code that turns a query's scores into rounded weights, in place. It returns the sum of exp(scale * (score -
    top)), in sums.sum_of's order."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row_at, scales_at, count, top_score, factor = args
        code, tops, factors = Rounding(builder), _splat(builder, top_score), _splat(builder, factor)
        zeros = ir.Constant(SUMS, [0.0] * COLUMNS)
        total = cgutils.alloca_once_value(builder, zeros)
        with cgutils.for_range(builder, _blocks_of(builder, count)) as loop:
            for n, is_read in enumerate(_which_are_read(builder, loop.index, count)):
                place = _place(builder, loop.index, n)
                score, unit = (read_at(builder, start, place, SUMS) for start in (row_at, scales_at))
                power = builder.fmul(builder.fsub(score, tops), factors)
                number = builder.select(is_read, emit_exp(builder, power), zeros)
                builder.store(builder.fadd(builder.load(total), number), total)
                weight = builder.select(is_read, builder.fmul(number, unit), zeros)  # unread scales may be NaN
                write_at(builder, builder.add(row_at, place), weight)
        # apart, so that blocks overlap
        with cgutils.for_range(builder, _blocks_of(builder, count)) as loop:
            at = builder.add(row_at, _place(builder, loop.index, 0))
            weights = code.read(at, BLOCK // COLUMNS, False)
            extra = (builder.add(at, LONG(BLOCK + 4 * n)) for n in range(3))
            code.write(weights, ZERO, BYTES_ONLY, at, LONG(0), *extra)
        return folded(builder, builder.load(total))

    return types.float32(*(types.int64,) * 3, types.float32, types.float32), codegen


def _blocks_of(builder: Any, num_keys: Any) -> Any:
    return builder.lshr(builder.add(num_keys, LONG(BLOCK - 1)), LONG(BLOCK.bit_length() - 1))


def _place(builder: Any, block: Any, n: int) -> Any:
    """Return the byte offset of a block's n-th vector of float32 numbers."""
    return builder.add(builder.mul(block, LONG(4 * BLOCK)), LONG(LINE_BYTES * n))


def _which_are_read(builder: Any, block: Any, num_keys: Any) -> list[Any]:
    """Return a mask for each vector of a block: whether the query reads the key."""
    left = builder.trunc(builder.sub(num_keys, builder.mul(block, LONG(BLOCK))), WORD)
    lanes = [ir.Constant(STEPS, [n * COLUMNS + lane for lane in range(COLUMNS)]) for n in range(BLOCK // COLUMNS)]
    return [builder.icmp_signed("<", lane, spread(builder, left)) for lane in lanes]


@emitted_for_constants
def transpose_keys(typing_context: Any, head_dim: Any, keys: Any, count: Any, out: Any) -> Any:
    """Emit code that writes `count` times 16 keys as a tile: [16 keys][quad of the head][key][4 bytes]."""
    if not isinstance(head_dim, types.Literal):
        raise TypeError("head_dim must be a constant")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, keys_at, count, out_at = args
        size = head_dim.literal_value
        turn, signs = Vectors(builder, COLUMNS, Items.FLOATS), ir.Constant(STEPS, [SIGNS] * COLUMNS)
        with cgutils.for_range(builder, count) as loop:
            at = builder.add(keys_at, builder.mul(loop.index, LONG(8 * COLUMNS)))
            target = builder.add(out_at, builder.mul(loop.index, LONG(size * COLUMNS)))
            rows = [read_at(builder, at, LONG(8 * lane), LONG) for lane in range(COLUMNS)]
            for part in range(size // BLOCK):
                words = [read_at(builder, row, LONG(BLOCK * part), STEPS) for row in rows]
                for n, quad in enumerate(turn.transposed(words)):
                    place = builder.add(target, LONG((part * COLUMNS + n) * LINE_BYTES))
                    write_at(builder, place, builder.xor(quad, signs))
        return context.get_dummy_value()

    return types.void(head_dim, *(types.int64,) * 3), codegen


@emitted_for_constants
def transpose_values(typing_context: Any, head_dim: Any, values: Any, count: Any, out: Any) -> Any:
    """Emit code that writes `count` quads of values as tiles of 64 of the head's numbers: [16 numbers][quad of
    keys][number][4 bytes]."""
    if not isinstance(head_dim, types.Literal):
        raise TypeError("head_dim must be a constant")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, values_at, count, out_at = args
        signs = ir.Constant(STEPS, [SIGNS] * COLUMNS)
        with cgutils.for_range(builder, count) as loop:
            at = builder.add(values_at, builder.mul(loop.index, LONG(4 * 8)))
            rows = [read_at(builder, at, LONG(8 * n), LONG) for n in range(4)]
            for tile in range(head_dim.literal_value // BLOCK):
                four = [read_at(builder, one, LONG(BLOCK * tile), BYTES) for one in rows]
                pairs = [_dealt(builder, four[n], four[n + 1]) for n in (0, 2)]
                halves = [[builder.bitcast(half, SHORTS) for half in pair] for pair in pairs]
                quads = [quad for low, high in zip(*halves, strict=True) for quad in _dealt(builder, low, high)]
                for b, quad in enumerate(quads):
                    skipped = tile * tile_bytes(BLOCK) + b * BLOCK * COLUMNS
                    place = builder.add(builder.add(out_at, LONG(skipped)), builder.mul(loop.index, LONG(LINE_BYTES)))
                    write_at(builder, place, builder.xor(builder.bitcast(quad, STEPS), signs))
        return context.get_dummy_value()

    return types.void(head_dim, *(types.int64,) * 3), codegen


def _splat(builder: Any, number: Any) -> Any:
    return builder.bitcast(spread(builder, builder.bitcast(number, WORD)), SUMS)


def _dealt(builder: Any, x: Any, y: Any) -> list[Any]:
    """x0 x1 ... and y0 y1 ...   ->   x0 y0 x1 y1 ... in two vectors"""
    count = x.type.count
    order = [n // 2 + n % 2 * count for n in range(count)]
    lanes = [[lane + skip for lane in order] for skip in (0, count // 2)]
    kind = ir.VectorType(ir.IntType(32), count)
    return [builder.shuffle_vector(x, y, ir.Constant(kind, chosen)) for chosen in lanes]


def emit_exp(builder: Any, value: Any) -> Any:
    """Emit jit.exp32 for vectors, with fixed roundings: 2^power * exp(rest), with |rest| <= log(2) / 2."""
    kind, words = value.type, ir.VectorType(ir.IntType(32), value.type.count)

    def constant(number: float) -> Any:
        return ir.Constant(kind, [number] * kind.count)

    def fused(x: Any, y: Any, z: Any) -> Any:
        return emit_for_floats(builder, "llvm.fma", x, y, z)

    value = builder.select(builder.fcmp_ordered("<", value, constant(LEAST_EXPONENT)), constant(LEAST_EXPONENT), value)
    power = emit_for_floats(builder, "llvm.floor", fused(value, constant(LOG2E), constant(0.5)))
    rest = fused(power, constant(-LN2_LOW), fused(power, constant(-LN2_HIGH), value))
    series = constant(EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        series = fused(series, rest, constant(term))
    total = builder.fadd(fused(series, builder.fmul(rest, rest), rest), constant(1.0))
    bias, places = (ir.Constant(words, [number] * kind.count) for number in (127, 23))
    raised = builder.shl(builder.add(builder.fptosi(power, words), bias), places)
    return builder.fmul(total, builder.bitcast(raised, kind))
