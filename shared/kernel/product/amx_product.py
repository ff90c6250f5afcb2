"""Multiplies rounded rows and a share's tiles with AMX.

    job:    up to 16 rows, times one block of a tile; or of half a tile, if x has two bytes
    order:  all rows, then the next columns, so that these numbers stay in cache
    room:   [configuration][dots of a job][sums of all rows][numbers of codes, of half a tile]

Beside a job's products, other units scale and add the job before, and at last unpack codes for the next columns.
"""

from __future__ import annotations

from typing import NamedTuple

from shared.kernel.code.jit import copied, inlined, prefetch
from shared.kernel.code.scratch import LINE_BYTES
from shared.kernel.product import amx
from shared.kernel.product.amx_code import add_registers, multiply_beside, unpack_codes
from shared.kernel.product.packed_codes import TILE_HALVES
from shared.kernel.team.shares import TILE_COLUMNS

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


@copied
def multiply_by_amx(
    kind: int, block: int, input_bytes: int, in_codes: bool, step_bytes: int, item: int, share: AmxShare
) -> None:
    groups = (share.num_rows + amx.ROWS - 1) // amx.ROWS
    rows = (share.num_rows + groups - 1) // groups
    halves = input_bytes  # with two bytes, registers hold the sums of half a tile
    per_block, depth, stride = groups * halves, share.depth, share.row_bytes
    num_jobs = share.num_tiles * depth * per_block
    dots, unpacked = share.room + amx.CONFIG_BYTES, share.room + SUMS_AT + share.num_rows * SUMS_BYTES
    # of the job before; none yet
    done_x, done_g, done_step, count = share.rounded, 0, share.weight, 0
    before, before_bytes, after, after_bytes = share.bias, 0, share.out, 0
    amx.begin_registers(share.room, rows)
    if in_codes:
        unpack_codes(kind, share.weight, unpacked)
    for job in range(num_jobs):
        index, half, row = job // per_block, job // groups % halves, job % groups * rows
        tile, g, column = index // depth, index % depth, half * (TILE_COLUMNS // TILE_HALVES)
        step, x = share.weight + index * step_bytes, share.rounded + row * stride
        data, numbers, next_step = x + g * block, step + column * block, 0
        if in_codes:
            numbers = unpacked
            if row + rows >= share.num_rows and job + 1 < num_jobs:
                next_step = step + half * step_bytes
        elif share.num_rows >= FEWEST_FETCHING_ROWS:
            _fetch(step + step_bytes, step_bytes, job % per_block, per_block)
        multiply_beside(
            kind, data, data + depth * block, stride, numbers, next_step, 1 - half, done_x, done_g, depth, done_step,
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
