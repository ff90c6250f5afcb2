"""Emits block_product.py's inner loops: products of rounded rows with one tile."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from shared.kernel import amx
from shared.kernel.dot import Dot, emit_dot
from shared.kernel.jit import emit_for_floats, emit_prefetch, emitted_for_constants
from shared.kernel.product import (
    BLOCKS,
    COLUMNS,
    FETCH_AHEAD,
    LONG,
    STEPS,
    SUMS,
    WORD,
    read_at,
    round_to_half,
    spread,
    write_at,
)
from shared.kernel.shares import TILE_COLUMNS

MOST_PART = 64  # inputs that are multiplied without a loop
SUMS_BYTES = TILE_COLUMNS * 4  # of a row, in a share that uses AMX
HALVES = ir.VectorType(ir.IntType(16), COLUMNS)


class Kind(NamedTuple):
    bits: int
    block: int
    has_low: bool
    half_scales: bool
    out_half: bool  # whether results are bfloat16 instead of float32
    dot: Dot

    def packed(self) -> int:
        flags = self.has_low | self.half_scales << 1 | self.out_half << 2 | self.dot << 3
        return self.bits | self.block << 8 | flags << 24

    @classmethod
    def unpacked(cls, number: int) -> Kind:
        has_low, half_scales, out_half = (bool(number >> 24 + place & 1) for place in range(3))
        return cls(number & 255, number >> 8 & 0xFFFF, has_low, half_scales, out_half, Dot(number >> 27))

    @property
    def number_bytes(self) -> int:
        return TILE_COLUMNS * self.block * self.bits // 8

    @property
    def part(self) -> int:
        """A longer block is a loop over parts."""
        return self.block if self.bits == 4 else math.gcd(self.block, MOST_PART)

    @property
    def num_parts(self) -> int:
        return self.block // self.part

    @property
    def scale_bytes(self) -> int:
        return 2 if self.half_scales else 4

    @property
    def step_bytes(self) -> int:
        return self.number_bytes + TILE_COLUMNS * (1 + self.has_low) * self.scale_bytes


@emitted_for_constants
def add_registers(
    typing_context: Any, kind: Any, is_last: Any, x: Any, x_stride: Any, index: Any, depth: Any, step: Any, room: Any,
    count: Any, before: Any, before_stride: Any, after: Any, after_stride: Any,
) -> Any:  # fmt: skip
    """Emit code that scales one block's integers (amx.multiply_registers), and adds them to the sums of `count` rows.

    Constants: kind; is_last, whether to write results instead of sums. Addresses: x, step (the block's weights), before
    (sums or biases), after (sums or results). `index`: the block's."""
    if not (isinstance(kind, types.Literal) and isinstance(is_last, types.Literal)):
        raise TypeError("kind and is_last must be constants")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, x_at, row_bytes, block_index, num_blocks, step_at, room_at, num_rows, *places = args
        before_at, before_bytes, after_at, after_bytes = places
        code = Block(builder, Kind.unpacked(kind.literal_value))
        is_half = is_last.literal_value and code.kind.out_half
        item = 2 if is_half else 4
        scales = [code.scale(step_at, b) for b in range(BLOCKS)]
        with cgutils.for_range(builder, num_rows) as loop:
            at = {
                start: builder.add(start, builder.mul(loop.index, stride))
                for start, stride in ((x_at, row_bytes), (before_at, before_bytes), (after_at, after_bytes))
            }
            row = code.row_block(at[x_at], block_index, num_blocks)
            start = spread(builder, read_at(builder, row.start, LONG(0), WORD))
            dots_at = builder.add(room_at, builder.mul(loop.index, LONG(amx.ROW_BYTES)))
            for b, scale in enumerate(scales):
                dot = read_at(builder, dots_at, LONG(amx.ROW_BYTES + b * amx.REGISTER_BYTES), STEPS)
                total = read_at(builder, at[before_at], LONG(4 * COLUMNS * b), SUMS)
                total = code.add_block(row, builder.add(start, dot), scale, None, total)
                value = round_to_half(builder, total) if is_half else total
                write_at(builder, builder.add(at[after_at], LONG(item * COLUMNS * b)), value, item)
        return context.get_dummy_value()

    return types.void(kind, is_last, *(types.int64,) * 11), codegen


@emitted_for_constants
def multiply_blocks(
    typing_context: Any, rows: Any, kind: Any, x: Any, x_stride: Any, weight: Any, depth: Any, before: Any,
    before_stride: Any, out: Any, out_stride: Any, fetch: Any,
) -> Any:  # fmt: skip
    """Emit before + product over all k, for `rows` rows of x and BLOCKS column blocks.

    Constants: rows, kind. `before`: float32 rows, or a bias, with stride 0. See product.multiply_tile."""
    if not (isinstance(rows, types.Literal) and isinstance(kind, types.Literal)):
        raise TypeError("rows and kind must be constants")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, x_at, row_bytes, weight_at, steps, before_at, before_bytes, out_at, out_bytes, fetch_it = args
        is_far = builder.icmp_signed("!=", fetch_it, LONG(0))
        code = Block(builder, Kind.unpacked(kind.literal_value))
        row_at = [builder.add(x_at, builder.mul(row_bytes, LONG(r))) for r in range(rows.literal_value)]
        tile = [(r, b) for r in range(rows.literal_value) for b in range(BLOCKS)]
        sums = {place: cgutils.alloca_once(builder, SUMS) for place in tile}
        for r, b in tile:
            skipped = builder.add(builder.mul(before_bytes, LONG(r)), LONG(4 * COLUMNS * b))
            builder.store(read_at(builder, before_at, skipped, SUMS), sums[r, b])
        with cgutils.for_range(builder, steps) as loop:
            step_at = builder.add(weight_at, builder.mul(loop.index, LONG(code.kind.step_bytes)))
            block_of = [code.row_block(at, loop.index, steps) for at in row_at]
            dots = code.dots(step_at, block_of, is_far)
            for b in range(BLOCKS):
                scale, low = code.scale(step_at, b), code.low(step_at, b)
                for r, of_row in enumerate(block_of):
                    total = code.add_block(of_row, dots[r, b], scale, low, builder.load(sums[r, b]))
                    builder.store(total, sums[r, b])
        item = 2 if code.kind.out_half else 4
        for r, b in tile:
            target = builder.add(out_at, builder.add(builder.mul(out_bytes, LONG(r)), LONG(item * COLUMNS * b)))
            total = builder.load(sums[r, b])
            write_at(builder, target, round_to_half(builder, total) if code.kind.out_half else total, item)
        return context.get_dummy_value()

    return types.void(rows, kind, *(types.int64,) * 9), codegen


class _RowBlock(NamedTuple):
    """Addresses of one block of a row of x (byte_rows.py)."""

    data: Any
    start: Any
    unit: Any
    sum: Any


class _Quad(NamedTuple):
    """Four numbers of each of 16 columns."""

    place: int  # index in the part
    numbers: Any  # 16 words, one per column


class Block:
    def __init__(self, builder: Any, kind: Kind) -> None:
        self._builder, self.kind = builder, kind

    def row_block(self, row_at: Any, index: Any, depth: Any) -> _RowBlock:
        build, block = self._builder, LONG(self.kind.block)
        start = build.add(build.add(row_at, build.mul(depth, block)), build.mul(index, LONG(4)))
        unit = build.add(start, build.mul(depth, LONG(4)))
        return _RowBlock(
            build.add(row_at, build.mul(index, block)), start, unit, build.add(unit, build.mul(depth, LONG(4)))
        )

    def dots(self, step_at: Any, rows: Sequence[_RowBlock], is_far: Any) -> dict[tuple[int, int], Any]:
        """Return the sums of each row and column block."""
        build, kind = self._builder, self.kind
        starts = [spread(build, read_at(build, row.start, LONG(0), WORD)) for row in rows]
        dots = {(r, b): start for r, start in enumerate(starts) for b in range(BLOCKS)}
        if kind.num_parts == 1:
            self._prefetch(is_far, build.add(step_at, LONG(FETCH_AHEAD)), kind.step_bytes)
            return self._add_part(dots, step_at, [row.data for row in rows])
        kept = {place: cgutils.alloca_once_value(build, dot) for place, dot in dots.items()}
        with cgutils.for_range(build, LONG(kind.num_parts)) as loop:
            part_at = build.add(step_at, build.mul(loop.index, LONG(kind.part * COLUMNS)))
            for b in range(BLOCKS):
                # of the next block, because its four column blocks are far apart
                next_at = build.add(part_at, LONG(kind.step_bytes + b * kind.number_bytes // BLOCKS))
                self._prefetch(is_far, next_at, kind.part * COLUMNS)
            inputs = build.mul(loop.index, LONG(kind.part))
            before = {place: build.load(dot) for place, dot in kept.items()}
            after = self._add_part(before, part_at, [build.add(row.data, inputs) for row in rows])
            for place, dot in after.items():
                build.store(dot, kept[place])
        return {place: build.load(dot) for place, dot in kept.items()}

    def _prefetch(self, is_far: Any, address: Any, num_bytes: int) -> None:
        with self._builder.if_then(is_far):
            for line in range(0, num_bytes, 64):
                emit_prefetch(self._builder, self._builder.add(address, LONG(line)))

    def _add_part(self, dots: dict[tuple[int, int], Any], part_at: Any, rows: Sequence[Any]) -> dict[Any, Any]:
        """Copy a quad of x to all lanes once for all column blocks: copies cost more than products."""
        build, most, dots = self._builder, (1 << self.kind.bits) - 1, dict(dots)
        for quads in zip(*(self.quads(part_at, b) for b in range(BLOCKS)), strict=True):
            for r, row in enumerate(rows):
                byte = spread(build, read_at(build, row, LONG(4 * quads[0].place), WORD))
                for b, quad in enumerate(quads):
                    dots[r, b] = emit_dot(build, self.kind.dot, dots[r, b], quad.numbers, byte, most)
        return dots

    def add_block(self, row: _RowBlock, dot: Any, scale: Any, low: Any, total: Any) -> Any:
        build = self._builder
        total = self.fma(build.sitofp(dot, SUMS), build.fmul(scale, self.splat(row.unit)), total)
        if low is not None:
            total = self.fma(self.splat(row.sum), low, total)
        return total

    def quads(self, part_at: Any, b: int) -> Iterator[_Quad]:
        per_block, build = self.kind.number_bytes // BLOCKS, self._builder
        nibbles, four = (ir.Constant(STEPS, [number] * COLUMNS) for number in (0x0F0F0F0F, 4))
        count = per_block // 64 // self.kind.num_parts
        for j in range(count):
            packed = read_at(build, part_at, LONG(b * per_block + 64 * j), STEPS)
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
