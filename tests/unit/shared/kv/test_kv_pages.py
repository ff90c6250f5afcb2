"""PageAllocator: all or nothing, last freed first, and nothing is ever handed out or taken back twice."""

from __future__ import annotations

import numpy as np
import pytest

from shared.core.errors import IntegrityError
from shared.kv.pages import PageAllocator, PageIds
from tests.support.cores.books import check_books


def ids(*pages: int) -> PageIds:
    return np.array(pages, dtype=np.int32)


def take(allocator: PageAllocator, n: int) -> PageIds:
    pages = allocator.alloc(n)
    assert pages is not None
    return pages


def test_hands_out_every_page_but_the_sink() -> None:
    allocator = PageAllocator(6)
    assert allocator.num_total == allocator.num_free == 5
    pages = take(allocator, 5)
    assert pages.dtype == np.int32
    assert pages.tolist() == [1, 2, 3, 4, 5]
    assert allocator.num_free == 0
    check_books(allocator)


def test_the_smallest_pool_has_the_sink_and_one_page() -> None:
    def works(num_pages: int) -> bool:
        try:
            return take(PageAllocator(num_pages), num_pages - 1).tolist() == list(range(1, num_pages))
        except ValueError:
            return False

    assert [works(num_pages) for num_pages in (0, 1, 2, 3)] == [False, False, True, True]


@pytest.mark.rule("H32")
def test_is_all_or_nothing() -> None:
    allocator = PageAllocator(4)
    assert allocator.alloc(4) is None
    assert allocator.num_free == 3
    assert take(allocator, 0).tolist() == []
    with pytest.raises(ValueError):
        allocator.alloc(-1)
    check_books(allocator)


def test_last_freed_is_reused_first_and_ids_belong_to_the_caller() -> None:
    allocator = PageAllocator(8)
    pages = take(allocator, 4)
    allocator.free(pages[1:3])
    assert take(allocator, 2).tolist() == [2, 3]
    first = take(allocator, 1)
    allocator.free(first)
    take(allocator, 1)
    assert first.tolist() == [5], "the array must not be a view of the free list"
    check_books(allocator)


def test_generation_rises_at_alloc_and_at_free() -> None:
    generation = np.zeros(4, np.uint64)
    allocator = PageAllocator(4, generation)
    pages = take(allocator, 2)
    assert generation.tolist() == [0, 1, 1, 0]
    allocator.free(pages[:1])
    assert generation.tolist() == [0, 2, 1, 0]
    take(allocator, 1)
    assert generation.tolist() == [0, 3, 1, 0]


@pytest.mark.parametrize(
    ("bad", "names"),
    [
        (ids(1, 0), "page 0 is the sink"),
        (ids(1, 3), "page 3 is freed twice"),
        (ids(2, 1, 2), "page 2 is freed twice in one call"),
        (ids(1, 4), "page 4 is out of range"),
        (ids(-1), "page -1 is out of range"),
    ],
)
def test_a_bad_free_names_the_page_and_changes_nothing(bad: PageIds, names: str) -> None:
    allocator = PageAllocator(4)
    take(allocator, 2)
    with pytest.raises(IntegrityError, match=names):
        allocator.free(bad)
    assert allocator.num_free == 1
    assert allocator.generation.tolist() == [0, 1, 1, 0]
    check_books(allocator)


def test_on_free_sees_pages_that_are_not_yet_free() -> None:
    seen: list[tuple[list[int], int]] = []
    allocator = PageAllocator(4, on_free=lambda pages: seen.append((pages.tolist(), allocator.num_free)))
    allocator.free(take(allocator, 2))
    assert seen == [([1, 2], 1)]


@pytest.mark.parametrize("generation", [np.zeros(3, np.uint64), np.zeros(4, np.int64)])
def test_a_generation_that_does_not_fit_is_refused(generation: np.ndarray) -> None:
    with pytest.raises(ValueError, match="generation"):
        PageAllocator(4, generation)


def test_a_pool_without_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="num_pages"):
        PageAllocator(1)


def test_integrity_names_what_was_corrupted() -> None:
    allocator = PageAllocator(5)
    allocator._stack[0] = 3  # 4 lost, 3 twice
    allocator.generation[2] += np.uint64(1)
    with pytest.raises(IntegrityError, match="page 3 is on the free list twice.*page 2: generation"):
        check_books(allocator)
    other = PageAllocator(5)
    other._is_free[1] = False
    with pytest.raises(IntegrityError, match="4 pages on the free list, 3 marked.*page 1 is on the free list but not"):
        check_books(other)
