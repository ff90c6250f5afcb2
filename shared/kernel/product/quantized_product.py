"""Matrix products on the CPU with fp8 (e4m3) weights and a scale per output, summed in float32.

The kernels need FMA or AVX-512. Results are summed in the order of k, as in product.py.

    weights, packed:  [tile of 64 columns][k][column]      a step of k is four vectors of 16 bytes
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

from shared.kernel.code.items import Items, widened
from shared.kernel.code.jit import NUM_ROWS, NUM_SHARES, compile_task, emit_prefetch, emitted_for_constants, part_of
from shared.kernel.code.quantized import quantize
from shared.kernel.product.packed import Packed, of_columns
from shared.kernel.product.product import (
    BIAS,
    BLOCKS,
    COLUMNS,
    DEPTH,
    FETCH_AHEAD,
    LONG,
    MOST_ROWS,
    NUM_TILES,
    OUT,
    STEPS,
    SUMS,
    WEIGHT,
    WORD,
    X,
    multiply_floats,
    read_at,
    round_to_half,
    spread,
    write_at,
)
from shared.kernel.team.program import Program
from shared.kernel.team.shares import TILE_COLUMNS
from shared.kernel.team.team import Team

SCALE = 8
NUM_WORDS = 9


class QuantizedTileLinear:
    """Multiplies x (M, in) into (M, out), both float32 or both bfloat16. `packed`: from `pack`."""

    def __init__(self, packed: Packed, team: Team) -> None:
        assert packed.scale is not None
        self.out_features, self.in_features = packed.shape
        self._dtype = packed.dtype
        self._packed, self._scale, self._bias = packed.weight, packed.scale, packed.bias
        task = make_byte_task(packed.dtype == torch.bfloat16)
        self._program = Program(team, [task], np.zeros((1, NUM_WORDS), np.int64))
        words = self._program.words[0]
        words[NUM_TILES], words[DEPTH] = self._packed.shape[:2]
        words[WEIGHT], words[SCALE] = self._packed.data_ptr(), self._scale.data_ptr()
        words[BIAS] = self._bias.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x, words = x.contiguous(), self._program.words[0]
        out = torch.empty((len(x), len(self._bias)), dtype=self._dtype)
        words[NUM_ROWS], words[X], words[OUT] = len(x), x.data_ptr(), out.data_ptr()
        self._program.run()
        return out if out.shape[1] == self.out_features else out[:, : self.out_features].contiguous()


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
    data, scale = quantize(weight, torch.float8_e4m3fn)
    tiles = pack_bytes(data)
    shape = weight.shape[0], weight.shape[1]
    return Packed(shape, weight.dtype, tiles, of_columns(bias, len(tiles)), of_columns(scale, len(tiles)))


def pack_bytes(data: torch.Tensor) -> torch.Tensor:
    """Pack (out, in) bytes into (tiles, in, 64) int8, padded with 0 to whole tiles."""
    num_columns, num_inputs = data.shape
    tiles = -(-num_columns // TILE_COLUMNS)
    padded = torch.zeros(tiles * TILE_COLUMNS, num_inputs, dtype=torch.int8)
    padded[:num_columns] = data.view(torch.int8)
    return padded.view(tiles, TILE_COLUMNS, num_inputs).transpose(1, 2).contiguous()


@functools.cache
def make_byte_task(is_half: bool) -> Any:
    """`is_half`: x and results are bfloat16, not float32."""
    item = 2 if is_half else 4

    def quantized_product(words: Any, share: int, worker: int) -> None:
        num_tiles, num_rows, depth = words[NUM_TILES], words[NUM_ROWS], words[DEPTH]
        first, end = part_of(num_tiles, share, words[NUM_SHARES])
        row_bytes, out_bytes = depth * item, num_tiles * TILE_COLUMNS * item
        for tile in range(first, end):
            weight = words[WEIGHT] + tile * depth * TILE_COLUMNS
            bias, scale = words[BIAS] + tile * TILE_COLUMNS * 4, words[SCALE] + tile * TILE_COLUMNS * 4
            out, x, left = words[OUT] + tile * TILE_COLUMNS * item, words[X], num_rows
            while left > 0:
                if left >= MOST_ROWS:
                    rows = MOST_ROWS
                    multiply_bytes(6, is_half, x, row_bytes, weight, depth, bias, scale, out, out_bytes)
                elif left >= 3:
                    rows = 3
                    multiply_bytes(3, is_half, x, row_bytes, weight, depth, bias, scale, out, out_bytes)
                else:
                    rows = 1
                    multiply_bytes(1, is_half, x, row_bytes, weight, depth, bias, scale, out, out_bytes)
                left -= rows
                x += rows * row_bytes
                out += rows * out_bytes

    return compile_task(quantized_product)


@emitted_for_constants
def multiply_bytes(
    typing_context: Any,
    rows: Any,
    is_half: Any,
    x: Any,
    x_stride: Any,
    weight: Any,
    depth: Any,
    bias: Any,
    scale: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """Emit bias + scale * product over all k. Constants: rows, is_half. See product.multiply_tile."""
    if not all(isinstance(constant, types.Literal) for constant in (rows, is_half)):
        raise TypeError("rows and is_half must be constants")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, x_at, row_bytes, weight_at, steps, bias_at, scale_at, out_at, out_bytes = args
        half, item = is_half.literal_value, 2 if is_half.literal_value else 4
        row_at = [builder.add(x_at, builder.mul(row_bytes, LONG(r))) for r in range(rows.literal_value)]
        tile = [(r, b) for r in range(rows.literal_value) for b in range(BLOCKS)]
        sums = {place: cgutils.alloca_once(builder, SUMS) for place in tile}
        for place in tile:
            builder.store(ir.Constant(SUMS, [0.0] * COLUMNS), sums[place])
        with cgutils.for_range(builder, steps) as loop:
            step_at = builder.add(weight_at, builder.mul(loop.index, LONG(TILE_COLUMNS)))
            emit_prefetch(builder, builder.add(step_at, LONG(FETCH_AHEAD // 4)))
            columns = [_float8s(builder, step_at, LONG(COLUMNS * b)) for b in range(BLOCKS)]
            for r, at in enumerate(row_at):
                step = _one_input(builder, builder.add(at, builder.mul(loop.index, LONG(item))), half)
                for b, column in enumerate(columns):
                    total = multiply_floats(builder, builder.load(sums[r, b]), column, step)
                    builder.store(total, sums[r, b])
        for r, b in tile:
            first = LONG(4 * COLUMNS * b)
            scales, biases = (read_at(builder, at, first, SUMS) for at in (scale_at, bias_at))
            total = builder.fadd(builder.fmul(builder.load(sums[r, b]), scales), biases)
            target = builder.add(out_at, builder.add(builder.mul(out_bytes, LONG(r)), LONG(item * COLUMNS * b)))
            value = round_to_half(builder, total) if half else total
            write_at(builder, target, value, item)
        return context.get_dummy_value()

    return types.void(rows, is_half, *(types.int64,) * 8), codegen


def _bytes_at(builder: Any, address: Any, num_bytes: Any) -> Any:
    kind = ir.VectorType(ir.IntType(8), COLUMNS)
    return builder.load(builder.inttoptr(builder.add(address, num_bytes), kind.as_pointer()), align=1)


def _float8s(builder: Any, address: Any, num_bytes: Any) -> Any:
    return builder.bitcast(widened(builder, _bytes_at(builder, address, num_bytes), Items.FP8), STEPS)


def _one_input(builder: Any, address: Any, is_half: bool) -> Any:
    if not is_half:
        return spread(builder, read_at(builder, address, LONG(0), WORD))
    short = ir.IntType(16)
    bits = builder.load(builder.inttoptr(address, short.as_pointer()), align=2)
    return spread(builder, builder.shl(builder.zext(bits, WORD), WORD(16)))
