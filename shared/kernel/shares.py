"""How the work of a product is cut into shares: pieces that all threads finish at about the same time, and short ones,
since a thread may only leave between two.

    share:  a run of tiles of columns x a group of rows
    rows:   in whole passes, each of `pass_rows` rows over a tile; a tile's weights are fetched once for all passes of
            a share
"""

from __future__ import annotations

import functools
from typing import NamedTuple

TILE_COLUMNS = 64
MOST_COST = 1 << 26  # multiplications of a share: a millisecond or so
MOST_ROWS = 256  # of a share that goes row by row
MOST_BYTES = 1 << 18  # of a share's rows: they should stay in a core's own cache
FETCH_ROWS = 4  # to fetch a tile takes as long as to multiply so many rows with it


class Work(NamedTuple):
    """What a product does, for any number of rows."""

    num_tiles: int
    num_inputs: int
    row_bytes: int
    pass_rows: int
    is_rounded: bool  # each share rounds its rows first, which takes about as long as one tile

    @property
    def most_rows(self) -> int:
        """Of a share."""
        return max(self.pass_rows, MOST_BYTES // self.row_bytes)


def shares_of(cost: int, most_cost: int, num_threads: int) -> int:
    """Shares of a task whose pieces are dealt out in turn: as many for each thread, none above `most_cost`."""
    return num_threads * max(1, -(-cost // (most_cost * num_threads)))


class Cut(NamedTuple):
    num_shares: int  # runs times groups
    share_rows: int  # of a group; the last one may have fewer


def cut(work: Work, num_rows: int, num_threads: int) -> Cut:
    """`num_rows`: of a step."""
    return cut_passes(work, max(1, -(-num_rows // work.pass_rows)), num_threads)


@functools.lru_cache(maxsize=4096)
def cut_passes(work: Work, num_passes: int, num_threads: int) -> Cut:
    """The cut that ends first; of several, that with the fewest shares."""
    best, best_time = Cut(1, work.pass_rows), -1
    for passes in _parts(num_passes):
        rows = passes * work.pass_rows
        if rows > work.most_rows:
            continue
        groups = -(-num_passes // passes)
        for tiles in _parts(work.num_tiles):
            cost = tiles * (FETCH_ROWS + rows) + rows * work.is_rounded
            if (passes > 1 or tiles > 1) and cost * TILE_COLUMNS * work.num_inputs > MOST_COST:
                continue
            num_shares = groups * -(-work.num_tiles // tiles)
            time = -(-num_shares // num_threads) * cost
            if best_time < 0 or (time, num_shares) < (best_time, best.num_shares):
                best, best_time = Cut(num_shares, rows), time
    return best


@functools.cache
def _parts(total: int) -> list[int]:
    """Sizes of the largest part, for each number of parts that makes a difference."""
    return sorted({-(-total // count) for count in range(1, total + 1)}, reverse=True)
