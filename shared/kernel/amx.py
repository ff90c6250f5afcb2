"""Emits products of bytes in the registers of Intel's AMX.

    register:  16 rows of 64 bytes
    product:   16 rows x 64 inputs, times 64 inputs x 16 columns, added to 16 x 16 words: exact

A register of weights holds 16 quads of a column block, as block_product.py packs them. Registers 0 to 3 hold the sums
of four column blocks, or of two column blocks and both bytes of x. Sums can only be scaled in memory; with short blocks
that takes longer than the products.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import struct
import sys
from collections.abc import Mapping
from typing import Any

from llvmlite import ir
from numba import types

from shared.kernel.jit import emit_call, emitted, emitted_for_constants
from shared.kernel.product import BLOCKS, LONG, write_at

ROWS, ROW_BYTES = 16, 64
REGISTER_BYTES = ROWS * ROW_BYTES
DOTS_BYTES = BLOCKS * REGISTER_BYTES
ROOM_BYTES = ROW_BYTES + 2 * DOTS_BYTES  # configuration, and the sums of four registers, for two bytes of x
SUMS = 4  # registers of sums, the first ones
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
def begin_registers(typing_context: Any, room: Any) -> Any:
    """Give all registers their full size. `room`: the address of ROOM_BYTES bytes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # palette, start row, bytes per row, rows
        config = struct.pack("<2B14x8H16x8B8x", 1, 0, *[ROW_BYTES] * 8, *[ROWS] * 8)
        for place, word in enumerate(struct.unpack("<8q", config)):
            write_at(builder, builder.add(args[0], LONG(8 * place)), LONG(word), align=8)
        emit_call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), [_pointer(builder, args[0], 0)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@emitted
def end_registers(typing_context: Any) -> Any:
    """Clear all registers, so that the system need not save them."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_call(builder, "llvm.x86.tilerelease", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), codegen


@emitted_for_constants
def multiply_registers(
    typing_context: Any, block: Any, input_bytes: Any, rows: Any, low_rows: Any, row_bytes: Any, numbers: Any, room: Any
) -> Any:
    """Emit the products of 16 rows of x and one block of a tile's weights.

    Constants: block, a multiple of 64; input_bytes. Addresses: rows, low_rows (PLANES), numbers, room (receives [byte
    of x][4 column blocks][row][column] int32 at ROW_BYTES)."""
    if not (isinstance(block, types.Literal) and isinstance(input_bytes, types.Literal)):
        raise TypeError("block and input_bytes must be constants")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, rows_at, low_rows_at, stride, numbers_at, room_at = args
        num_inputs, planes = block.literal_value, (rows_at, low_rows_at)[: input_bytes.literal_value]
        void, line, together = ir.VoidType(), LONG(ROW_BYTES), SUMS // len(planes)
        for first in range(0, BLOCKS, together):
            for sums in range(SUMS):
                emit_call(builder, "llvm.x86.tilezero", void, [BYTE(sums)])
            for part in range(num_inputs // ROW_BYTES):
                for left, plane in zip(LEFT, planes, strict=False):
                    left_at = _pointer(builder, plane, part * ROW_BYTES)
                    emit_call(builder, "llvm.x86.tileloadd64", void, [BYTE(left), left_at, stride])
                for b in range(together):
                    right, place = BYTE(RIGHT[b % 2]), (first + b) * num_inputs * 16 + part * REGISTER_BYTES
                    right_at = _pointer(builder, numbers_at, place)
                    emit_call(builder, "llvm.x86.tileloadd64", void, [right, right_at, line])
                    for n in range(len(planes)):
                        sums = BYTE(n * together + b)
                        emit_call(builder, "llvm.x86.tdpbsud", void, [sums, BYTE(LEFT[n]), right])
            for n in range(len(planes)):
                for b in range(together):
                    place = ROW_BYTES + n * DOTS_BYTES + (first + b) * REGISTER_BYTES
                    target = _pointer(builder, room_at, place)
                    emit_call(builder, "llvm.x86.tilestored64", void, [BYTE(n * together + b), target, line])
        return context.get_dummy_value()

    return types.void(block, input_bytes, *(types.int64,) * 5), codegen


def _pointer(builder: Any, address: Any, num_bytes: int) -> Any:
    return builder.inttoptr(builder.add(address, LONG(num_bytes)), BYTE.as_pointer())
