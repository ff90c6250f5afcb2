"""Our matrix product: against float64, and the same bits for any number of rows and threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shared.kernel.code.jit import compile_task, longs_at
from shared.kernel.product.block_product import work_of
from shared.kernel.product.block_weights import BlockFormat
from shared.kernel.product.product import (
    DEALT,
    NUM_TILES,
    NUM_WORDS,
    TileLinear,
    X,
    pack,
    share_of,
    supports,
)
from shared.kernel.team import shares
from shared.kernel.team.program import Program
from shared.kernel.team.shares import ProductWork, cut
from shared.kernel.team.team import Team

DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(not supports(64, dtype), reason="not on this processor"))
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize(("columns", "inputs", "threads"), [(128, 64, 1), (100, 34, 1), (320, 64, 3), (64, 2, 2)])
def test_equals_float64(
    columns: int, inputs: int, threads: int, dtype: torch.dtype, out_dtype: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(columns, inputs).to(dtype), torch.randn(20, inputs).to(dtype)
    for bias in (None, torch.randn(columns).to(dtype)):
        linear = TileLinear(pack(weight, bias), Team(threads), out_dtype)
        want = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
        whole = linear(x)
        assert whole.dtype == (out_dtype or dtype) and whole.is_contiguous()
        tolerance = 1e-2 if whole.dtype == torch.bfloat16 else 5e-5
        torch.testing.assert_close(whole.double(), want, atol=tolerance, rtol=tolerance)
        for rows in range(1, 20):
            assert torch.equal(linear(x[:rows]), whole[:rows])


def test_neighbouring_shares_have_neighbouring_rows() -> None:
    def first_row(words: Any, share: int, worker: int) -> None:
        longs_at(words[X])[share] = share_of(words, share)[2]

    found, words = np.zeros(6, np.int64), np.zeros((1, NUM_WORDS), np.int64)
    program = Program(Team(1), [compile_task(first_row)], words)
    words[0, [NUM_TILES, X, *DEALT]] = 5, found.ctypes.data, 10, 6, 4
    program.run()
    assert found.tolist() == [0, 0, 4, 4, 8, 8]


@pytest.mark.parametrize("most", [1 << 12, 1 << 17, 1 << 26])
def test_same_bits_however_the_work_is_cut(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(2)
    weight, x = torch.randn(320, 64, generator=draw), torch.randn(70, 64, generator=draw)
    want = torch.cat([TileLinear(pack(weight), Team(1))(row) for row in x.split(1)])
    monkeypatch.setattr(shares, "MOST_COST", most)
    shares.cut_passes.cache_clear()
    linears = [TileLinear(pack(weight), Team(threads)) for threads in (1, 2, 3)]
    found = [linear(x) for linear in linears]
    num_shares = [cut(linear.work, len(x), 2).num_shares for linear in linears]
    shares.cut_passes.cache_clear()
    assert all(torch.equal(one, want) for one in found)
    assert num_shares == [{1 << 12: 60, 1 << 17: 20, 1 << 26: 2}[most]] * 3


AMX_WORK = work_of(1, 64, BlockFormat("", 8, 0, block=64), by_amx=True)
MOST_WEIGHTS = 1 << 23  # of a share: a core needs milliseconds to fetch more
SHAPES = [(9, 576), (15, 576), (48, 576), (9, 1536), (768, 576), (1, 64), (2004, 4096)]


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
@pytest.mark.parametrize(
    "kind", [ProductWork(1, 64, 128, 6), ProductWork(1, 64, 128, 4, rounding=1), AMX_WORK], ids=str
)
@pytest.mark.parametrize(("num_tiles", "num_inputs"), SHAPES)
def test_threads_finish_together_and_shares_are_short(
    num_tiles: int, num_inputs: int, kind: ProductWork, threads: int
) -> None:
    for num_rows in (1, 8, 32, 96, 512, 1500, 8192):
        work = kind._replace(num_tiles=num_tiles, num_inputs=num_inputs, row_bytes=2 * num_inputs)
        num_shares, rows = cut(work, num_rows, threads)
        groups = -(-num_rows // rows)
        assert num_shares % groups == 0 and rows <= work.most_rows
        runs = num_shares // groups
        tiles = [num_tiles * (run + 1) // runs - num_tiles * run // runs for run in range(runs)]
        most = max(shares.MOST_COST * work.speed, work.pass_rows * num_inputs * 64)
        assert min(tiles) >= 1 and max(tiles) * rows * num_inputs * 64 <= most
        assert max(tiles) == 1 or max(tiles) * num_inputs * 64 <= MOST_WEIGHTS
        if threads == 2 and num_rows >= 512 and num_tiles > 1:
            free = [0, 0]
            for tile_count in tiles:  # shares are taken in turn, all groups of a run after one another
                for first in range(0, num_rows, rows):
                    free.sort()
                    free[0] += tile_count * min(rows, num_rows - first)
            assert 2 * max(free) <= 1.06 * num_tiles * num_rows
