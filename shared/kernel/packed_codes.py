"""Packs block_weights.Codes for kernels, and emits the code that makes numbers of them again.

    a part:   [codes | steps]                                       for CODE_BLOCK inputs of a tile of 64 columns
    codes:    [16 columns][pair of quads][column][half][2 bytes]    a quad is four inputs, a half two of them

Two bytes hold four codes. From the lowest bits, they are of input 0 of a half of the first quad, inputs 0 and 1 of the
second quad, and input 1 of the first quad.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from llvmlite import ir

from shared.kernel.block_weights import CODE_BLOCK, Codes
from shared.kernel.packed import by_block, of_tiles
from shared.kernel.product import BLOCKS, COLUMNS, LONG, STEPS, read_at
from shared.kernel.shares import TILE_COLUMNS

QUAD_PAIRS = CODE_BLOCK // 8
STEPS_AT = TILE_COLUMNS * CODE_BLOCK // 2
CODED_PART_BYTES = STEPS_AT + TILE_COLUMNS
COLUMN_BYTES = ir.VectorType(ir.IntType(8), COLUMNS)
SHORTS, LONGS = (ir.VectorType(ir.IntType(bits), 2 * COLUMNS) for bits in (16, 32))


def pack_codes(codes: Codes, num_tiles: int) -> torch.Tensor:
    """Return (num_tiles, K / CODE_BLOCK, CODED_PART_BYTES) uint8."""
    shape = num_tiles, BLOCKS, COLUMNS, -1, QUAD_PAIRS, 2, 2, 2  # the last three: quad, half, input
    by_half = of_tiles(codes.codes, num_tiles).view(shape).permute(0, 3, 1, 4, 2, 6, 5, 7)
    first, second = by_half.unbind(-2)
    low = first[..., 0] | second[..., 0] << 4
    high = second[..., 1] | first[..., 1] << 4
    packed = torch.stack((low, high), dim=-1).flatten(2)
    return torch.cat((packed, by_block(codes.steps, num_tiles)), dim=2)


class CodedColumns:
    """Emits code for column block `b` of a part: vectors of 16 columns."""

    def __init__(self, builder: Any, part_at: Any, b: int) -> None:
        self._builder, self._part_at, self._b = builder, part_at, b
        steps = self._read_steps()
        self._steps = {shift: builder.shl(steps, _shorts(shift)) for shift in (0, 4, 8)}

    def quads(self) -> Iterator[Any]:
        """Yield Codes.numbers: for each quad, a word of four bytes per column."""
        build = self._builder
        for pair in range(QUAD_PAIRS):
            packed = self._packed(pair)
            for even, odd in ((0, 12), (4, 8)):
                code = build.and_(build.lshr(packed, _shorts(odd)), _shorts(0xF))
                # a _product moved to the high byte would take LLVM three times as many instructions
                high = build.and_(build.mul(code, self._steps[4]), _shorts(0xFF00))
                yield build.bitcast(build.or_(self._product(packed, even), high), STEPS)

    def products(self, pair: int) -> Iterator[Any]:
        """Yield numbers of two quads, in byte_rows.PAIR_ORDER: two of 16 bits per column at a time."""
        for place in (0, 4, 8, 12):
            yield self._product(self._packed(pair), place)

    def _product(self, packed: Any, place: int) -> Any:
        """Return the upper half of code * step, whose factors are shifted left by 12 bits together."""
        build = self._builder
        code = build.and_(packed, _shorts(0xF << place)) if place else build.shl(packed, _shorts(12))
        factors = build.zext(code, LONGS), build.zext(self._steps[(12 - place) % 12], LONGS)
        return build.trunc(build.lshr(build.mul(*factors), ir.Constant(LONGS, [16] * 2 * COLUMNS)), SHORTS)

    def _packed(self, pair: int) -> Any:
        return self._read((self._b * QUAD_PAIRS + pair) * 64, SHORTS)

    def _read_steps(self) -> Any:
        """Return two numbers of 16 bits per column."""
        places = [place for lane in range(2 * COLUMNS) for place in (lane // 2, COLUMNS)]
        zeros, kind = ir.Constant(COLUMN_BYTES, [0] * COLUMNS), ir.VectorType(ir.IntType(32), len(places))
        steps = self._read(STEPS_AT + self._b * COLUMNS, COLUMN_BYTES)
        twice = self._builder.shuffle_vector(steps, zeros, ir.Constant(kind, places))
        return self._builder.bitcast(twice, SHORTS)

    def _read(self, num_bytes: int, kind: Any) -> Any:
        return read_at(self._builder, self._part_at, LONG(num_bytes), kind)


def _shorts(value: int) -> Any:
    return ir.Constant(SHORTS, [value] * 2 * COLUMNS)
