"""Computes block_weights.py's product on a CPU.

    weights, packed:  [tile of 64 columns][block of k][numbers | scales | lows]   read in a straight line
    numbers:          [16 columns][quad of k][column][4 bytes]
                      with 4 bits, 4 bytes hold quad q in their low bits and quad q + quads / 2 in their high bits
    codes:            packed_codes.py
    tile:             up to 4 rows x 4 vectors of 16 integer sums, in registers, and as many float sums; of codes, 2

Each share rounds its own rows of x, because a separate task would make all threads wait.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shared.kernel.code.jit import compile_exact_task, copied, processor_features
from shared.kernel.code.scratch import Scratch
from shared.kernel.product import amx
from shared.kernel.product.amx_product import SUMS_AT, SUMS_BYTES, AmxShare, multiply_by_amx
from shared.kernel.product.block_code import BlockForm, multiply_blocks
from shared.kernel.product.block_weights import BlockFormat, BlockWeights
from shared.kernel.product.byte_rows import BYTES_ONLY, PAIRS, PLANES, data_bytes_of, round_block, row_bytes_of
from shared.kernel.product.dot import Dot, best_dot
from shared.kernel.product.packed import Packed, by_block, of_columns, of_tiles
from shared.kernel.product.packed_codes import TILE_HALVES, pack_codes
from shared.kernel.product.product import (
    BIAS,
    BLOCKS,
    COLUMNS,
    DEALT,
    DEPTH,
    NUM_TILES,
    OUT,
    WEIGHT,
    X,
    share_of,
)
from shared.kernel.team.program import Program
from shared.kernel.team.shares import TILE_COLUMNS, ProductWork, cut
from shared.kernel.team.team import Team

MOST_ROWS, MOST_PLANES_ROWS = 4, 2  # of a pass; PLANES need more sums
FEWEST_AMX_ROWS, FEWEST_WIDE_AMX_ROWS = 4, 3  # of one-byte inputs, of two-byte inputs
SCRATCH, SCRATCH_BYTES = 9, 10  # address of thread 0's scratch; bytes per thread
ROW_BYTES = 11  # of a rounded row
NUM_WORDS = 12


def packable(form: BlockFormat) -> BlockFormat:
    """Use float32 scales if the processor can't widen float16."""
    return form if processor_features().get("f16c", False) else replace(form, half_scales=False)


def uses_amx(form: BlockFormat) -> bool:
    is_fit = form.bits == 8 and form.block % amx.ROW_BYTES == 0 and not form.has_low and not form.half_scales
    return is_fit and amx.has_amx(processor_features())


def work_of(num_tiles: int, num_inputs: int, form: BlockFormat, by_amx: bool) -> ProductWork:
    row_bytes = row_bytes_of(num_inputs, form.block, form.input_bytes, form.in_codes)
    if by_amx:
        return ProductWork(
            num_tiles, num_inputs, row_bytes, pass_rows=amx.ROWS, rounding=5, speed=8 // form.input_bytes
        )
    pass_rows = MOST_PLANES_ROWS if layout_of(form) == PLANES else MOST_ROWS
    rounding = 1 if form.hadamard == form.input_bytes == 1 else 2
    return ProductWork(num_tiles, num_inputs, row_bytes, pass_rows, rounding)


def layout_of(form: BlockFormat) -> int:
    """Return the layout of rounded rows without AMX."""
    if form.in_codes:
        return PAIRS
    return BYTES_ONLY if form.input_bytes == 1 else PLANES


def _fixed_room(form: BlockFormat) -> int:
    """Return AMX's room, without rows' sums."""
    return SUMS_AT + (form.block * TILE_COLUMNS // TILE_HALVES if form.in_codes else 0)


class BlockTileLinear:
    """Multiplies x (M, in) into a new, contiguous (M, out), each bfloat16 or float32. `packed`: from `pack`. With a
    `dot`, AMX is not used."""

    def __init__(
        self, packed: Packed, team: Team, out_dtype: torch.dtype | None = None, dot: Dot | None = None
    ) -> None:
        assert packed.form is not None
        self.out_features, self.in_features = packed.shape
        self.format, self._team = packed.form, team
        self._packed, self._bias = packed.weight, packed.bias
        self.out_dtype = out_dtype or packed.dtype
        halves = packed.dtype == torch.bfloat16, self.out_dtype == torch.bfloat16
        by_amx = dot is None and uses_amx(self.format)
        self.task = make_task(self.format, *halves, best_dot(processor_features()) if dot is None else dot, by_amx)
        self.work = work_of(len(self._packed), self.in_features, self.format, by_amx)
        self._scratch = Scratch(team.size)
        self._program = Program(team, [self.task], np.zeros((1, NUM_WORDS), np.int64))
        self.fill(self._program.words[0])

    def fill(self, words: npt.NDArray[np.int64]) -> None:
        """Fill all words except X, OUT, DEALT, SCRATCH and SCRATCH_BYTES."""
        words[NUM_TILES], words[DEPTH] = self._packed.shape[0], self._packed.shape[1]
        words[WEIGHT], words[BIAS] = self._packed.data_ptr(), self._bias.data_ptr()
        words[ROW_BYTES] = self.work.row_bytes

    @property
    def is_whole(self) -> bool:
        return len(self._bias) == self.out_features

    def scratch_bytes(self, num_rows: int) -> int:
        rows = min(num_rows, self.work.most_rows)
        read = -(-rows // amx.ROWS) * amx.ROWS  # AMX reads whole registers
        return read * self.work.row_bytes + _fixed_room(self.format) + rows * SUMS_BYTES

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
    if weight.codes is None:
        ordered = of_tiles(weight.numbers, tiles).view(tiles, BLOCKS, COLUMNS, depth, quads, 4)
        ordered = ordered.permute(0, 3, 1, 4, 2, 5)
        if form.bits == 4:
            ordered = ordered[:, :, :, : quads // 2] | (ordered[:, :, :, quads // 2 :] << 4)
        parts = [ordered.reshape(tiles, depth, -1)]
    else:
        parts = [pack_codes(weight.codes, tiles, form.block)]
    kind = torch.float16 if form.half_scales else torch.float32
    parts += [by_block(values.to(kind), tiles) for values in (weight.scales, weight.lows) if values is not None]
    return torch.cat(parts, dim=2)


@functools.cache
def make_task(form: BlockFormat, is_half: bool, out_half: bool, dot: Dot, has_amx: bool) -> Any:
    """`is_half`, `out_half`: x or results are bfloat16, not float32."""
    whole = BlockForm(
        form.bits, form.block, dot, form.has_low, form.half_scales, out_half, form.in_codes, form.input_bytes
    )
    kind, step_bytes, block, size, zero = whole.packed(), whole.step_bytes, form.block, form.hadamard, form.zero
    input_bytes, in_codes, fixed_room = form.input_bytes, form.in_codes, _fixed_room(form)
    layout, data_bytes = layout_of(form), data_bytes_of(block, input_bytes, in_codes)
    fewest_amx_rows = FEWEST_AMX_ROWS if input_bytes == 1 else FEWEST_WIDE_AMX_ROWS
    item, in_item = 2 if out_half else 4, 2 if is_half else 4

    def block_product(words: Any, share: int, worker: int) -> None:
        num_tiles, depth, row_bytes = words[NUM_TILES], words[DEPTH], words[ROW_BYTES]
        num_inputs, out_bytes, tile_bytes = depth * block, num_tiles * TILE_COLUMNS * item, depth * step_bytes
        first, end, first_row, num_rows = share_of(words, share)
        room = words[SCRATCH] + worker * words[SCRATCH_BYTES]
        by_amx = has_amx and num_rows >= fewest_amx_rows
        rounded = room + fixed_room + num_rows * SUMS_BYTES if by_amx else room
        x = words[X] + first_row * num_inputs * in_item
        if by_amx and in_codes:
            _round_rows(block, size, zero, is_half, PLANES, data_bytes, x, in_item, num_rows, depth, rounded, row_bytes)
        else:
            _round_rows(block, size, zero, is_half, layout, data_bytes, x, in_item, num_rows, depth, rounded, row_bytes)
        weight, bias = words[WEIGHT] + first * tile_bytes, words[BIAS] + first * TILE_COLUMNS * 4
        out = words[OUT] + first_row * out_bytes + first * TILE_COLUMNS * item
        if by_amx:
            amx_share = AmxShare(rounded, row_bytes, num_rows, weight, end - first, depth, bias, room, out, out_bytes)
            multiply_by_amx(kind, block, input_bytes, in_codes, step_bytes, item, amx_share)
            return
        for _ in range(first, end):
            multiply_rows(
                kind, layout == PLANES, rounded, row_bytes, num_rows, weight, depth, bias, 0, out, out_bytes, 1
            )
            weight, bias, out = weight + tile_bytes, bias + TILE_COLUMNS * 4, out + TILE_COLUMNS * item

    return compile_exact_task(block_product)


@copied
def _round_rows(
    block: int, size: int, zero: int, is_half: bool, layout: int, data_bytes: int, x: int, in_item: int, num_rows: int,
    depth: int, rounded: int, row_bytes: int,
) -> None:  # fmt: skip
    for row in range(num_rows):
        source, data = x + row * depth * block * in_item, rounded + row * row_bytes
        for g in range(depth):
            start = data + depth * data_bytes + g * 4
            unit, total, at = start + depth * 4, start + depth * 8, source + g * block * in_item
            own, low = data + g * (data_bytes if layout == PAIRS else block), data + (depth + g) * block
            round_block(block, size, zero, is_half, layout, at, own, low, start, unit, total)


@copied
def multiply_rows(
    kind: int, in_planes: bool, x: int, row_bytes: int, num_rows: int, weight: int, depth: int, before: int,
    before_bytes: int, out: int, out_bytes: int, fetch: int,
) -> None:  # fmt: skip
    """Write to `out`: the rows at `before` plus the product of rounded rows and one tile."""
    left, most = num_rows, MOST_PLANES_ROWS if in_planes else MOST_ROWS
    while left > 0:
        passes = (left + most - 1) // most
        # 5 rows: 3 + 2
        rows = (left + passes - 1) // passes
        if not in_planes and rows == 4:
            multiply_blocks(4, kind, x, row_bytes, weight, depth, before, before_bytes, out, out_bytes, fetch)
        elif not in_planes and rows == 3:
            multiply_blocks(3, kind, x, row_bytes, weight, depth, before, before_bytes, out, out_bytes, fetch)
        elif rows == 2:
            multiply_blocks(2, kind, x, row_bytes, weight, depth, before, before_bytes, out, out_bytes, fetch)
        else:
            multiply_blocks(1, kind, x, row_bytes, weight, depth, before, before_bytes, out, out_bytes, fetch)
        left -= rows
        x += rows * row_bytes
        before += rows * before_bytes
        out += rows * out_bytes
        fetch = 0
