"""Emits code that adds products of bytes to 32-bit sums, exact on every processor.

sums[n] += the sum of numbers[n, i] * bytes[n, i] over i < 4      n < 16; numbers unsigned, bytes signed
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from shared.kernel.code.jit import emit_call
from shared.kernel.product.product import COLUMNS, LONG, STEPS, WORD, read_at, spread

MOST_FOR_PAIRS = 128  # with numbers up to this, the sum of two products fits in 16 bits
HALF = COLUMNS // 2
WORDS = ir.VectorType(ir.IntType(32), HALF)
BYTES, HALF_BYTES = (ir.VectorType(ir.IntType(8), 4 * count) for count in (COLUMNS, HALF))
SHORTS = ir.VectorType(ir.IntType(16), 2 * HALF)


class Dot(enum.IntEnum):
    PLAIN = 0
    PAIRS = 1  # AVX2: one instruction adds pairs of 16-bit products
    HALVES = 2  # AVX-VNNI: one instruction adds four byte products to each of 8 words
    WHOLE = 3  # AVX-512 VNNI: the same for 16 words


def best_dot(features: Mapping[str, bool]) -> Dot:
    if features.get("avx512vnni"):
        return Dot.WHOLE
    if features.get("avxvnni"):
        return Dot.HALVES
    return Dot.PAIRS if features.get("avx2") else Dot.PLAIN


def emit_dot(builder: Any, dot: Dot, sums: Any, numbers: Any, byte: Any, most: int) -> Any:
    """All vectors have 16 words. No byte of `numbers` exceeds `most`."""
    if dot is Dot.WHOLE:
        operands = [sums, builder.bitcast(numbers, BYTES), builder.bitcast(byte, BYTES)]
        return emit_call(builder, "llvm.x86.avx512.vpdpbusd.512", STEPS, operands)
    if dot is Dot.PLAIN:
        return _add_words(builder, sums, numbers, byte)
    added = []
    for half in range(2):
        total, four, signed = (_half(builder, vector, half) for vector in (sums, numbers, byte))
        if dot is Dot.HALVES:
            operands = [total, builder.bitcast(four, HALF_BYTES), builder.bitcast(signed, HALF_BYTES)]
            added.append(emit_call(builder, "llvm.x86.avx512.vpdpbusd.256", WORDS, operands))
        elif most <= MOST_FOR_PAIRS:
            added.append(builder.add(total, _small_pairs(builder, four, signed)))
        else:
            added.append(builder.add(total, _pairs(builder, four, signed)))
    return builder.shuffle_vector(added[0], added[1], ir.Constant(STEPS, list(range(COLUMNS))))


def emit_pair_dot(builder: Any, dot: Dot, sums: Any, numbers: Any, pairs_at: Any, num_bytes: int) -> Any:
    """Add products of 32 numbers and a pair of integers, all of 16 bits and signed, to 16 words."""
    if dot is Dot.WHOLE:
        # as assembly: LLVM would split it, and read pairs into registers that others need
        llvm.initialize_native_asmparser()
        kind = ir.FunctionType(STEPS, [STEPS, STEPS, pairs_at.type])
        operands = [sums, builder.bitcast(numbers, STEPS), pairs_at]
        code = f"vpdpwssd {num_bytes}($3){{1to16}}, $2, $0"
        return builder.asm(kind, code, "=v,0,v,r,~{memory}", operands, side_effect=True)
    pair = spread(builder, read_at(builder, pairs_at, LONG(num_bytes), WORD))
    if dot is Dot.PLAIN:
        return _add_short_words(builder, sums, builder.bitcast(numbers, STEPS), pair)
    added = []
    for half in range(2):
        total, two, signed = (_half(builder, builder.bitcast(vector, STEPS), half) for vector in (sums, numbers, pair))
        operands = [builder.bitcast(vector, SHORTS) for vector in (two, signed)]
        added.append(builder.add(total, emit_call(builder, "llvm.x86.avx2.pmadd.wd", WORDS, operands)))
    return builder.shuffle_vector(added[0], added[1], ir.Constant(STEPS, list(range(COLUMNS))))


def _add_short_words(builder: Any, sums: Any, numbers: Any, pair: Any) -> Any:
    sixteen = ir.Constant(STEPS, [16] * COLUMNS)
    low = [builder.ashr(builder.shl(both, sixteen), sixteen) for both in (numbers, pair)]
    high = [builder.ashr(both, sixteen) for both in (numbers, pair)]
    return builder.add(sums, builder.add(builder.mul(*low), builder.mul(*high)))


def _half(builder: Any, vector: Any, half: int) -> Any:
    return builder.shuffle_vector(vector, vector, ir.Constant(WORDS, list(range(half * HALF, (half + 1) * HALF))))


def _add_words(builder: Any, sums: Any, numbers: Any, byte: Any) -> Any:
    for place in range(4):
        shift, left = (ir.Constant(STEPS, [count] * COLUMNS) for count in (8 * place, 24 - 8 * place))
        number = builder.and_(builder.lshr(numbers, shift), ir.Constant(STEPS, [0xFF] * COLUMNS))
        signed = builder.ashr(builder.shl(byte, left), ir.Constant(STEPS, [24] * COLUMNS))
        sums = builder.add(sums, builder.mul(number, signed))
    return sums


def _small_pairs(builder: Any, numbers: Any, byte: Any) -> Any:
    operands = [builder.bitcast(numbers, HALF_BYTES), builder.bitcast(byte, HALF_BYTES)]
    pairs = emit_call(builder, "llvm.x86.avx2.pmadd.ub.sw", SHORTS, operands)
    ones = ir.Constant(SHORTS, [1] * 2 * HALF)
    return emit_call(builder, "llvm.x86.avx2.pmadd.wd", WORDS, [pairs, ones])


def _pairs(builder: Any, numbers: Any, byte: Any) -> Any:
    eight, low = (ir.Constant(SHORTS, [value] * 2 * HALF) for value in (8, 0xFF))
    number, signed = builder.bitcast(numbers, SHORTS), builder.bitcast(byte, SHORTS)
    even = [builder.and_(number, low), builder.ashr(builder.shl(signed, eight), eight)]
    odd = [builder.lshr(number, eight), builder.ashr(signed, eight)]
    name = "llvm.x86.avx2.pmadd.wd"
    return builder.add(emit_call(builder, name, WORDS, even), emit_call(builder, name, WORDS, odd))
