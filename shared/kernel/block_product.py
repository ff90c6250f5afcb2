"""Computes block_weights.py's product on a CPU. Weights are packed once.

    weights, packed:  [tile of 64 columns][block of k][numbers | scales | lows]     read in one straight line
    numbers:          [16 columns][quad of k][column][4 bytes]
                      with 4 bits, 4 bytes hold quad q in their low bits and quad q + quads / 2 in their high bits
    tile:             up to 4 rows x 4 vectors of 16 integer sums, in registers, and as many float sums

Each share rounds its own rows of x, because a separate task would make all threads wait. Rounding 64 rows takes about
as long as multiplying them by one tile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

from shared.kernel.block_weights import BlockFormat, BlockWeights
from shared.kernel.byte_rows import EXTRA_BYTES, round_block, row_bytes_of
from shared.kernel.dot import Dot, best_dot, emit_dot
from shared.kernel.jit import (
    compile_exact_task,
    emit_for_floats,
    emit_prefetch,
    emitted_for_constants,
    processor_features,
)
from shared.kernel.packed import Packed, of_columns
from shared.kernel.product import (
    BIAS,
    BLOCKS,
    COLUMNS,
    DEALT,
    DEPTH,
    FETCH_AHEAD,
    LONG,
    NUM_TILES,
    OUT,
    STEPS,
    SUMS,
    WEIGHT,
    WORD,
    X,
    read_at,
    round_to_half,
    share_of,
    spread,
)
from shared.kernel.program import Program
from shared.kernel.scratch import Scratch
from shared.kernel.shares import TILE_COLUMNS, Work, cut
from shared.kernel.team import Team

MOST_ROWS = 4
SCRATCH, SCRATCH_BYTES = 9, 10  # address of thread 0's scratch; bytes per thread
NUM_WORDS = 11
HALVES = ir.VectorType(ir.IntType(16), COLUMNS)


def packable(form: BlockFormat) -> BlockFormat:
    """Use float32 scales where the processor can't widen float16."""
    return form if processor_features().get("f16c", False) else replace(form, half_scales=False)


class BlockTileLinear:
    """Multiplies x (M, in) into a new, contiguous (M, out), each bfloat16 or float32. `packed`: from `pack`."""

    def __init__(
        self, packed: Packed, team: Team, out_dtype: torch.dtype | None = None, dot: Dot | None = None
    ) -> None:
        assert packed.form is not None
        self.out_features, self.in_features = packed.shape
        self.format, self._team = packed.form, team
        self._packed, self._bias = packed.weight, packed.bias
        self.out_dtype = out_dtype or packed.dtype
        halves = packed.dtype == torch.bfloat16, self.out_dtype == torch.bfloat16
        self.task = make_task(self.format, *halves, best_dot(processor_features()) if dot is None else dot)
        row_bytes = row_bytes_of(self.in_features, self.format.block)
        self.work = Work(len(self._packed), self.in_features, row_bytes, MOST_ROWS, is_rounded=True)
        self._scratch = Scratch(team.size)
        self._program = Program(team, [self.task], np.zeros((1, NUM_WORDS), np.int64))
        self.fill(self._program.words[0])

    def fill(self, words: npt.NDArray[np.int64]) -> None:
        """Fill all words except X, OUT, DEALT, SCRATCH and SCRATCH_BYTES."""
        words[NUM_TILES], words[DEPTH] = self._packed.shape[0], self._packed.shape[1]
        words[WEIGHT], words[BIAS] = self._packed.data_ptr(), self._bias.data_ptr()

    @property
    def is_whole(self) -> bool:
        return len(self._bias) == self.out_features

    def scratch_bytes(self, num_rows: int) -> int:
        return min(num_rows, self.work.most_rows) * self.work.row_bytes

    def empty(self, num_rows: int) -> torch.Tensor:
        return torch.empty((num_rows, len(self._bias)), dtype=self.out_dtype)

    def cut(self, out: torch.Tensor) -> torch.Tensor:
        return out if self.is_whole else out[:, : self.out_features].contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x, out, words = x.contiguous(), self.empty(len(x)), self._program.words[0]
        self._scratch.reserve(self.scratch_bytes(len(x)))
        words[X], words[OUT] = x.data_ptr(), out.data_ptr()
        words[DEALT] = len(x), *cut(self.work, len(x), self._team.size)
        words[[SCRATCH, SCRATCH_BYTES]] = self._scratch.words
        self._program.run()
        return self.cut(out)


def pack(weight: BlockWeights, bias: torch.Tensor | None, dtype: torch.dtype) -> Packed:
    form = packable(weight.format)
    tiles = pack_tiles(weight, form)
    return Packed(weight.shape, dtype, tiles, of_columns(bias, len(tiles)), form=form)


def pack_tiles(weight: BlockWeights, form: BlockFormat) -> torch.Tensor:
    """Return (tiles, blocks of k, bytes) uint8, padded with 0 to whole tiles."""
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


class Kind(NamedTuple):
    bits: int
    block: int
    has_low: bool
    half_scales: bool
    out_half: bool  # whether results are bfloat16 instead of float32
    dot: Dot

    def packed(self) -> int:
        flags = self.has_low | self.half_scales << 1 | self.out_half << 2 | self.dot << 3
        return self.bits | self.block << 8 | flags << 16

    @classmethod
    def unpacked(cls, number: int) -> Kind:
        has_low, half_scales, out_half = (bool(number >> 16 + place & 1) for place in range(3))
        return cls(number & 255, number >> 8 & 255, has_low, half_scales, out_half, Dot(number >> 19))

    @property
    def number_bytes(self) -> int:
        """Bytes of a tile's numbers per block of k."""
        return TILE_COLUMNS * self.block * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        return 2 if self.half_scales else 4

    @property
    def step_bytes(self) -> int:
        """Bytes of a tile per block of k."""
        return self.number_bytes + TILE_COLUMNS * (1 + self.has_low) * self.scale_bytes


@functools.cache
def make_task(form: BlockFormat, is_half: bool, out_half: bool, dot: Dot) -> Any:
    """`is_half`, `out_half`: x or results are bfloat16, not float32."""
    whole = Kind(form.bits, form.block, form.has_low, form.half_scales, out_half, dot)
    kind, step_bytes, block, zero = whole.packed(), whole.step_bytes, form.block, form.zero
    item, in_item = 2 if out_half else 4, 2 if is_half else 4

    def block_product(words: Any, share: int, worker: int) -> None:
        num_tiles, depth = words[NUM_TILES], words[DEPTH]
        num_inputs, out_bytes, tile_bytes = depth * block, num_tiles * TILE_COLUMNS * item, depth * step_bytes
        row_bytes = num_inputs + depth * EXTRA_BYTES
        first, end, first_row, num_rows = share_of(words, share)
        rounded = words[SCRATCH] + worker * words[SCRATCH_BYTES]
        for row in range(num_rows):
            x, data = words[X] + (first_row + row) * num_inputs * in_item, rounded + row * row_bytes
            extra = data + num_inputs
            for g in range(depth):
                start = extra + g * 4
                unit, total = start + depth * 4, start + depth * 8
                round_block(block, zero, is_half, x + g * block * in_item, data + g * block, start, unit, total)
        for tile in range(first, end):
            weight = words[WEIGHT] + tile * tile_bytes
            bias = words[BIAS] + tile * TILE_COLUMNS * 4
            out = words[OUT] + first_row * out_bytes + tile * TILE_COLUMNS * item
            x, left, fetch = rounded, num_rows, 1
            while left > 0:
                passes = (left + MOST_ROWS - 1) // MOST_ROWS
                # 5 rows: passes of 3 and 2 instead of 4 and 1
                rows = (left + passes - 1) // passes
                if rows == 4:
                    multiply_blocks(4, kind, x, row_bytes, weight, depth, bias, out, out_bytes, fetch)
                elif rows == 3:
                    multiply_blocks(3, kind, x, row_bytes, weight, depth, bias, out, out_bytes, fetch)
                elif rows == 2:
                    multiply_blocks(2, kind, x, row_bytes, weight, depth, bias, out, out_bytes, fetch)
                else:
                    multiply_blocks(1, kind, x, row_bytes, weight, depth, bias, out, out_bytes, fetch)
                left -= rows
                x += rows * row_bytes
                out += rows * out_bytes
                fetch = 0

    return compile_exact_task(block_product)


@emitted_for_constants
def multiply_blocks(
    typing_context: Any, rows: Any, kind: Any, x: Any, x_stride: Any, weight: Any, depth: Any, bias: Any, out: Any,
    out_stride: Any, fetch: Any,
) -> Any:  # fmt: skip
    """Emit bias + product over all k, for `rows` rows of x and BLOCKS column blocks.

    Constants: rows, kind. See product.multiply_tile."""
    if not (isinstance(rows, types.Literal) and isinstance(kind, types.Literal)):
        raise TypeError("rows and kind must be constants")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, x_at, row_bytes, weight_at, steps, bias_at, out_at, out_bytes, fetch_it = args
        is_far = builder.icmp_signed("!=", fetch_it, LONG(0))
        code = _Block(builder, Kind.unpacked(kind.literal_value))
        row_at = [builder.add(x_at, builder.mul(row_bytes, LONG(r))) for r in range(rows.literal_value)]
        tile = [(r, b) for r in range(rows.literal_value) for b in range(BLOCKS)]
        sums = {place: cgutils.alloca_once(builder, SUMS) for place in tile}
        for r, b in tile:
            builder.store(read_at(builder, bias_at, LONG(4 * COLUMNS * b), SUMS), sums[r, b])
        with cgutils.for_range(builder, steps) as loop:
            step_at = builder.add(weight_at, builder.mul(loop.index, LONG(code.kind.step_bytes)))
            with builder.if_then(is_far):
                for line in range(0, code.kind.step_bytes, 64):
                    emit_prefetch(builder, builder.add(step_at, LONG(FETCH_AHEAD + line)))
            block_of = [code.row_block(at, loop.index, steps) for at in row_at]
            dots = code.dots(step_at, block_of)
            for b in range(BLOCKS):
                scale, low = code.scale(step_at, b), code.low(step_at, b)
                for r, of_row in enumerate(block_of):
                    total = code.add_block(of_row, dots[r, b], scale, low, builder.load(sums[r, b]))
                    builder.store(total, sums[r, b])
        item = 2 if code.kind.out_half else 4
        for r, b in tile:
            target = builder.add(out_at, builder.add(builder.mul(out_bytes, LONG(r)), LONG(item * COLUMNS * b)))
            total = builder.load(sums[r, b])
            value = round_to_half(builder, total) if code.kind.out_half else total
            builder.store(value, builder.inttoptr(target, value.type.as_pointer()), align=item)
        return context.get_dummy_value()

    return types.void(rows, kind, *(types.int64,) * 8), codegen


class _RowBlock(NamedTuple):
    """Addresses of one block of a row of x (byte_rows.py)."""

    data: Any
    start: Any
    unit: Any
    sum: Any


class _Quad(NamedTuple):
    """Four numbers of each of 16 columns."""

    place: int  # index in the block; the quad begins at k = 4 * place
    numbers: Any  # 16 words, one per column


class _Block:
    def __init__(self, builder: Any, kind: Kind) -> None:
        self._builder, self.kind = builder, kind

    def row_block(self, row_at: Any, index: Any, depth: Any) -> _RowBlock:
        build, block = self._builder, LONG(self.kind.block)
        start = build.add(build.add(row_at, build.mul(depth, block)), build.mul(index, LONG(4)))
        unit = build.add(start, build.mul(depth, LONG(4)))
        return _RowBlock(
            build.add(row_at, build.mul(index, block)), start, unit, build.add(unit, build.mul(depth, LONG(4)))
        )

    def dots(self, step_at: Any, rows: Sequence[_RowBlock]) -> dict[tuple[int, int], Any]:
        """Return the integer sums for each pair of row and column block.

        A quad of x is copied to all lanes once for all column blocks: copies cost more than products."""
        build, most = self._builder, (1 << self.kind.bits) - 1
        starts = [spread(build, read_at(build, row.start, LONG(0), WORD)) for row in rows]
        dots = {(r, b): start for r, start in enumerate(starts) for b in range(BLOCKS)}
        for quads in zip(*(self.quads(step_at, b) for b in range(BLOCKS)), strict=True):
            for r, row in enumerate(rows):
                byte = spread(build, read_at(build, row.data, LONG(4 * quads[0].place), WORD))
                for b, quad in enumerate(quads):
                    dots[r, b] = emit_dot(build, self.kind.dot, dots[r, b], quad.numbers, byte, most)
        return dots

    def add_block(self, row: _RowBlock, dot: Any, scale: Any, low: Any, total: Any) -> Any:
        build = self._builder
        total = self.fma(build.sitofp(dot, SUMS), build.fmul(scale, self.splat(row.unit)), total)
        if low is not None:
            total = self.fma(self.splat(row.sum), low, total)
        return total

    def quads(self, step_at: Any, b: int) -> Iterator[_Quad]:
        per_block, build = self.kind.number_bytes // BLOCKS, self._builder
        nibbles, four = (ir.Constant(STEPS, [number] * COLUMNS) for number in (0x0F0F0F0F, 4))
        count = per_block // 64
        for j in range(count):
            packed = read_at(build, step_at, LONG(b * per_block + 64 * j), STEPS)
            if self.kind.bits == 8:
                yield _Quad(j, packed)
            else:
                yield _Quad(j, build.and_(packed, nibbles))
                yield _Quad(j + count, build.and_(build.lshr(packed, four), nibbles))

    def scale(self, step_at: Any, b: int) -> Any:
        return self._floats(step_at, self.kind.number_bytes + b * COLUMNS * self.kind.scale_bytes)

    def low(self, step_at: Any, b: int) -> Any:
        if not self.kind.has_low:
            return None
        return self._floats(step_at, self.kind.number_bytes + (TILE_COLUMNS + b * COLUMNS) * self.kind.scale_bytes)

    def _floats(self, step_at: Any, num_bytes: int) -> Any:
        if not self.kind.half_scales:
            return read_at(self._builder, step_at, LONG(num_bytes), SUMS)
        halves = self._builder.bitcast(
            read_at(self._builder, step_at, LONG(num_bytes), HALVES), ir.VectorType(ir.HalfType(), COLUMNS)
        )
        return self._builder.fpext(halves, SUMS)

    def splat(self, address: Any) -> Any:
        return self._builder.bitcast(spread(self._builder, read_at(self._builder, address, LONG(0), WORD)), SUMS)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return emit_for_floats(self._builder, "llvm.fma", a, b, c)
