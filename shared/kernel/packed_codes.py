"""Packs block_weights.Codes for kernels, and emits code that makes numbers of them again.

    a part:   [codes | lines]                                    for CODE_BLOCK inputs of a tile of 64 columns
    codes:    [16 columns][pair of quads][column][half][2 bytes] a quad is four inputs, a half two of them
    lines:    [16 columns][steps | nudges | bases][column]

Two bytes hold four codes, from the highest bits: inputs 0 and 1 of a half of the first quad, then of the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from llvmlite import ir

from shared.kernel.block_weights import CODE_BLOCK, Codes
from shared.kernel.jit import emit_call
from shared.kernel.packed import of_tiles
from shared.kernel.product import BLOCKS, COLUMNS, LONG, STEPS, read_at
from shared.kernel.shares import TILE_COLUMNS

QUAD_PAIRS = CODE_BLOCK // 8
LINES_AT, LINES_BYTES = TILE_COLUMNS * CODE_BLOCK // 2, 3 * COLUMNS
CODED_PART_BYTES = LINES_AT + BLOCKS * LINES_BYTES
BYTES = ir.VectorType(ir.IntType(8), 4 * COLUMNS)
SHORTS, LONGS = (ir.VectorType(ir.IntType(bits), 2 * COLUMNS) for bits in (16, 32))


def pack_codes(codes: Codes, num_tiles: int) -> torch.Tensor:
    """Return (num_tiles, K / CODE_BLOCK, CODED_PART_BYTES) uint8. Scales must follow, which kernels read too."""
    shape = num_tiles, BLOCKS, COLUMNS, -1, QUAD_PAIRS, 2, 2, 2  # the last three: quad, half, input
    by_half = of_tiles(codes.codes, num_tiles).view(shape).permute(0, 3, 1, 4, 2, 6, 5, 7)
    both = by_half[..., 0] << 4 | by_half[..., 1]
    lines = torch.stack([of_tiles(values, num_tiles) for values in (codes.steps, codes.nudges, codes.bases)])
    lines = lines.view(3, num_tiles, BLOCKS, COLUMNS, -1).permute(1, 4, 2, 0, 3)
    return torch.cat((both.flip(-1).flatten(2), lines.flatten(2)), dim=2)


class CodedColumns:
    """Emits code for column block `b` of a part: vectors of 16 columns."""

    def __init__(self, builder: Any, part_at: Any, b: int) -> None:
        self._builder, self._codes_at = builder, builder.add(part_at, LONG(b * QUAD_PAIRS * 64))
        lines = read_at(builder, part_at, LONG(LINES_AT + b * LINES_BYTES), BYTES)  # and what follows
        steps, nudges, self._bases = (self._spread(lines, kind) for kind in range(3))
        low = builder.and_(nudges, _shorts(0x00FF))
        # of a code in the highest 4 bits, and of the next one
        self._nudges = builder.shl(low, _shorts(4)), low
        self._high_steps = builder.and_(steps, _shorts(0xFF00))
        self._steps = builder.lshr(self._high_steps, _shorts(8)), builder.lshr(self._high_steps, _shorts(4))

    def quads(self) -> Iterator[Any]:
        """Yield Codes.numbers: for each quad, a word of four bytes per column."""
        build = self._builder
        for codes in self._read_codes():
            first, second = self._product(codes, 0, self._high_steps), self._product(codes, 1, self._steps[1])
            both = emit_call(build, "llvm.fshl.v32i16", SHORTS, [second, first, _shorts(8)])
            yield build.bitcast(build.add(both, self._bases), STEPS)

    def pairs(self) -> Iterator[Any]:
        """Yield the same without bases, in byte_rows.PAIR_ORDER: two numbers of 16 bits per column."""
        for codes in self._read_codes():
            for place, steps in enumerate(self._steps):
                yield self._product(codes, place, steps)

    def base_pairs(self) -> Any:
        """Return (32 * base, base). Times (sum // 32, sum % 32), that is base * sum."""
        factors = ir.Constant(SHORTS, [CODE_BLOCK, 1] * COLUMNS)
        return self._builder.mul(self._builder.and_(self._bases, _shorts(0x00FF)), factors)

    def _read_codes(self) -> Iterator[Any]:
        """Yield two codes for each half of a quad, in the upper 8 of 16 bits."""
        for pair in range(QUAD_PAIRS):
            packed = read_at(self._builder, self._codes_at, LONG(pair * 64), SHORTS)
            yield packed
            yield self._builder.shl(packed, _shorts(8))

    def _product(self, codes: Any, place: int, steps: Any) -> Any:
        """Return the upper half of (code, nudge) * step. `place`: of the code, from the highest bits."""
        build = self._builder
        code = build.or_(build.and_(codes, _shorts(0xF000 >> 4 * place)), self._nudges[place])
        factors = build.zext(code, LONGS), build.zext(steps, LONGS)
        return build.trunc(build.lshr(build.mul(*factors), ir.Constant(LONGS, [16] * 2 * COLUMNS)), SHORTS)

    def _spread(self, lines: Any, kind: int) -> Any:
        """Copy a column's byte to all four bytes of its word."""
        places = [kind * COLUMNS + column for column in range(COLUMNS) for _ in range(4)]
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), len(places)), places)
        return self._builder.bitcast(self._builder.shuffle_vector(lines, lines, lanes), SHORTS)


def _shorts(value: int) -> Any:
    return ir.Constant(SHORTS, [value] * 2 * COLUMNS)
