"""Splits a product's work into shares that end at about the same time.

Shares are short, because threads leave a step only between shares.

    share:  a run of tiles of columns x a group of rows
    rows:   whole passes, each of `pass_rows` rows over a tile; a share fetches a tile's weights once for all passes
"""

from __future__ import annotations

import functools
from typing import NamedTuple

TILE_COLUMNS = 64
MOST_COST = 1 << 26  # limit on a share's multiplications: about a millisecond of work
MOST_ROWS = 256  # largest number of rows in a share that treats each row by itself
MOST_BYTES = 1 << 18  # limit on the bytes of a share's rows, to fit a core's own cache
FETCH_ROWS = 4  # multiplying this number of rows by a tile takes as long as fetching the tile


class ProductWork(NamedTuple):
    num_tiles: int
    num_inputs: int
    row_bytes: int
    pass_rows: int
    rounding: int = 0  # each share first rounds its rows, which takes as long as this number of tiles
    speed: int = 1  # how many times as fast as MOST_COST assumes

    @property
    def most_rows(self) -> int:
        return max(self.pass_rows, MOST_BYTES // self.row_bytes)


def shares_of(cost: int, most_cost: int, num_threads: int) -> int:
    """Return the smallest multiple of `num_threads` at which a share costs at most `most_cost`."""
    return num_threads * max(1, -(-cost // (most_cost * num_threads)))


class Cut(NamedTuple):
    num_shares: int  # number of runs of tiles, times groups of rows
    share_rows: int  # rows per group; the last group may have fewer


def cut(work: ProductWork, num_rows: int, num_threads: int) -> Cut:
    return cut_passes(work, max(1, -(-num_rows // work.pass_rows)), num_threads)


@functools.lru_cache(maxsize=4096)
def cut_passes(work: ProductWork, num_passes: int, num_threads: int) -> Cut:
    """Return the fastest cut; of equally fast cuts, the one with the fewest shares."""
    best, best_time = Cut(1, work.pass_rows), -1
    for passes in _parts(num_passes):
        rows = passes * work.pass_rows
        if rows > work.most_rows:
            continue
        groups = -(-num_passes // passes)
        for tiles in _parts(work.num_tiles):
            cost = tiles * (FETCH_ROWS + rows) + rows * work.rounding
            longest = max(cost // work.speed, 2 * FETCH_ROWS * tiles)  # memory is as slow for fast products
            if (passes > 1 or tiles > 1) and longest * TILE_COLUMNS * work.num_inputs > MOST_COST:
                continue
            num_shares = groups * -(-work.num_tiles // tiles)
            time = -(-num_shares // num_threads) * cost
            if best_time < 0 or (time, num_shares) < (best_time, best.num_shares):
                best, best_time = Cut(num_shares, rows), time
    return best


@functools.cache
def _parts(total: int) -> list[int]:
    """Return all different values of ceil(`total` / n), the largest first."""
    return sorted({-(-total // count) for count in range(1, total + 1)}, reverse=True)
