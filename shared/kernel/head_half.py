"""The vocabulary product of a bfloat16 model with float32 results, on processors that multiply bfloat16 pairs.

The library's bfloat16 product rounds its results to bfloat16, where logits tie; its float32 product reads twice the
memory. So this one is ours. Each result is summed in the order of k, whatever the number of rows.

    weights, packed:  [column block of 16][pair of k][column][2]    one pair of 16 columns is one 64-byte vector
    tile:             up to 6 rows x 4 column blocks of sums, all in registers
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from shared.kernel.jit import compile_task, next_ticket
from shared.kernel.team import Team

COLUMNS, BLOCKS = 16, 4
TILE_COLUMNS = COLUMNS * BLOCKS
FLOAT, LONG, WORD = ir.FloatType(), ir.IntType(64), ir.IntType(32)
SUMS, PAIRS = ir.VectorType(FLOAT, COLUMNS), ir.VectorType(WORD, COLUMNS)

# The words of a task's arguments.
TICKET, NUM_THREADS, NUM_ROWS, NUM_TILES, NUM_PAIRS, X, WEIGHT, OUT = range(8)
NUM_WORDS = 8


def supports(num_inputs: int) -> bool:
    """On this processor, for an even number of inputs."""
    return num_inputs % 2 == 0 and bool(llvm.get_host_cpu_features().get("avx512bf16", False))


class HalfHead:
    """x (M, in) bfloat16 -> (M, out) float32, fresh; `in` is even. Keeps its own packed copy of the weight."""

    def __init__(self, weight: torch.Tensor, team: Team) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = pack(weight)
        self._team = team
        self._task = make_task()
        self._words = np.zeros(NUM_WORDS, np.int64)
        self._words[NUM_THREADS] = team.size
        self._words[NUM_TILES], self._words[NUM_PAIRS] = self._packed.shape[0] // BLOCKS, self._packed.shape[1]
        self._words[WEIGHT] = self._packed.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x, words = x.contiguous(), self._words
        out = torch.empty(len(x), self._packed.shape[0] * COLUMNS)
        words[TICKET], words[NUM_ROWS], words[X], words[OUT] = 0, len(x), x.data_ptr(), out.data_ptr()
        self._team.run(self._task.address, words.ctypes.data)
        return out if out.shape[1] == self.out_features else out[:, : self.out_features].contiguous()


def pack(weight: torch.Tensor) -> torch.Tensor:
    """(out, in) -> (blocks, in / 2, 16, 2), `out` filled up with zeros to whole tiles."""
    num_columns, num_inputs = weight.shape
    padded = -(-num_columns // TILE_COLUMNS) * TILE_COLUMNS
    if padded != num_columns:
        weight = torch.cat((weight, weight.new_zeros(padded - num_columns, num_inputs)))
    return weight.view(padded // COLUMNS, COLUMNS, num_inputs // 2, 2).transpose(1, 2).contiguous()


def make_task() -> Any:
    """Each thread takes a run of tiles, so that it reads the weights once and in order."""

    def product(words: Any) -> None:
        thread, num_tiles, num_rows = next_ticket(words), words[NUM_TILES], words[NUM_ROWS]
        per_thread = (num_tiles + words[NUM_THREADS] - 1) // words[NUM_THREADS]
        row_bytes, out_bytes = words[NUM_PAIRS] * 4, num_tiles * TILE_COLUMNS * 4
        block_bytes = words[NUM_PAIRS] * COLUMNS * 4
        for tile in range(thread * per_thread, min((thread + 1) * per_thread, num_tiles)):
            weight = words[WEIGHT] + tile * BLOCKS * block_bytes
            out = words[OUT] + tile * TILE_COLUMNS * 4
            x, row = words[X], 0
            while row < num_rows:
                left = num_rows - row
                if left >= 6:
                    multiply_tile(6, x, row_bytes, weight, block_bytes, words[NUM_PAIRS], out, out_bytes)
                    rows = 6
                elif left >= 3:
                    multiply_tile(3, x, row_bytes, weight, block_bytes, words[NUM_PAIRS], out, out_bytes)
                    rows = 3
                elif left == 2:
                    multiply_tile(2, x, row_bytes, weight, block_bytes, words[NUM_PAIRS], out, out_bytes)
                    rows = 2
                else:
                    multiply_tile(1, x, row_bytes, weight, block_bytes, words[NUM_PAIRS], out, out_bytes)
                    rows = 1
                row += rows
                x += rows * row_bytes
                out += rows * out_bytes

    return compile_task(product)


class _Half(ir.Type):
    """bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Half)

    def __hash__(self) -> int:
        return hash(_Half)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def multiply_tile(
    typing_context: Any,
    rows: Any,
    x: Any,
    x_stride: Any,
    weight: Any,
    block_bytes: Any,
    num_pairs: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """Sums of `rows` (a constant) rows and BLOCKS column blocks over all pairs of k. All others: addresses, bytes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, x_at, row_bytes, weight_at, per_block, pairs, out_at, out_bytes = args
        tile = [(r, b) for r in range(rows.literal_value) for b in range(BLOCKS)]
        sums = {at: cgutils.alloca_once_value(builder, ir.Constant(SUMS, [0.0] * COLUMNS)) for at in tile}
        for at in tile:
            builder.store(ir.Constant(SUMS, [0.0] * COLUMNS), sums[at])
        row_at = [builder.add(x_at, builder.mul(row_bytes, LONG(r))) for r in range(rows.literal_value)]
        block_at = [builder.add(weight_at, builder.mul(per_block, LONG(b))) for b in range(BLOCKS)]
        with cgutils.for_range(builder, pairs) as loop:
            columns = [_read(builder, at, builder.mul(loop.index, LONG(4 * COLUMNS)), PAIRS) for at in block_at]
            for r, at in enumerate(row_at):
                pair = _spread(builder, _read(builder, at, builder.mul(loop.index, LONG(4)), WORD))
                for b, column in enumerate(columns):
                    builder.store(_multiply(builder, builder.load(sums[r, b]), column, pair), sums[r, b])
        for r, b in tile:
            target = builder.add(out_at, builder.add(builder.mul(out_bytes, LONG(r)), LONG(4 * COLUMNS * b)))
            builder.store(builder.load(sums[r, b]), builder.inttoptr(target, SUMS.as_pointer()), align=4)
        return context.get_dummy_value()

    if not isinstance(rows, types.Literal):
        raise TypeError("rows must be a constant")
    return types.void(rows, *(types.int64,) * 7), codegen


def _read(builder: Any, address: Any, num_bytes: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(builder.add(address, num_bytes), kind.as_pointer()), align=4)


def _spread(builder: Any, word: Any) -> Any:
    """One pair of a row in all 16 places."""
    first = builder.insert_element(ir.Constant(PAIRS, ir.Undefined), word, WORD(0))
    return builder.shuffle_vector(first, first, ir.Constant(PAIRS, [0] * COLUMNS))


def _multiply(builder: Any, sums: Any, column: Any, pair: Any) -> Any:
    """sums[n] += column[n][0] * pair[0] + column[n][1] * pair[1]"""
    halves = ir.VectorType(_Half(), 2 * COLUMNS)
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    kind = ir.FunctionType(SUMS, [SUMS, halves, halves])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, [sums, builder.bitcast(column, halves), builder.bitcast(pair, halves)])
