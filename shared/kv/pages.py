"""Allocate page ids, last freed first. PageAllocator knows no requests, rows or contents."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from shared.core.errors import IntegrityError

PageIds = npt.NDArray[np.int32]
Generations = npt.NDArray[np.uint64]


class PageAllocator:
    """Owner of pages 1 .. num_pages-1. Page 0, the sink that padding writes to, is never handed out.

    `generation` (num_pages,) uint64 increases at alloc and free; it is odd while a page is in use. Over shm, a peer
    compares a copied page's generation with the announced one. `on_free` gets pages just before they are freed.
    """

    def __init__(
        self,
        num_pages: int,
        generation: Generations | None = None,
        on_free: Callable[[PageIds], None] | None = None,
    ) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}: the sink and at least one page are needed")
        self.num_pages = num_pages
        self.generation: Generations = np.zeros(num_pages, np.uint64) if generation is None else generation
        if self.generation.shape != (num_pages,) or self.generation.dtype != np.uint64:
            raise ValueError(f"generation must be uint64 of shape ({num_pages},)")
        self.on_free = on_free
        # stack: | free ... free | used up |     next: stack[num_free - 1]
        self._stack: PageIds = np.arange(num_pages - 1, 0, -1, dtype=np.int32)
        self._num_free = num_pages - 1
        self._is_free = np.ones(num_pages, np.bool_)
        self._is_free[0] = False
        self._scratch = np.zeros(num_pages, np.int32)

    @property
    def num_total(self) -> int:
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return self._num_free

    def is_free(self) -> npt.NDArray[np.bool_]:
        """Return a copy of the mask of free pages, (num_pages,). The sink's entry is False."""
        return self._is_free.copy()

    def alloc(self, n: int) -> PageIds | None:
        """Return n page ids, (n,) int32 owned by the caller, or None if fewer are free."""
        if n < 0:
            raise ValueError(f"alloc({n})")
        if n > self._num_free:
            return None
        top = self._num_free
        pages = self._stack[top - n : top][::-1].copy()
        self._num_free = top - n
        self._is_free[pages] = False
        self.generation[pages] += np.uint64(1)
        return pages

    def free(self, pages: PageIds) -> None:
        """Take back all pages, or take back none and raise IntegrityError."""
        pages = np.asarray(pages, dtype=np.int32)
        if pages.size == 0:
            return
        self._refuse_bad(pages)
        if self.on_free is not None:
            self.on_free(pages)
        top = self._num_free
        self._stack[top : top + pages.size] = pages[::-1]
        self._num_free = top + pages.size
        self._is_free[pages] = True
        self.generation[pages] += np.uint64(1)

    def _refuse_bad(self, pages: PageIds) -> None:
        outside = (pages < 0) | (pages >= self.num_pages)
        if outside.any():
            raise IntegrityError(f"page {pages[outside][0]} is out of range 1..{self.num_total}")
        if (pages == 0).any():
            raise IntegrityError("page 0 is the sink and can't be freed")
        double = self._is_free[pages]
        if double.any():
            raise IntegrityError(f"page {pages[double][0]} is freed twice")
        order = np.arange(pages.size, dtype=np.int32)
        self._scratch[pages] = order  # a repeated id keeps only its last index
        twice = self._scratch[pages] != order
        if twice.any():
            raise IntegrityError(f"page {pages[twice][0]} is freed twice in one call")

    def problems(self) -> list[str]:
        found: list[str] = []
        stack = self._stack[: self._num_free]
        if int(self._is_free.sum()) != self._num_free:
            found.append(f"{self._num_free} pages on the free list, {int(self._is_free.sum())} marked free")
        ids, counts = np.unique(stack, return_counts=True)
        found += [f"page {page} is on the free list twice" for page in ids[counts > 1]]
        found += [f"page {page} is on the free list but not marked free" for page in ids[~self._is_free[ids]]]
        in_use = (self.generation & np.uint64(1)).astype(np.bool_)
        wrong = np.flatnonzero(in_use[1:] == self._is_free[1:]) + 1
        found += [f"page {page}: generation does not tell whether it is free" for page in wrong]
        return found
