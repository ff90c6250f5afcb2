"""Multiplies rounded rows and a share's tiles with AMX.

job:    up to 16 rows, times one block and four column blocks of a tile, or two if x has two bytes
order:  all rows, then the next columns, which keeps numbers in cache. A job's products; beside them, since AMX is a
        unit of its own, scaling and adding the job before, and unpacking for the next columns; then storing
room:   [configuration][dots of a job][sums of all rows][numbers of codes]
"""

from __future__ import annotations

from typing import NamedTuple

from shared.kernel import amx
from shared.kernel.amx_code import add_registers, multiply_beside, unpack_codes
from shared.kernel.jit import copied, inlined, prefetch
from shared.kernel.packed_codes import TILE_HALVES
from shared.kernel.scratch import LINE_BYTES
from shared.kernel.shares import TILE_COLUMNS

SUMS_AT = amx.CONFIG_BYTES + amx.DOTS_BYTES
SUMS_BYTES = TILE_COLUMNS * 4  # of a row
FEWEST_FETCHING_ROWS = 64  # with fewer, fetching ahead gains nothing


class AmxShare(NamedTuple):
    """`weight`, `bias`, `out`: the first tile's."""

    rounded: int
    row_bytes: int
    num_rows: int
    weight: int
    num_tiles: int
    depth: int
    bias: int
    room: int
    out: int
    out_bytes: int


@inlined
def room_bytes(num_rows: int, coded_block: int) -> int:
    """`coded_block`: inputs of a coded block."""
    return SUMS_AT + num_rows * SUMS_BYTES + coded_block * TILE_COLUMNS // TILE_HALVES


@copied
def multiply_by_amx(
    kind: int, block: int, input_bytes: int, in_codes: bool, step_bytes: int, item: int, share: AmxShare
) -> None:
    groups = (share.num_rows + amx.ROWS - 1) // amx.ROWS
    rows = (share.num_rows + groups - 1) // groups
    num_steps, depth, stride = share.num_tiles * share.depth, share.depth, share.row_bytes
    dots, unpacked = share.room + amx.CONFIG_BYTES, share.room + SUMS_AT + share.num_rows * SUMS_BYTES
    # of the job before; none yet
    done_x, done_g, done_step, count = share.rounded, 0, share.weight, 0
    before, before_bytes, after, after_bytes = share.bias, 0, share.out, 0
    amx.begin_registers(share.room, rows)
    if in_codes:
        unpack_codes(kind, share.weight, unpacked)
    for job in range(num_steps * input_bytes * groups):
        index, part, row = job // (groups * input_bytes), job // groups % input_bytes, job % groups * rows
        tile, g, column = index // depth, index % depth, part * (TILE_COLUMNS // 2)
        step, x = share.weight + index * step_bytes, share.rounded + row * stride
        data, numbers, next_step = x + g * block, step + column * block, 0
        if in_codes:
            numbers = unpacked
            if row + rows >= share.num_rows and job + 1 < num_steps * input_bytes * groups:
                next_step = step + part * step_bytes
        elif share.num_rows >= FEWEST_FETCHING_ROWS:
            _fetch(step + step_bytes, step_bytes, job % (groups * input_bytes), groups * input_bytes)
        multiply_beside(
            kind, data, data + depth * block, stride, numbers, next_step, 1 - part, done_x, done_g, depth, done_step,
            dots, count, before, before_bytes, after, after_bytes,
        )  # fmt: skip
        amx.store_registers(dots)
        done_x, done_g, done_step, count = x, g, step + column * 4, min(rows, share.num_rows - row)
        sums = share.room + SUMS_AT + row * SUMS_BYTES + column * 4
        before, before_bytes, after, after_bytes = sums, SUMS_BYTES, sums, SUMS_BYTES
        if g == 0:
            before, before_bytes = share.bias + (tile * TILE_COLUMNS + column) * 4, 0
        if g == depth - 1:
            after = share.out + row * share.out_bytes + (tile * TILE_COLUMNS + column) * item
            after_bytes = share.out_bytes
    add_registers(kind, done_x, stride, done_g, depth, done_step, dots, count, before, before_bytes, after, after_bytes)
    amx.end_registers()


@inlined
def _fetch(address: int, num_bytes: int, job: int, num_jobs: int) -> None:
    for line in range(num_bytes * job // num_jobs, num_bytes * (job + 1) // num_jobs, LINE_BYTES):
        prefetch(address + line)
