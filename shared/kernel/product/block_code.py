"""Emits block_product.py's inner loops: products of rounded rows with one tile."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from shared.kernel.code.jit import emit_for_floats, emit_prefetch, emitted_for_constants, is_zen
from shared.kernel.product.block_weights import CODE_BLOCK
from shared.kernel.product.byte_rows import CODED_INPUTS_BYTES, data_bytes_of
from shared.kernel.product.dot import Dot, emit_dot, emit_pair_dot
from shared.kernel.product.packed_codes import HALF_BLOCKS, STRIP_BYTES, TILE_HALVES, CodedColumns
from shared.kernel.product.product import (
    BLOCKS,
    BOOL,
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
from shared.kernel.team.shares import TILE_COLUMNS

MOST_PART = 64  # inputs that are multiplied without a loop
MOST_WORD_STRIPS, SPLIT = 8, 12  # of codes: 8 * 32 * 128 * 32,639 < 2^31
HALVES = ir.VectorType(ir.IntType(16), COLUMNS)


class BlockForm(NamedTuple):
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
    def unpacked(cls, number: int) -> BlockForm:
        has_low, half_scales, out_half, in_codes = (bool(number >> 24 + place & 1) for place in range(4))
        flags = has_low, half_scales, out_half, in_codes
        return cls(number & 255, number >> 8 & 0xFFFF, Dot(number >> 30), *flags, number >> 28 & 3)

    @property
    def number_bytes(self) -> int:
        if self.in_codes:
            return self.num_parts * TILE_HALVES * STRIP_BYTES
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
    def scale_bytes(self) -> int:
        return 2 if self.half_scales else 4

    @property
    def step_bytes(self) -> int:
        return self.number_bytes + TILE_COLUMNS * self.scale_bytes * (1 + self.has_low)


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
        code = BlockEmitter(builder, BlockForm.unpacked(kind.literal_value))
        is_far = builder.icmp_signed("!=", fetch_it, LONG(0))
        if rows.literal_value == 1 and code.kind.bits == 4 and is_zen():
            is_far = BOOL(0)  # the processor's own prefetcher is faster
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
            rows_of = [(code.splat(row.unit), code.row_sum(row)) for row in block_of]
            for b in range(BLOCKS):
                scale, low = code.scale(step_at, b), code.low(step_at, b)
                for r, (unit, added) in enumerate(rows_of):
                    total = code.add_block(unit, added, dots[r, b], scale, low, builder.load(sums[r, b]))
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
    extra: Any


class _Quad(NamedTuple):
    """Four numbers of each of 16 columns."""

    place: int  # index in the part
    numbers: Any  # 16 words, one per column


class BlockEmitter:
    def __init__(self, builder: Any, kind: BlockForm) -> None:
        self._builder, self.kind = builder, kind

    def row_block(self, row_at: Any, index: Any, depth: Any) -> _RowBlock:
        build, kind = self._builder, self.kind

        def at(first: Any, per_depth: int, per_index: int) -> Any:
            skipped = build.mul(depth, LONG(per_depth)), build.mul(index, LONG(per_index))
            return build.add(build.add(first, skipped[0]), skipped[1])

        extra = at(row_at, data_bytes_of(kind.block, kind.input_bytes, kind.in_codes), 0)
        planes = [at(row_at, n * kind.block, kind.block) for n in range(kind.input_bytes)]
        if kind.in_codes:
            planes = [at(row_at, 0, kind.num_parts * CODED_INPUTS_BYTES)]
        return _RowBlock(planes, at(extra, 0, 4), at(extra, 4, 4), at(extra, 8, 4))

    def row_sum(self, row: _RowBlock) -> Any:
        return self.splat(row.extra) if self.kind.has_low else None

    def starts(self, row: _RowBlock) -> list[Any]:
        return [
            spread(self._builder, read_at(self._builder, at, LONG(0), WORD))
            for at in (row.start, row.extra)[: self.kind.input_bytes]
        ]

    def dots(self, step_at: Any, rows: Sequence[_RowBlock], is_far: Any) -> dict[tuple[int, int], Any]:
        """Return float32 sums of each row and column block."""
        build, kind = self._builder, self.kind
        if kind.in_codes:
            return self._coded_dots(step_at, rows, is_far)
        places = [(r, b) for r in range(len(rows)) for b in range(BLOCKS)]
        starts = [self.starts(row) for row in rows]
        dots = {(r, b, n): start for r, b in places for n, start in enumerate(starts[r])}
        if kind.num_parts == 1:
            self._prefetch(is_far, build.add(step_at, LONG(FETCH_AHEAD)), kind.step_bytes)
            return self._joined(self._add_part(dots, step_at, [row.data for row in rows]), places)
        kept = {place: cgutils.alloca_once_value(build, dot) for place, dot in dots.items()}
        with cgutils.for_range(build, LONG(kind.num_parts)) as loop:
            part_at = self._part(step_at, loop.index, is_far)
            inputs = build.mul(loop.index, LONG(kind.part))
            before = {place: build.load(dot) for place, dot in kept.items()}
            after = self._add_part(before, part_at, [[build.add(at, inputs) for at in row.data] for row in rows])
            for place, dot in after.items():
                build.store(dot, kept[place])
        return self._joined({place: build.load(dot) for place, dot in kept.items()}, places)

    def _coded_dots(self, step_at: Any, rows: Sequence[_RowBlock], is_far: Any) -> dict[tuple[int, int], Any]:
        """Sum a few strips in words, then these words' bits from SPLIT on, and below, apart.

        A long block's sum doesn't fit into a word."""
        build, kind, zeros = self._builder, self.kind, ir.Constant(STEPS, [0] * COLUMNS)
        few = max(count for count in range(1, MOST_WORD_STRIPS + 1) if kind.num_parts % count == 0)
        split, below = (ir.Constant(STEPS, [number] * COLUMNS) for number in (SPLIT, (1 << SPLIT) - 1))
        found = {}
        for half in range(TILE_HALVES):
            places = [(r, b) for r in range(len(rows)) for b in range(HALF_BLOCKS)]
            dots, highs, lows = ({place: cgutils.alloca_once_value(build, zeros) for place in places} for _ in range(3))
            with cgutils.for_range(build, LONG(kind.num_parts // few)) as outer:
                for at in dots.values():
                    build.store(zeros, at)
                with cgutils.for_range(build, LONG(few)) as inner:
                    part = build.add(build.mul(outer.index, LONG(few)), inner.index)
                    strip = build.add(part, LONG(half * kind.num_parts))
                    with build.if_then(is_far):
                        self.fetch_strip(step_at, strip)
                    inputs = build.mul(part, LONG(CODED_INPUTS_BYTES))
                    own_rows = [build.add(row.data[0], inputs) for row in rows]
                    self._add_strip(dots, build.add(step_at, build.mul(strip, LONG(STRIP_BYTES))), own_rows)
                for place, at in dots.items():
                    dot = build.load(at)
                    build.store(build.add(build.load(highs[place]), build.ashr(dot, split)), highs[place])
                    build.store(build.add(build.load(lows[place]), build.and_(dot, below)), lows[place])
            for r, b in places:
                total = self._together(build.load(highs[r, b]), build.load(lows[r, b]), SPLIT)
                found[r, half * HALF_BLOCKS + b] = total
        return found

    def _add_strip(self, dots: dict[Any, Any], strip_at: Any, rows: Sequence[Any]) -> None:
        """Keep two sums per place, because each addition waits for the one before."""
        build, zeros = self._builder, ir.Constant(STEPS, [0] * COLUMNS)
        own = {place: [build.load(at), zeros] for place, at in dots.items()}
        columns = [CodedColumns(build, strip_at, b) for b in range(HALF_BLOCKS)]
        made = zip(*(one.pairs() for one in columns), strict=True)
        for place, pairs in enumerate(itertools.chain(made, [[one.base_pairs() for one in columns]])):
            for (r, b), sums in own.items():
                sums[place % 2] = emit_pair_dot(build, self.kind.dot, sums[place % 2], pairs[b], rows[r], 4 * place)
        for place, sums in own.items():
            build.store(build.add(*sums), dots[place])

    def _part(self, step_at: Any, index: Any, is_far: Any) -> Any:
        """Return a part's address, and fetch what comes later."""
        build, kind = self._builder, self.kind
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
        """Return float32 sums, given the integer ones for each byte of x."""
        return self._together(planes[0], planes[1], 8) if len(planes) == 2 else self._builder.sitofp(planes[0], SUMS)

    def _together(self, high: Any, low: Any, bits: int) -> Any:
        """Return high * 2^bits + low, rounded once: both are exact."""
        high, low = (self._builder.sitofp(number, SUMS) for number in (high, low))
        return self.fma(high, ir.Constant(SUMS, [float(1 << bits)] * COLUMNS), low)

    def _prefetch(self, is_far: Any, address: Any, num_bytes: int) -> None:
        with self._builder.if_then(is_far):
            for line in range(0, num_bytes, 64):
                emit_prefetch(self._builder, self._builder.add(address, LONG(line)))

    def _add_part(self, dots: dict[Any, Any], part_at: Any, rows: Sequence[list[Any]]) -> dict[Any, Any]:
        """Copy a quad of x to all lanes once for all column blocks: copies cost more than products."""
        build, most, dots = self._builder, (1 << self.kind.bits) - 1, dict(dots)
        for quads in zip(*(self.quads(part_at, b) for b in range(BLOCKS)), strict=True):
            for r, planes in enumerate(rows):
                for n, plane in enumerate(planes):
                    byte = spread(build, read_at(build, plane, LONG(4 * quads[0].place), WORD))
                    for b, quad in enumerate(quads):
                        dots[r, b, n] = emit_dot(build, self.kind.dot, dots[r, b, n], quad.numbers, byte, most)
        return dots

    def fetch_strip(self, step_at: Any, index: Any) -> None:
        """Fetch a strip's share, FETCH_AHEAD."""
        share = -(-self.kind.step_bytes // self.kind.num_parts // TILE_HALVES // 64) * 64
        first = self._builder.add(step_at, self._builder.mul(index, LONG(share)))
        for line in range(0, share, 64):
            emit_prefetch(self._builder, first, FETCH_AHEAD + line)

    def add_block(self, unit: Any, added: Any, dot: Any, scale: Any, low: Any, total: Any) -> Any:
        build = self._builder
        total = self.fma(dot, build.fmul(scale, unit), total)
        return total if low is None else self.fma(added, low, total)

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
        return self._floats(step_at, b * COLUMNS)

    def low(self, step_at: Any, b: int) -> Any:
        return self._floats(step_at, TILE_COLUMNS + b * COLUMNS) if self.kind.has_low else None

    def _floats(self, step_at: Any, index: int) -> Any:
        num_bytes = self.kind.number_bytes + index * self.kind.scale_bytes
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
