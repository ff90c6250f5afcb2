"""Emits products of bytes in the registers of Intel's AMX.

    register:  up to 16 rows of 64 bytes
    product:   16 rows x 64 inputs, times 64 inputs x 16 columns, added to 16 x 16 words: exact; a cycle per row of x

A register of weights holds 16 quads of a column block. Registers 0 to 3 hold the sums of four column blocks, or of two
column blocks and both bytes of x. Sums can only be scaled in memory.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from shared.kernel.code.jit import emit_call, emitted, emitted_for_constants
from shared.kernel.product.product import LONG, write_at

ROWS, ROW_BYTES = 16, 64
CONFIG_BYTES = ROW_BYTES
REGISTER_BYTES = ROWS * ROW_BYTES
SUMS = 4  # registers of sums, the first ones
DOTS_BYTES = SUMS * REGISTER_BYTES
LEFT, RIGHT = (SUMS, SUMS + 1), (SUMS + 2, SUMS + 3)  # of the bytes of x, and of weights, used in turn
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # of Linux
BYTE = ir.IntType(8)


def has_amx(features: Mapping[str, bool]) -> bool:
    """Return whether processor and system let this process multiply bytes with AMX."""
    return bool(features.get("amx-int8") and features.get("amx-tile")) and is_permitted()


@functools.cache
def is_permitted() -> bool:
    """Ask the system once, for all threads."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0)


@emitted
def begin_registers(typing_context: Any, config: Any, num_rows: Any) -> Any:
    """Size all registers for up to 16 rows of x. `config`: the address of CONFIG_BYTES bytes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        config_at, num_rows = args
        rows = [int(register not in RIGHT) for register in range(8)]
        weight_rows = [ROWS - ROWS * row for row in rows]
        # palette, start row, bytes per row, rows
        config = struct.pack("<2B14x8H16x8B8x", 1, 0, *[ROW_BYTES] * 8, *weight_rows)
        words = [LONG(word) for word in struct.unpack("<8q", config)]
        each = struct.unpack("<q", bytes(rows))[0]
        words[6] = builder.add(words[6], builder.mul(num_rows, LONG(each)))
        for place, word in enumerate(words):
            write_at(builder, config_at, word, align=8, num_bytes=8 * place)
        emit_call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), [_pointer(builder, config_at, 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@emitted
def end_registers(typing_context: Any) -> Any:
    """Clear all registers, so that the system need not save them."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_call(builder, "llvm.x86.tilerelease", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), codegen


@emitted_for_constants
def multiply_registers(typing_context: Any, block: Any, rows: Any, row_bytes: Any, numbers: Any) -> Any:
    """Emit products of one block of one-byte rows and four column blocks.

    Constant: block, a multiple of 64. Addresses: rows, numbers."""
    if not isinstance(block, types.Literal):
        raise TypeError("block must be a constant")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_products(builder, block.literal_value, args[1:2], *args[2:])
        return context.get_dummy_value()

    return types.void(block, *(types.int64,) * 3), codegen


@emitted
def store_registers(typing_context: Any, dots: Any) -> Any:
    """Write [byte of x][column block][row][column] int32, DOTS_BYTES."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for sums in range(SUMS):
            operands = [BYTE(sums), _pointer(builder, args[0], sums * REGISTER_BYTES), LONG(ROW_BYTES)]
            emit_call(builder, "llvm.x86.tilestored64", ir.VoidType(), operands)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def emit_products(
    builder: Any, num_inputs: int, planes: Sequence[Any], stride: Any, numbers_at: Any,
    beside: Callable[[Any], None] | None = None,
) -> None:  # fmt: skip
    """As multiply_registers; with two planes, of two column blocks. `beside` emits other work for each 64 inputs."""
    void, line, together = ir.VoidType(), LONG(ROW_BYTES), SUMS // len(planes)
    for sums in range(SUMS):
        emit_call(builder, "llvm.x86.tilezero", void, [BYTE(sums)])
    with cgutils.for_range(builder, LONG(num_inputs // ROW_BYTES)) as loop:
        inputs = builder.mul(loop.index, line)
        right_part = builder.add(numbers_at, builder.mul(loop.index, LONG(REGISTER_BYTES)))
        for left, plane in zip(LEFT, planes, strict=False):
            left_at = _pointer(builder, builder.add(plane, inputs), 0)
            emit_call(builder, "llvm.x86.tileloadd64", void, [BYTE(left), left_at, stride])
        for b in range(together):
            right, right_at = BYTE(RIGHT[b % 2]), _pointer(builder, right_part, b * num_inputs * 16)
            emit_call(builder, "llvm.x86.tileloadd64", void, [right, right_at, line])
            for n in range(len(planes)):
                sums = BYTE(n * together + b)
                emit_call(builder, "llvm.x86.tdpbsud", void, [sums, BYTE(LEFT[n]), right])
        if beside is not None:
            beside(loop.index)


def _pointer(builder: Any, address: Any, num_bytes: int) -> Any:
    return builder.gep(builder.inttoptr(address, BYTE.as_pointer()), [LONG(num_bytes)])
