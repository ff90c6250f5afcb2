"""ReqToTokenPool: rows come back clean, and a snapshot is nobody's view."""

from __future__ import annotations

import numpy as np
import pytest

from shared.core.errors import IntegrityError
from shared.kv.pages import PageIds
from shared.kv.rows import ReqToTokenPool
from tests.support.cores.books import check_books


def ids(*pages: int) -> PageIds:
    return np.array(pages, dtype=np.int32)


def filled() -> ReqToTokenPool:
    pool = ReqToTokenPool(num_rows=4, max_pages_per_row=5)
    for pages in (ids(7, 8, 9), ids(4)):
        row = pool.alloc_row()
        assert row is not None
        pool.append(row, pages)
    return pool


def test_row_0_is_never_given_out_and_a_freed_row_is_reused_next() -> None:
    pool = ReqToTokenPool(4, 5)
    assert [pool.alloc_row() for _ in range(4)] == [1, 2, 3, None]
    pool.free_row(2)
    assert pool.num_free == 1
    assert pool.alloc_row() == 2
    check_books(pool)


def test_a_freed_row_is_cleared() -> None:
    pool = filled()
    pool.free_row(1)
    assert not pool.table[1].any()
    assert pool.num_pages[1] == 0
    check_books(pool)


def test_pages_are_appended_and_overwritten_without_holes() -> None:
    pool = filled()
    pool.append(2, ids(5, 6))
    pool.set_pages(2, 1, ids(3))
    assert pool.pages_of(2).tolist() == [4, 3, 6]
    assert pool.num_pages[2] == 3
    with pytest.raises(IntegrityError, match="row 2: new pages begin at 4, past"):
        pool.set_pages(2, 4, ids(1))
    with pytest.raises(IntegrityError, match="row 2: 6 pages.*room for 5"):
        pool.append(2, ids(1, 2, 3))
    assert pool.pages_of(2).tolist() == [4, 3, 6]


def test_a_snapshot_is_trimmed_padded_and_a_copy() -> None:
    pool = filled()
    snapshot = pool.snapshot([2, 0, 1])[0]
    assert snapshot.dtype == np.int32
    assert snapshot.flags.c_contiguous
    assert snapshot.tolist() == [[4, 0, 0], [0, 0, 0], [7, 8, 9]]
    pool.free_row(1)
    assert snapshot[2].tolist() == [7, 8, 9], "a step in flight reads its own copy"


def test_a_snapshot_has_a_column_even_when_there_is_nothing() -> None:
    pool = filled()
    assert pool.snapshot([0])[0].tolist() == [[0]]
    assert pool.snapshot([])[0].shape == (0, 1)


@pytest.mark.parametrize(("row", "names"), [(0, "row 0 is out of range"), (4, "row 4"), (3, "row 3 is not in use")])
def test_a_row_that_is_not_in_use_is_refused(row: int, names: str) -> None:
    pool = filled()
    with pytest.raises(IntegrityError, match=names):
        pool.free_row(row)
    with pytest.raises(IntegrityError, match=names):
        pool.append(row, ids(1))
    check_books(pool)


def test_a_table_that_holds_no_request_is_refused() -> None:
    with pytest.raises(ValueError, match="no room for a request"):
        ReqToTokenPool(1, 5)


def test_integrity_names_what_was_corrupted() -> None:
    pool = filled()
    pool.table[3, 1] = 2
    pool.table[1, 1] = 0
    pool.table[2, 4] = 6
    with pytest.raises(IntegrityError) as caught:
        check_books(pool)
    assert "row 3 is free but not cleared" in caught.value.message
    assert "row 1 lists page 0" in caught.value.message
    assert "row 2 has entries past its end" in caught.value.message
    other = filled()
    other._free_rows.append(1)
    with pytest.raises(IntegrityError, match="do not add up"):
        check_books(other)
