"""Our matrix product on the CPU: weights are packed once, and each result is summed in the order of k.

    weights, packed:  [tile of 64 columns][k, or pair of k][column]      16 columns of a step form one 64-byte vector
    tile:             up to 6 rows x 4 such vectors of sums, in registers (without AVX-512, see blocks_together)

Weights are prefetched by hand, because the hardware prefetcher is too slow for several rows.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

from shared.kernel.code.jit import (
    NUM_ROWS,
    NUM_SHARES,
    compile_task,
    emit_call,
    emit_for_floats,
    emit_prefetch,
    emitted_for_constants,
    inlined,
    part_of,
    processor_features,
)
from shared.kernel.product.packed import Packed, of_columns
from shared.kernel.team.program import Program
from shared.kernel.team.shares import TILE_COLUMNS, ProductWork, cut
from shared.kernel.team.team import Team

COLUMNS, BLOCKS, MOST_ROWS = 16, TILE_COLUMNS // 16, 6
STEP_BYTES = TILE_COLUMNS * 4
FETCH_AHEAD = 16 * STEP_BYTES  # bytes: far enough for memory to answer, near enough to stay cached
FLOAT, LONG, WORD = ir.FloatType(), ir.IntType(64), ir.IntType(32)
BOOL = ir.IntType(1)
SUMS, STEPS = ir.VectorType(FLOAT, COLUMNS), ir.VectorType(WORD, COLUMNS)

# A task's words.
NUM_TILES, DEPTH, X, WEIGHT, BIAS, OUT, SHARE_ROWS = range(2, 9)
NUM_WORDS = 9
# words that change with the number of rows
DEALT = [NUM_ROWS, NUM_SHARES, SHARE_ROWS]


def supports(num_inputs: int, dtype: torch.dtype) -> bool:
    """Return whether these kernels can run. The processor must fuse a product and a sum."""
    is_fused = has_wide_vectors() or bool(processor_features().get("fma", False))
    return is_fused and (dtype != torch.bfloat16 or num_inputs % 2 == 0)


def has_wide_vectors() -> bool:
    return bool(processor_features().get("avx512f", False))


def has_pair_products() -> bool:
    return bool(processor_features().get("avx512bf16", False))


class TileLinear:
    """Multiplies x (M, in) in the weight's dtype into a new, contiguous (M, out), bfloat16 or float32."""

    def __init__(self, packed: Packed, team: Team, out_dtype: torch.dtype | None = None) -> None:
        self.out_features, self.in_features = packed.shape
        self._packed, self._bias = packed.weight, packed.bias
        self.out_dtype = out_dtype or packed.dtype
        self.task = make_task(packed.dtype == torch.bfloat16, self.out_dtype == torch.bfloat16)
        row_bytes = self.in_features * packed.dtype.itemsize
        self._team = team
        self.work = ProductWork(len(self._packed), self.in_features, row_bytes, MOST_ROWS)
        self._program = Program(team, [self.task], np.zeros((1, NUM_WORDS), np.int64))
        self.fill(self._program.words[0])

    def fill(self, words: npt.NDArray[np.int64]) -> None:
        """Fill all words except X, OUT and DEALT."""
        words[NUM_TILES], words[DEPTH] = self._packed.shape[0], self._packed.shape[1]
        words[WEIGHT], words[BIAS] = self._packed.data_ptr(), self._bias.data_ptr()

    @property
    def is_whole(self) -> bool:
        return len(self._bias) == self.out_features

    def scratch_bytes(self, num_rows: int) -> int:
        return 0

    def empty(self, num_rows: int) -> torch.Tensor:
        return torch.empty((num_rows, len(self._bias)), dtype=self.out_dtype)

    def cut(self, out: torch.Tensor) -> torch.Tensor:
        return out if self.is_whole else out[:, : self.out_features].contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x, out, words = x.contiguous(), self.empty(len(x)), self._program.words[0]
        words[X], words[OUT] = x.data_ptr(), out.data_ptr()
        words[DEALT] = len(x), *cut(self.work, len(x), self._team.size)
        self._program.run()
        return self.cut(out)


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
    tiles = pack_tiles(weight)
    return Packed((weight.shape[0], weight.shape[1]), weight.dtype, tiles, of_columns(bias, len(tiles)))


def pack_tiles(weight: torch.Tensor) -> torch.Tensor:
    """Pack float32 (out, in) into (tiles, in, 64, 1), bfloat16 into (tiles, in / 2, 64, 2), padded with 0."""
    num_columns, num_inputs = weight.shape
    together = 2 if weight.dtype == torch.bfloat16 else 1
    padded = -(-num_columns // TILE_COLUMNS) * TILE_COLUMNS
    if padded != num_columns:
        weight = torch.cat((weight, weight.new_zeros(padded - num_columns, num_inputs)))
    tiles = weight.view(padded // TILE_COLUMNS, TILE_COLUMNS, num_inputs // together, together)
    return tiles.transpose(1, 2).contiguous()


@functools.cache
def make_task(is_half: bool, out_half: bool) -> Any:
    item = 2 if out_half else 4

    def product(words: Any, share: int, worker: int) -> None:
        num_tiles, depth = words[NUM_TILES], words[DEPTH]
        row_bytes, out_bytes, tile_bytes = depth * 4, num_tiles * TILE_COLUMNS * item, depth * STEP_BYTES
        first, end, first_row, num_rows = share_of(words, share)
        for tile in range(first, end):
            weight = words[WEIGHT] + tile * tile_bytes
            bias = words[BIAS] + tile * TILE_COLUMNS * 4
            out = words[OUT] + first_row * out_bytes + tile * TILE_COLUMNS * item
            x, left, fetch = words[X] + first_row * row_bytes, num_rows, 1
            while left > 0:
                passes = (left + MOST_ROWS - 1) // MOST_ROWS
                # 7 rows: passes of 4 and 3 instead of 6 and 1
                rows = (left + passes - 1) // passes
                if rows == 6:
                    multiply_tile(6, is_half, out_half, x, row_bytes, weight, depth, bias, out, out_bytes, fetch)
                elif rows == 5:
                    multiply_tile(5, is_half, out_half, x, row_bytes, weight, depth, bias, out, out_bytes, fetch)
                elif rows == 4:
                    multiply_tile(4, is_half, out_half, x, row_bytes, weight, depth, bias, out, out_bytes, fetch)
                elif rows == 3:
                    multiply_tile(3, is_half, out_half, x, row_bytes, weight, depth, bias, out, out_bytes, fetch)
                elif rows == 2:
                    multiply_tile(2, is_half, out_half, x, row_bytes, weight, depth, bias, out, out_bytes, fetch)
                else:
                    multiply_tile(1, is_half, out_half, x, row_bytes, weight, depth, bias, out, out_bytes, fetch)
                left -= rows
                x += rows * row_bytes
                out += rows * out_bytes
                fetch = 0

    return compile_task(product)


@inlined
def share_of(words: Any, share: int) -> tuple[int, int, int, int]:
    """Return a share's first tile, end tile, first row and number of rows. Shares are ordered by rows first."""
    num_tiles, num_rows, share_rows = words[NUM_TILES], words[NUM_ROWS], words[SHARE_ROWS]
    groups = max(1, (num_rows + share_rows - 1) // share_rows)
    runs = words[NUM_SHARES] // groups
    run, first_row = share % runs, share // runs * share_rows
    first, end = part_of(num_tiles, run, runs)
    return first, end, first_row, min(share_rows, num_rows - first_row)


class _Half(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Half)

    def __hash__(self) -> int:
        return hash(_Half)


@emitted_for_constants
def multiply_tile(
    typing_context: Any,
    rows: Any,
    is_half: Any,
    out_half: Any,
    x: Any,
    x_stride: Any,
    weight: Any,
    depth: Any,
    bias: Any,
    out: Any,
    out_stride: Any,
    fetch: Any,
) -> Any:
    """Emit bias + product over all k, for `rows` rows of x and BLOCKS column blocks.

    Constants: rows, is_half, out_half. depth: number of steps of k. fetch: 0 if the weights are cached. The other
    arguments are addresses, or strides in bytes."""
    if not all(isinstance(constant, types.Literal) for constant in (rows, is_half, out_half)):
        raise TypeError("rows, is_half and out_half must be constants")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        together = blocks_together(rows.literal_value, has_wide_vectors())
        for first in range(0, BLOCKS, together):
            blocks = range(first, first + together)
            _multiply_blocks(builder, rows.literal_value, is_half.literal_value, out_half.literal_value, blocks, args)
        return context.get_dummy_value()

    return types.void(rows, is_half, out_half, *(types.int64,) * 8), codegen


def blocks_together(rows: int, is_wide: bool) -> int:
    """Return the number of column blocks whose sums fit the registers.

    AVX-512 has 32 registers of 16 lanes. With AVX2, a vector of 16 sums takes 2 of 16 registers; 6 fit beside the
    weights."""
    return BLOCKS if is_wide or rows == 1 else 2 if rows <= 3 else 1


def _multiply_blocks(builder: Any, rows: int, is_half: bool, out_half: bool, blocks: range, args: Any) -> None:
    _, _, _, x_at, row_bytes, weight_at, steps, bias_at, out_at, out_bytes, fetch_it = args
    # a loop over some column blocks skips cache lines, which the hardware prefetcher can't follow
    is_far = builder.icmp_signed("!=", fetch_it, LONG(0)) if len(blocks) == BLOCKS else BOOL(1)
    multiply = multiply_pairs if is_half else multiply_floats
    row_at = [builder.add(x_at, builder.mul(row_bytes, LONG(r))) for r in range(rows)]
    start = {b: read_at(builder, bias_at, LONG(4 * COLUMNS * b), SUMS) for b in blocks}
    tile = [(r, b) for r in range(rows) for b in blocks]
    # the compiler keeps these in registers
    sums = {(r, b): cgutils.alloca_once(builder, SUMS) for r, b in tile}
    for r, b in tile:
        builder.store(start[b], sums[r, b])
    with cgutils.for_range(builder, steps) as loop:
        step_at = builder.add(weight_at, builder.mul(loop.index, LONG(STEP_BYTES)))
        columns = {b: read_at(builder, step_at, LONG(4 * COLUMNS * b), STEPS) for b in blocks}
        with builder.if_then(is_far):
            for b in blocks:
                emit_prefetch(builder, builder.add(step_at, LONG(FETCH_AHEAD + 4 * COLUMNS * b)))
        for r, at in enumerate(row_at):
            step = spread(builder, read_at(builder, at, builder.mul(loop.index, LONG(4)), WORD))
            for b, column in columns.items():
                builder.store(multiply(builder, builder.load(sums[r, b]), column, step), sums[r, b])
    item = 2 if out_half else 4
    for r, b in tile:
        target = builder.add(out_at, builder.add(builder.mul(out_bytes, LONG(r)), LONG(item * COLUMNS * b)))
        total = builder.load(sums[r, b])
        value = round_to_half(builder, total) if out_half else total
        write_at(builder, target, value, item)


def read_at(builder: Any, address: Any, num_bytes: Any, kind: Any) -> Any:
    return builder.load(_pointer(builder, address, num_bytes, kind), align=4)


def write_at(builder: Any, address: Any, value: Any, align: int = 4, num_bytes: int = 0) -> None:
    builder.store(value, _pointer(builder, address, LONG(num_bytes), value.type), align=align)


def _pointer(builder: Any, address: Any, num_bytes: Any, kind: Any) -> Any:
    """Don't add constants to the address: LLVM would move each such address out of a loop, into a register."""
    first = builder.inttoptr(address, ir.IntType(8).as_pointer())
    return builder.bitcast(builder.gep(first, [num_bytes]), kind.as_pointer())


def spread(builder: Any, word: Any) -> Any:
    """Copy a 32-bit word to all lanes."""
    first = builder.insert_element(ir.Constant(STEPS, ir.Undefined), word, WORD(0))
    return builder.shuffle_vector(first, first, ir.Constant(STEPS, [0] * COLUMNS))


def multiply_pairs(builder: Any, sums: Any, column: Any, step: Any) -> Any:
    """Add the pairs' second products, then the first ones, each rounded once.

    The AVX-512 instruction treats numbers below 2^-126 as 0. Others keep them."""
    if not has_pair_products():
        for half in (upper_halves, lower_halves):
            sums = multiply_floats(builder, sums, half(builder, column), half(builder, step))
        return sums
    halves = ir.VectorType(_Half(), 2 * COLUMNS)
    operands = [sums, builder.bitcast(column, halves), builder.bitcast(step, halves)]
    return emit_call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", SUMS, operands)


def upper_halves(builder: Any, pairs: Any) -> Any:
    return builder.and_(pairs, ir.Constant(STEPS, [-1 << 16] * COLUMNS))


def lower_halves(builder: Any, pairs: Any) -> Any:
    return builder.shl(pairs, ir.Constant(STEPS, [16] * COLUMNS))


def multiply_floats(builder: Any, sums: Any, column: Any, step: Any) -> Any:
    x, y = builder.bitcast(column, SUMS), builder.bitcast(step, SUMS)
    return emit_for_floats(builder, "llvm.fmuladd", x, y, sums)


def round_to_half(builder: Any, sums: Any) -> Any:
    """Round float32 to the nearest bfloat16 bits, ties to even. A NaN may become infinite."""

    def constant(value: int) -> Any:
        return ir.Constant(STEPS, [value] * COLUMNS)

    bits = builder.bitcast(sums, STEPS)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.add(bits, builder.add(odd, constant(0x7FFF)))
    return builder.trunc(builder.lshr(rounded, constant(16)), ir.VectorType(ir.IntType(16), COLUMNS))
