"""Emits exp for vectors of float32, with the same bits on every processor that fuses a product and a sum."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from shared.kernel.jit import EXP_TERMS, LN2_HIGH, LN2_LOW, LOG2E, emit_for_floats

LEAST = -87.0


def emit_exp(builder: Any, value: Any) -> Any:
    """Emit jit.exp32 for vectors, with fixed roundings: 2^power * exp(rest), with |rest| <= log(2) / 2."""
    kind, words = value.type, ir.VectorType(ir.IntType(32), value.type.count)

    def constant(number: float) -> Any:
        return ir.Constant(kind, [number] * kind.count)

    def fused(x: Any, y: Any, z: Any) -> Any:
        return emit_for_floats(builder, "llvm.fma", x, y, z)

    value = builder.select(builder.fcmp_ordered("<", value, constant(LEAST)), constant(LEAST), value)
    power = emit_for_floats(builder, "llvm.floor", fused(value, constant(LOG2E), constant(0.5)))
    rest = fused(power, constant(-LN2_LOW), fused(power, constant(-LN2_HIGH), value))
    series = constant(EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        series = fused(series, rest, constant(term))
    total = builder.fadd(fused(series, builder.fmul(rest, rest), rest), constant(1.0))
    bias, places = (ir.Constant(words, [number] * kind.count) for number in (127, 23))
    raised = builder.shl(builder.add(builder.fptosi(power, words), bias), places)
    return builder.fmul(total, builder.bitcast(raised, kind))
