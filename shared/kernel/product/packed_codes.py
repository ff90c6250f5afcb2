"""Packs block_weights.Codes for kernels, and emits code that makes numbers of them again.

    a block:  [half a tile][strip]     32 columns
    a strip:  [codes | lines]          CODE_BLOCK inputs
    codes:    [16 columns][pair of quads][column][half][2 bytes]    a quad is four inputs, a half two of them
    lines:    [16 columns][steps | nudges | bases][column]

Two bytes hold four codes, from the highest bits: inputs 0 and 1 of a half of the first quad, then of the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from llvmlite import ir

from shared.kernel.code.jit import emit_call
from shared.kernel.product.block_weights import CODE_BLOCK, SIGN_BIT, Codes
from shared.kernel.product.packed import of_tiles
from shared.kernel.product.product import BLOCKS, COLUMNS, LONG, STEPS, read_at

QUAD_PAIRS = CODE_BLOCK // 8
TILE_HALVES, HALF_BLOCKS = 2, BLOCKS // 2
LINES_AT, LINES_BYTES = HALF_BLOCKS * COLUMNS * CODE_BLOCK // 2, 3 * COLUMNS
STRIP_BYTES = LINES_AT + HALF_BLOCKS * LINES_BYTES
BYTES = ir.VectorType(ir.IntType(8), 4 * COLUMNS)
SHORTS, LONGS = (ir.VectorType(ir.IntType(bits), 2 * COLUMNS) for bits in (16, 32))


def pack_codes(codes: Codes, num_tiles: int, block: int) -> torch.Tensor:
    """Return (num_tiles, K / block, bytes) uint8. Kernels read behind the last strip, so scales must follow."""
    shape = num_tiles, BLOCKS, COLUMNS, -1, QUAD_PAIRS, 2, 2, 2  # the last three: quad, half, input
    by_pair = of_tiles(codes.codes, num_tiles).view(shape).permute(0, 3, 1, 4, 2, 6, 5, 7)
    both = by_pair[..., 0] << 4 | by_pair[..., 1]
    lines = torch.stack([of_tiles(values, num_tiles) for values in (codes.steps, codes.nudges, codes.bases)])
    lines = lines.view(3, num_tiles, BLOCKS, COLUMNS, -1).permute(1, 4, 2, 0, 3)
    by_half = [values.unflatten(2, (TILE_HALVES, -1)).flatten(3) for values in (both.flip(-1), lines)]
    strips = torch.cat(by_half, dim=3).unflatten(1, (-1, block // CODE_BLOCK))
    packed: torch.Tensor = strips.transpose(2, 3).flatten(2)
    return packed


class CodedColumns:
    """Emits code for column block `b` of a strip: vectors of 16 columns."""

    def __init__(self, builder: Any, strip_at: Any, b: int) -> None:
        self._builder, self._codes_at = builder, builder.add(strip_at, LONG(b * QUAD_PAIRS * 64))
        lines = read_at(builder, strip_at, LONG(LINES_AT + b * LINES_BYTES), BYTES)  # 48, and 16 more
        steps, nudges, self._bases = (self._spread(lines, kind) for kind in range(3))
        low = builder.and_(nudges, _shorts(0x00FF))
        # for codes in the highest 4 bits, and in the next
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
        """Return (32 * b, b), b = base - SIGN_BIT. Times (sum // 32, sum % 32), that is b * sum."""
        factors = ir.Constant(SHORTS, [CODE_BLOCK, 1] * COLUMNS)
        bases = self._builder.and_(self._bases, _shorts(0x00FF))
        return self._builder.mul(self._builder.sub(bases, _shorts(SIGN_BIT)), factors)

    def _read_codes(self) -> Iterator[Any]:
        """Yield two codes per half of a quad, in the upper bits."""
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
