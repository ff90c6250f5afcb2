"""Emits block_product.py's inner loops: products of rounded rows with one tile."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from shared.kernel import amx
from shared.kernel.block_weights import CODE_BLOCK
from shared.kernel.dot import Dot, emit_dot, emit_pair_dot
from shared.kernel.jit import emit_for_floats, emit_prefetch, emitted_for_constants
from shared.kernel.packed_codes import CODED_PART_BYTES, QUAD_PAIRS, CodedColumns
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
    dot: Dot
    has_low: bool = False
    half_scales: bool = False
    out_half: bool = False  # whether results are bfloat16 instead of float32
    in_codes: bool = False
    input_bytes: int = 1

    def packed(self) -> int:
        flags = self.has_low | self.half_scales << 1 | self.out_half << 2 | self.in_codes << 3 | self.input_bytes << 4
        return self.bits | self.block << 8 | (flags | self.dot << 6) << 24

    @classmethod
    def unpacked(cls, number: int) -> Kind:
        has_low, half_scales, out_half, in_codes = (bool(number >> 24 + place & 1) for place in range(4))
        flags = has_low, half_scales, out_half, in_codes
        return cls(number & 255, number >> 8 & 0xFFFF, Dot(number >> 30), *flags, number >> 28 & 3)

    @property
    def number_bytes(self) -> int:
        if self.in_codes:
            return self.num_parts * CODED_PART_BYTES
        return TILE_COLUMNS * self.block * self.bits // 8

    @property
    def part(self) -> int:
        """A longer block is a loop over parts."""
        if self.in_codes:
            return CODE_BLOCK
        return self.block if self.bits == 4 else math.gcd(self.block, MOST_PART)

    @property
    def num_parts(self) -> int:
        return self.block // self.part

    @property
    def low_bytes(self) -> int:
        return 2 if self.half_scales else 4

    @property
    def scale_bytes(self) -> int:
        return 4 if self.in_codes else self.low_bytes

    @property
    def num_lows(self) -> int:
        """Return the number of lows per block and column."""
        return self.num_parts if self.in_codes else int(self.has_low)

    @property
    def step_bytes(self) -> int:
        return self.number_bytes + TILE_COLUMNS * (self.scale_bytes + self.num_lows * self.low_bytes)


@emitted_for_constants
def add_registers(
    typing_context: Any, kind: Any, is_last: Any, x: Any, x_stride: Any, index: Any, depth: Any, step: Any, room: Any,
    count: Any, before: Any, before_stride: Any, after: Any, after_stride: Any,
) -> Any:  # fmt: skip
    """Emit code that scales one block's integers (amx.multiply_registers), and adds them to the sums of `count` rows.

    Constants: kind; is_last: whether to write results. Addresses: x, step (the block's weights), before (sums or
    biases), after (sums or results)."""
    if not (isinstance(kind, types.Literal) and isinstance(is_last, types.Literal)):
        raise TypeError("kind and is_last must be constants")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, x_at, row_bytes, block_index, num_blocks, step_at, room_at, num_rows, *places = args
        before_at, before_bytes, after_at, after_bytes = places
        code = Block(builder, Kind.unpacked(kind.literal_value))
        is_half = is_last.literal_value and code.kind.out_half
        item = 2 if is_half else 4
        scales, lows = ([read(step_at, b) for b in range(BLOCKS)] for read in (code.scale, code.lows))
        with cgutils.for_range(builder, num_rows) as loop:
            at = {
                start: builder.add(start, builder.mul(loop.index, stride))
                for start, stride in ((x_at, row_bytes), (before_at, before_bytes), (after_at, after_bytes))
            }
            row = code.row_block(at[x_at], block_index, num_blocks)
            unit, sums = code.splat(row.unit), code.row_sums(row)
            start = spread(builder, read_at(builder, row.start, LONG(0), WORD))
            dots_at = builder.add(room_at, builder.mul(loop.index, LONG(amx.ROW_BYTES)))
            for b, scale in enumerate(scales):
                planes = range(code.kind.input_bytes)
                skips = [amx.ROW_BYTES + n * amx.DOTS_BYTES + b * amx.REGISTER_BYTES for n in planes]
                dot = code.joined([read_at(builder, dots_at, LONG(skip), STEPS) for skip in skips])
                total = read_at(builder, at[before_at], LONG(4 * COLUMNS * b), SUMS)
                total = code.add_block(unit, sums, builder.add(start, dot), scale, lows[b], total)
                value = round_to_half(builder, total) if is_half else total
                write_at(builder, builder.add(at[after_at], LONG(item * COLUMNS * b)), value, item)
        return context.get_dummy_value()

    return types.void(kind, is_last, *(types.int64,) * 11), codegen


@emitted_for_constants
def unpack_codes(typing_context: Any, kind: Any, step: Any, out: Any) -> Any:
    """Emit code that writes one block's numbers, as block_product.py packs 8 bits. Constant: kind."""
    if not isinstance(kind, types.Literal):
        raise TypeError("kind must be a constant")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, step_at, out_at = args
        code = Block(builder, Kind.unpacked(kind.literal_value))
        with cgutils.for_range(builder, LONG(code.kind.num_parts)) as loop:
            part_at = builder.add(step_at, builder.mul(loop.index, LONG(CODED_PART_BYTES)))
            code.fetch_share(step_at, loop.index)
            target = builder.add(out_at, builder.mul(loop.index, LONG(CODE_BLOCK * COLUMNS)))
            for b in range(BLOCKS):
                for quad in code.quads(part_at, b):
                    place = LONG(b * code.kind.block * COLUMNS + quad.place * 64)
                    write_at(builder, builder.add(target, place), quad.numbers)
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64), codegen


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
            rows_of = [(code.splat(row.unit), code.row_sums(row)) for row in block_of]
            for b in range(BLOCKS):
                scale, lows = code.scale(step_at, b), code.lows(step_at, b)
                for r, (unit, of_row) in enumerate(rows_of):
                    total = code.add_block(unit, of_row, dots[r, b], scale, lows, builder.load(sums[r, b]))
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

    data: list[Any]  # one for each byte of an integer; or one, of PAIRS
    start: Any
    unit: Any
    sums: Any  # one for each low


class _Quad(NamedTuple):
    """Four numbers of each of 16 columns."""

    place: int  # index in the part
    numbers: Any  # 16 words, one per column


class Block:
    def __init__(self, builder: Any, kind: Kind) -> None:
        self._builder, self.kind = builder, kind

    def row_block(self, row_at: Any, index: Any, depth: Any) -> _RowBlock:
        build, kind = self._builder, self.kind

        def at(first: Any, per_depth: int, per_index: int) -> Any:
            skipped = build.mul(depth, LONG(per_depth)), build.mul(index, LONG(per_index))
            return build.add(build.add(first, skipped[0]), skipped[1])

        extra = at(row_at, kind.block * kind.input_bytes, 0)
        places = at(extra, 0, 4), at(extra, 4, 4), at(extra, 8, 4 * kind.num_lows)
        if kind.in_codes:
            return _RowBlock([at(row_at, 0, 2 * kind.block)], *places)
        return _RowBlock([at(row_at, n * kind.block, kind.block) for n in range(kind.input_bytes)], *places)

    def row_sums(self, row: _RowBlock) -> list[Any]:
        skips = [LONG(4 * n) for n in range(self.kind.num_lows)]
        return [self.splat(self._builder.add(row.sums, skip)) for skip in skips]

    def dots(self, step_at: Any, rows: Sequence[_RowBlock], is_far: Any) -> dict[tuple[int, int], Any]:
        """Return the sums of each row and column block."""
        build, kind, zeros = self._builder, self.kind, ir.Constant(STEPS, [0] * COLUMNS)
        starts = [spread(build, read_at(build, row.start, LONG(0), WORD)) for row in rows]
        places = [(r, b) for r in range(len(rows)) for b in range(BLOCKS)]
        last = 0 if kind.in_codes else kind.input_bytes - 1
        dots = {(*place, n): starts[place[0]] if n == last else zeros for place in places for n in range(last + 1)}
        if kind.num_parts == 1:
            self._prefetch(is_far, build.add(step_at, LONG(FETCH_AHEAD)), kind.step_bytes)
            return self._joined(self._add_part(dots, step_at, [row.data for row in rows]), places)
        kept = {place: cgutils.alloca_once_value(build, dot) for place, dot in dots.items()}
        with cgutils.for_range(build, LONG(kind.num_parts)) as loop:
            part_at = self._part(step_at, loop.index, is_far)
            inputs = build.mul(loop.index, LONG(2 * kind.part if kind.in_codes else kind.part))
            before = {place: build.load(dot) for place, dot in kept.items()}
            after = self._add_part(before, part_at, [[build.add(at, inputs) for at in row.data] for row in rows])
            for place, dot in after.items():
                build.store(dot, kept[place])
        return self._joined({place: build.load(dot) for place, dot in kept.items()}, places)

    def _part(self, step_at: Any, index: Any, is_far: Any) -> Any:
        """Return a part's address, and fetch what comes later."""
        build, kind = self._builder, self.kind
        if kind.in_codes:
            with build.if_then(is_far):
                self.fetch_share(step_at, index)
            return build.add(step_at, build.mul(index, LONG(CODED_PART_BYTES)))
        part_at = build.add(step_at, build.mul(index, LONG(kind.part * COLUMNS)))
        for b in range(BLOCKS):
            # of the next block, because its four column blocks are far apart
            next_at = build.add(part_at, LONG(kind.step_bytes + b * kind.number_bytes // BLOCKS))
            self._prefetch(is_far, next_at, kind.part * COLUMNS)
        return part_at

    def _joined(self, dots: dict[Any, Any], places: list[tuple[int, int]]) -> dict[tuple[int, int], Any]:
        planes = range(len(dots) // len(places))
        return {place: self.joined([dots[*place, n] for n in planes]) for place in places}

    def joined(self, planes: list[Any]) -> Any:
        """Return the sums for integers, given those for each byte."""
        if len(planes) == 1:
            return planes[0]
        eight = ir.Constant(STEPS, [8] * COLUMNS)
        return self._builder.add(self._builder.shl(planes[0], eight), planes[1])

    def _prefetch(self, is_far: Any, address: Any, num_bytes: int) -> None:
        with self._builder.if_then(is_far):
            for line in range(0, num_bytes, 64):
                emit_prefetch(self._builder, self._builder.add(address, LONG(line)))

    def _add_part(self, dots: dict[Any, Any], part_at: Any, rows: Sequence[list[Any]]) -> dict[Any, Any]:
        """Copy a quad of x to all lanes once for all column blocks: copies cost more than products."""
        if self.kind.in_codes:
            return self._add_coded_part(dots, part_at, rows)
        build, most, dots = self._builder, (1 << self.kind.bits) - 1, dict(dots)
        for quads in zip(*(self.quads(part_at, b) for b in range(BLOCKS)), strict=True):
            for r, planes in enumerate(rows):
                for n, plane in enumerate(planes):
                    byte = spread(build, read_at(build, plane, LONG(4 * quads[0].place), WORD))
                    for b, quad in enumerate(quads):
                        dots[r, b, n] = emit_dot(build, self.kind.dot, dots[r, b, n], quad.numbers, byte, most)
        return dots

    def fetch_share(self, step_at: Any, index: Any) -> None:
        """Fetch a part's share of what lies FETCH_AHEAD."""
        share = -(-self.kind.step_bytes // self.kind.num_parts // 64) * 64
        first = self._builder.add(step_at, self._builder.mul(index, LONG(share)))
        for line in range(0, share, 64):
            emit_prefetch(self._builder, self._builder.add(first, LONG(FETCH_AHEAD + line)))

    def _add_coded_part(self, dots: dict[Any, Any], part_at: Any, rows: Sequence[list[Any]]) -> dict[Any, Any]:
        build, dots = self._builder, dict(dots)
        columns = [CodedColumns(build, part_at, b) for b in range(BLOCKS)]
        for pair in range(QUAD_PAIRS):
            made = (one.products(pair) for one in columns)
            for place, products in enumerate(zip(*made, strict=True)):
                for r, (pairs_at,) in enumerate(rows):
                    two = spread(build, read_at(build, pairs_at, LONG(16 * pair + 4 * place), WORD))
                    for b, product in enumerate(products):
                        dots[r, b, 0] = emit_pair_dot(build, self.kind.dot, dots[r, b, 0], product, two)
        return dots

    def add_block(self, unit: Any, sums: list[Any], dot: Any, scale: Any, lows: list[Any], total: Any) -> Any:
        build = self._builder
        total = self.fma(build.sitofp(dot, SUMS), build.fmul(scale, unit), total)
        for own, low in zip(sums, lows, strict=True):
            total = self.fma(own, low, total)
        return total

    def quads(self, part_at: Any, b: int) -> Iterator[_Quad]:
        if self.kind.in_codes:
            for place, numbers in enumerate(CodedColumns(self._builder, part_at, b).quads()):
                yield _Quad(place, numbers)
            return
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
        size = self.kind.scale_bytes
        return self._floats(step_at, self.kind.number_bytes + b * COLUMNS * size, size)

    def lows(self, step_at: Any, b: int) -> list[Any]:
        size, first = self.kind.low_bytes, self.kind.number_bytes + TILE_COLUMNS * self.kind.scale_bytes
        starts = [first + (n * TILE_COLUMNS + b * COLUMNS) * size for n in range(self.kind.num_lows)]
        return [self._floats(step_at, start, size) for start in starts]

    def _floats(self, step_at: Any, num_bytes: int, size: int) -> Any:
        if size == 4:
            return read_at(self._builder, step_at, LONG(num_bytes), SUMS)
        halves = self._builder.bitcast(
            read_at(self._builder, step_at, LONG(num_bytes), HALVES), ir.VectorType(ir.HalfType(), COLUMNS)
        )
        return self._builder.fpext(halves, SUMS)

    def splat(self, address: Any) -> Any:
        return self._builder.bitcast(spread(self._builder, read_at(self._builder, address, LONG(0), WORD)), SUMS)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return emit_for_floats(self._builder, "llvm.fma", a, b, c)
