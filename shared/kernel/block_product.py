"""The product of block_weights.py on a CPU: integer sums of four bytes at a time, weights packed once.

    weights, packed:  [tile of 64 columns][block of k][numbers | scales | lows]     read in one straight line
    numbers:          [16 columns][quad of k][column][4 bytes], of 4 bits two quads in a byte: [q] and [q + quads / 2]
    tile:             up to 5 rows x 4 vectors of 16 sums, in registers

Each share rounds the rows of x to bytes for itself: that costs next to nothing beside the product, and a task more
would make all threads wait for each other.
"""

from __future__ import annotations

import functools
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

from shared.kernel.block_weights import LARGEST, BlockFormat, BlockWeights
from shared.kernel.jit import (
    NUM_ROWS,
    NUM_SHARES,
    bits_of,
    bytes_at,
    compile_exact_task,
    emit_prefetch,
    emitted_for_constants,
    float_of,
    floats_at,
    ints_at,
    load,
)
from shared.kernel.product import (
    BIAS,
    BLOCKS,
    COLUMNS,
    DEPTH,
    FETCH_AHEAD,
    LONG,
    NUM_TILES,
    OUT,
    STEPS,
    SUMS,
    TILE_COLUMNS,
    WEIGHT,
    WORD,
    X,
    read_at,
    round_to_half,
    spread,
)
from shared.kernel.program import Program
from shared.kernel.team import Team

MOST_ROWS = 5
SCRATCH, SCRATCH_BYTES = 8, 9  # of all shares, and of one
NUM_WORDS = 10
BYTES = ir.VectorType(ir.IntType(8), 4 * COLUMNS)
HALVES = ir.VectorType(ir.IntType(16), COLUMNS)
ROUNDING = 12582912.0  # 1.5 * 2^23: adding and taking it away rounds to the nearest integer, ties to even
_f32, _i32, _u32 = np.float32, np.int32, np.uint32


def has_dot_product() -> bool:
    """Whether the processor multiplies and adds four bytes at a time."""
    return bool(llvm.get_host_cpu_features().get("avx512vnni", False))


class BlockTileLinear:
    """x (M, in) -> (M, out), fresh, contiguous; of one dtype, bfloat16 or float32; the result of either. Keeps its own
    packed copy of the weight."""

    def __init__(
        self,
        weight: BlockWeights,
        bias: torch.Tensor | None,
        team: Team,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
        with_dot: bool | None = None,
    ) -> None:
        """`with_dot`: by the processor's own instruction; it decides if not given."""
        self.out_features, self.in_features = weight.shape
        self.format, self._team = weight.format, team
        self._packed = pack(weight)
        self._bias = torch.zeros(len(self._packed) * TILE_COLUMNS)
        if bias is not None:
            self._bias[: self.out_features] = bias
        self.out_dtype = out_dtype or dtype
        halves = dtype == torch.bfloat16, self.out_dtype == torch.bfloat16
        self.task = make_task(weight.format, *halves, has_dot_product() if with_dot is None else with_dot)
        self._program = Program(team, [self.task], np.zeros((1, NUM_WORDS), np.int64))
        self.fill(self._program.words[0])

    def fill(self, words: npt.NDArray[np.int64]) -> None:
        """What of a task's words stays: all but NUM_ROWS, X, OUT and the scratch."""
        words[NUM_TILES], words[DEPTH] = self._packed.shape[0], self._packed.shape[1]
        words[WEIGHT], words[BIAS] = self._packed.data_ptr(), self._bias.data_ptr()

    @property
    def is_whole(self) -> bool:
        """Rows of the result are as long as they seem: no columns were filled up."""
        return len(self._bias) == self.out_features

    def scratch_bytes(self, num_rows: int) -> int:
        """What one share needs."""
        return num_rows * row_bytes_of(self.in_features, self.format.block)

    def empty(self, num_rows: int) -> torch.Tensor:
        """What a task of this product writes to."""
        return torch.empty((num_rows, len(self._bias)), dtype=self.out_dtype)

    def cut(self, out: torch.Tensor) -> torch.Tensor:
        return out if self.is_whole else out[:, : self.out_features].contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x, out, words = x.contiguous(), self.empty(len(x)), self._program.words[0]
        scratch = torch.empty(self._team.size, self.scratch_bytes(len(x)), dtype=torch.uint8)
        words[NUM_ROWS], words[X], words[OUT] = len(x), x.data_ptr(), out.data_ptr()
        words[SCRATCH], words[SCRATCH_BYTES] = scratch.data_ptr(), scratch.shape[1]
        self._program.run()
        return self.cut(out)


def row_bytes_of(num_inputs: int, block: int) -> int:
    """Of a row of x in scratch: its bytes, then for each block where its sums begin, its unit, and the unit times the
    sum of its bytes."""
    return num_inputs + num_inputs // block * 12


def pack(weight: BlockWeights) -> torch.Tensor:
    """(tiles, blocks of k, bytes) uint8; outputs filled up to whole tiles with 0."""
    form = weight.format
    num_columns, num_inputs = weight.shape
    tiles, depth, quads = -(-num_columns // TILE_COLUMNS), num_inputs // form.block, form.block // 4
    numbers = torch.zeros(tiles * TILE_COLUMNS, num_inputs, dtype=torch.uint8)
    numbers[:num_columns] = weight.numbers
    ordered = numbers.view(tiles, BLOCKS, COLUMNS, depth, quads, 4).permute(0, 3, 1, 4, 2, 5)
    if form.bits == 4:
        ordered = ordered[:, :, :, : quads // 2] | (ordered[:, :, :, quads // 2 :] << 4)
    parts = [ordered.reshape(tiles, depth, -1)]
    kind = torch.float16 if form.half_scales else torch.float32
    for values in (weight.scales, weight.lows) if form.has_low else (weight.scales,):
        assert values is not None
        padded = torch.zeros(tiles * TILE_COLUMNS, depth, dtype=kind)
        padded[:num_columns] = values
        parts.append(padded.view(tiles, TILE_COLUMNS, depth).transpose(1, 2).contiguous().view(torch.uint8))
    return torch.cat(parts, dim=2)


@functools.cache
def make_task(form: BlockFormat, is_half: bool, out_half: bool, with_dot: bool) -> Any:
    """A share is a run of tiles. x and the results are bfloat16 if so said, else float32."""
    bits, zero, block, has_low, half_scales = form.bits, form.zero, form.block, form.has_low, form.half_scales
    item, in_item = 2 if out_half else 4, 2 if is_half else 4
    number_bytes = TILE_COLUMNS * block * bits // 8
    step_bytes = number_bytes + TILE_COLUMNS * (1 + has_low) * (2 if half_scales else 4)
    largest = _f32(LARGEST)

    def block_product(words: Any, share: int) -> None:
        num_tiles, num_rows, depth = words[NUM_TILES], words[NUM_ROWS], words[DEPTH]
        per_share = (num_tiles + words[NUM_SHARES] - 1) // words[NUM_SHARES]
        first, end = share * per_share, min((share + 1) * per_share, num_tiles)
        if first >= end:
            return
        num_inputs, out_bytes, tile_bytes = depth * block, num_tiles * TILE_COLUMNS * item, depth * step_bytes
        row_bytes = num_inputs + depth * 12
        scratch = words[SCRATCH] + share * words[SCRATCH_BYTES]
        for row in range(num_rows):
            x, data = words[X] + row * num_inputs * in_item, scratch + row * row_bytes
            bytes_out, starts = bytes_at(data), ints_at(data + num_inputs)
            units, sums = floats_at(data + num_inputs + depth * 4), floats_at(data + num_inputs + depth * 8)
            for g in range(depth):
                top = _u32(0)
                for k in range(block):
                    magnitude = _u32(bits_of(load(x, g * block + k, is_half)) & _u32(0x7FFFFFFF))
                    top = max(top, magnitude)  # of bits, as the numbers' own order is: this vectorises
                peak = float_of(top)
                inverse = largest / peak if top > _u32(0) else _f32(0.0)
                total = _i32(0)
                for k in range(block):
                    scaled = load(x, g * block + k, is_half) * inverse
                    byte = _i32((scaled + _f32(ROUNDING)) - _f32(ROUNDING))
                    bytes_out[g * block + k] = byte
                    total += byte
                starts[g] = _i32(-zero) * total
                units[g] = peak / largest
                sums[g] = units[g] * _f32(total)
        for tile in range(first, end):
            weight = words[WEIGHT] + tile * tile_bytes
            bias = words[BIAS] + tile * TILE_COLUMNS * 4
            out = words[OUT] + tile * TILE_COLUMNS * item
            x, left = scratch, num_rows
            while left > 0:
                passes = (left + MOST_ROWS - 1) // MOST_ROWS
                rows = (left + passes - 1) // passes  # evenly: no pass for a single row after one of five
                if rows == 5:
                    multiply_blocks(
                        5,
                        bits,
                        block,
                        has_low,
                        half_scales,
                        out_half,
                        with_dot,
                        x,
                        row_bytes,
                        weight,
                        depth,
                        bias,
                        out,
                        out_bytes,
                    )
                elif rows == 4:
                    multiply_blocks(
                        4,
                        bits,
                        block,
                        has_low,
                        half_scales,
                        out_half,
                        with_dot,
                        x,
                        row_bytes,
                        weight,
                        depth,
                        bias,
                        out,
                        out_bytes,
                    )
                elif rows == 3:
                    multiply_blocks(
                        3,
                        bits,
                        block,
                        has_low,
                        half_scales,
                        out_half,
                        with_dot,
                        x,
                        row_bytes,
                        weight,
                        depth,
                        bias,
                        out,
                        out_bytes,
                    )
                elif rows == 2:
                    multiply_blocks(
                        2,
                        bits,
                        block,
                        has_low,
                        half_scales,
                        out_half,
                        with_dot,
                        x,
                        row_bytes,
                        weight,
                        depth,
                        bias,
                        out,
                        out_bytes,
                    )
                else:
                    multiply_blocks(
                        1,
                        bits,
                        block,
                        has_low,
                        half_scales,
                        out_half,
                        with_dot,
                        x,
                        row_bytes,
                        weight,
                        depth,
                        bias,
                        out,
                        out_bytes,
                    )
                left -= rows
                x += rows * row_bytes
                out += rows * out_bytes

    return compile_exact_task(block_product)


@emitted_for_constants
def multiply_blocks(
    typing_context: Any,
    rows: Any,
    bits: Any,
    block: Any,
    has_low: Any,
    half_scales: Any,
    out_half: Any,
    with_dot: Any,
    x: Any,
    x_stride: Any,
    weight: Any,
    depth: Any,
    bias: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """bias + the products of `rows` rows and BLOCKS column blocks over all k. Constants up to `with_dot`; depth counts
    blocks of k, all others are addresses and bytes."""
    constants = (rows, bits, block, has_low, half_scales, out_half, with_dot)
    if not all(isinstance(constant, types.Literal) for constant in constants):
        raise TypeError("what comes before x must be constants")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x_at, row_bytes, weight_at, steps, bias_at, out_at, out_bytes = args[len(constants) :]
        values = [constant.literal_value for constant in constants]
        code = _Block(
            builder, bits=values[1], block=values[2], has_low=values[3], half_scales=values[4], with_dot=values[6]
        )
        half, count = out_half.literal_value, rows.literal_value
        row_at = [builder.add(x_at, builder.mul(row_bytes, LONG(r))) for r in range(count)]
        extra_at = [builder.add(at, builder.mul(steps, LONG(code.block))) for at in row_at]
        tile = [(r, b) for r in range(count) for b in range(BLOCKS)]
        # Variables in name only: the compiler turns them into registers.
        sums = {place: cgutils.alloca_once(builder, SUMS) for place in tile}
        for r, b in tile:
            builder.store(read_at(builder, bias_at, LONG(4 * COLUMNS * b), SUMS), sums[r, b])
        with cgutils.for_range(builder, steps) as loop:
            step_at = builder.add(weight_at, builder.mul(loop.index, LONG(code.step_bytes)))
            for line in range(0, code.step_bytes, 64):
                emit_prefetch(builder, builder.add(step_at, LONG(FETCH_AHEAD + line)))
            data_at = [builder.add(at, builder.mul(loop.index, LONG(code.block))) for at in row_at]
            of_row = []
            for at in extra_at:
                place = builder.mul(loop.index, LONG(4))
                unit_at = builder.add(at, builder.add(place, builder.mul(steps, LONG(4))))
                of_row.append((builder.add(at, place), unit_at, builder.add(unit_at, builder.mul(steps, LONG(4)))))
            for b in range(BLOCKS):
                quads = code.quads(step_at, b)
                scale, low = code.scale(step_at, b), code.low(step_at, b)
                for r in range(count):
                    start_at, unit_at, sum_at = of_row[r]
                    dot = spread(builder, read_at(builder, start_at, LONG(0), WORD))
                    for q, quad in enumerate(quads):
                        byte = spread(builder, read_at(builder, data_at[r], LONG(4 * q), WORD))
                        dot = code.add_dot(dot, quad, byte)
                    number = builder.sitofp(dot, SUMS)
                    total = code.fma(number, builder.fmul(scale, code.splat(unit_at)), builder.load(sums[r, b]))
                    if low is not None:
                        total = code.fma(code.splat(sum_at), low, total)
                    builder.store(total, sums[r, b])
        item = 2 if half else 4
        for r, b in tile:
            target = builder.add(out_at, builder.add(builder.mul(out_bytes, LONG(r)), LONG(item * COLUMNS * b)))
            total = builder.load(sums[r, b])
            value = round_to_half(builder, total) if half else total
            builder.store(value, builder.inttoptr(target, value.type.as_pointer()), align=item)
        return context.get_dummy_value()

    return types.void(*constants, *(types.int64,) * 7), codegen


class _Block:
    """Writes vector code of one block of k and 64 columns."""

    def __init__(self, builder: Any, bits: int, block: int, has_low: bool, half_scales: bool, with_dot: bool) -> None:
        self._builder, self._bits, self.block = builder, bits, block
        self._has_low, self._half_scales, self._with_dot = has_low, half_scales, with_dot
        self._number_bytes = TILE_COLUMNS * block * bits // 8
        self._scale_bytes = 2 if half_scales else 4
        self.step_bytes = self._number_bytes + TILE_COLUMNS * (1 + has_low) * self._scale_bytes

    def quads(self, step_at: Any, b: int) -> list[Any]:
        """Of 16 columns, four numbers a column in each, as 16 words."""
        per_block = self._number_bytes // BLOCKS
        packed = [read_at(self._builder, step_at, LONG(b * per_block + 64 * j), STEPS) for j in range(per_block // 64)]
        if self._bits == 8:
            return packed
        nibbles = ir.Constant(STEPS, [0x0F0F0F0F] * COLUMNS)
        four = ir.Constant(STEPS, [4] * COLUMNS)
        upper = [self._builder.and_(self._builder.lshr(vector, four), nibbles) for vector in packed]
        return [self._builder.and_(vector, nibbles) for vector in packed] + upper

    def scale(self, step_at: Any, b: int) -> Any:
        return self._floats(step_at, self._number_bytes + b * COLUMNS * self._scale_bytes)

    def low(self, step_at: Any, b: int) -> Any:
        """None where the format has none."""
        if not self._has_low:
            return None
        return self._floats(step_at, self._number_bytes + (TILE_COLUMNS + b * COLUMNS) * self._scale_bytes)

    def _floats(self, step_at: Any, num_bytes: int) -> Any:
        if not self._half_scales:
            return read_at(self._builder, step_at, LONG(num_bytes), SUMS)
        halves = self._builder.bitcast(
            read_at(self._builder, step_at, LONG(num_bytes), HALVES), ir.VectorType(ir.HalfType(), COLUMNS)
        )
        return self._builder.fpext(halves, SUMS)

    def splat(self, address: Any) -> Any:
        return self._builder.bitcast(spread(self._builder, read_at(self._builder, address, LONG(0), WORD)), SUMS)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self._call(f"llvm.fma.v{COLUMNS}f32", SUMS, [a, b, c])

    def add_dot(self, sums: Any, quad: Any, byte: Any) -> Any:
        """sums[n] += the four products of column n's numbers, unsigned, and a row's bytes, signed."""
        build = self._builder
        if self._with_dot:
            operands = [sums, build.bitcast(quad, BYTES), build.bitcast(byte, BYTES)]
            return self._call("llvm.x86.avx512.vpdpbusd.512", STEPS, operands)
        for place in range(4):
            shift = ir.Constant(STEPS, [8 * place] * COLUMNS)
            number = build.and_(build.lshr(quad, shift), ir.Constant(STEPS, [0xFF] * COLUMNS))
            left = ir.Constant(STEPS, [24 - 8 * place] * COLUMNS)
            signed = build.ashr(build.shl(byte, left), ir.Constant(STEPS, [24] * COLUMNS))
            sums = build.add(sums, build.mul(number, signed))
        return sums

    def _call(self, name: str, result: Any, operands: list[Any]) -> Any:
        kind = ir.FunctionType(result, [operand.type for operand in operands])
        function = self._builder.module.globals.get(name) or ir.Function(self._builder.module, kind, name)
        return self._builder.call(function, operands)
