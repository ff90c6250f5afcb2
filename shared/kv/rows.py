"""Manage the rows of the host's block table. ReqToTokenPool does not know who owns the pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.core.errors import IntegrityError
from shared.kv.pages import PageIds

Rows = Sequence[int] | npt.NDArray[np.int32] | npt.NDArray[np.int64]


class ReqToTokenPool:
    """Owner of rows 1 .. num_rows-1. Row 0 is padding and always points at page 0.

    table: (num_rows, max_pages_per_row) int32 on the host. table[r, :num_pages[r]] are row r's pages in token order;
    with G page groups, entry i * G + g is group g's page i. Group g's pages before page first_page[r, g] are gone or
    were never there. Their entries are 0, as all entries past the end. Scheduler thread only; steps get a `snapshot`.
    """

    def __init__(self, num_rows: int, max_pages_per_row: int, num_groups: int = 1) -> None:
        if num_rows < 2 or max_pages_per_row < 1:
            raise ValueError(f"a table of {num_rows} rows x {max_pages_per_row} pages has no room for a request")
        if max_pages_per_row % num_groups:
            raise ValueError(f"{max_pages_per_row} pages can't be divided among {num_groups} page groups")
        self.num_rows = num_rows
        self.num_groups = num_groups
        self.max_pages_per_row = max_pages_per_row
        self.table: PageIds = np.zeros((num_rows, max_pages_per_row), np.int32)
        self.num_pages: npt.NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.first_page: npt.NDArray[np.int32] = np.zeros((num_rows, num_groups), np.int32)
        self._free_rows = list(range(num_rows - 1, 0, -1))
        self._in_use = [False] * num_rows

    @property
    def num_total(self) -> int:
        return self.num_rows - 1

    @property
    def num_free(self) -> int:
        return len(self._free_rows)

    def alloc_row(self) -> int | None:
        if not self._free_rows:
            return None
        row = self._free_rows.pop()
        self._in_use[row] = True
        return row

    def free_row(self, row: int) -> None:
        """The next `alloc_row` returns this row."""
        self._require_in_use(row)
        self.table[row, : self.num_pages[row]] = 0
        self.num_pages[row] = 0
        self.first_page[row] = 0
        self._in_use[row] = False
        self._free_rows.append(row)

    def rows_in_use(self) -> list[int]:
        return [row for row, used in enumerate(self._in_use) if used]

    def pages_of(self, row: int) -> PageIds:
        """Return a view of the row's pages. Copy this view before the pages change."""
        pages: PageIds = self.table[row, : self.num_pages[row]]
        return pages

    def set_pages(self, row: int, start: int, pages: PageIds) -> None:
        """The row never shrinks. A 0 stands for a page that no step reads: no page of its group may come before it."""
        self._require_in_use(row)
        end = start + len(pages)
        if start < 0 or start > self.num_pages[row]:
            raise IntegrityError(f"row {row}: new pages begin at {start}, past the row's end at {self.num_pages[row]}")
        if end > self.max_pages_per_row:
            raise IntegrityError(f"row {row}: {end} pages, but the table has room for {self.max_pages_per_row}")
        self.table[row, start:end] = pages
        self.num_pages[row] = max(end, int(self.num_pages[row]))
        if not pages.all():
            self._find_first_pages(row)

    def append(self, row: int, pages: PageIds) -> None:
        self._require_in_use(row)
        self.set_pages(row, int(self.num_pages[row]), pages)

    def _find_first_pages(self, row: int) -> None:
        has_page = self.table[row, : self.num_pages[row]].reshape(-1, self.num_groups) != 0
        self.first_page[row] = np.where(has_page.any(axis=0), has_page.argmax(axis=0), len(has_page))

    def has_before(self, row: int, firsts: Sequence[int]) -> bool:
        """Return whether a group may have pages before its page in `firsts`."""
        return any(first > begin for first, begin in zip(firsts, self.first_page[row].tolist(), strict=True))

    def drop_leading(self, row: int, firsts: Sequence[int]) -> tuple[PageIds, npt.NDArray[np.int64]]:
        """Let each group's pages before its page in `firsts` go. Return the pages, and which entries these were."""
        self._require_in_use(row)
        begins, num_groups = self.first_page[row].tolist(), self.num_groups
        length = int(self.num_pages[row]) // num_groups
        ends = [max(begin, min(first, length)) for begin, first in zip(begins, firsts, strict=True)]
        dropped = [
            np.arange(begin, end) * num_groups + g for g, (begin, end) in enumerate(zip(begins, ends, strict=True))
        ]
        entries = np.concatenate(dropped)
        pages: PageIds = self.table[row, entries]
        self.table[row, entries] = 0
        self.first_page[row] = ends
        return pages, entries

    def snapshot(self, rows: Rows) -> tuple[PageIds, ...]:
        """Return each group's (len(rows), P) int32 copy, C-contiguous, padded with 0. P: pages of the longest row, at
        least 1."""
        idx = np.asarray(rows, dtype=np.int64)
        width = max(self.num_groups, int(self.num_pages[idx].max(initial=0)))
        return tuple(self.table[idx, group : width : self.num_groups] for group in range(self.num_groups))

    def _require_in_use(self, row: int) -> None:
        if not 0 < row < self.num_rows:
            raise IntegrityError(f"row {row} is out of range 1..{self.num_total}")
        if not self._in_use[row]:
            raise IntegrityError(f"row {row} is not in use (freed twice, or used after its release)")

    def problems(self) -> list[str]:
        found: list[str] = []
        if sorted(self._free_rows + self.rows_in_use()) != list(range(1, self.num_rows)):
            found.append(f"free rows {self._free_rows} and used rows {self.rows_in_use()} do not add up")
        dirty = np.flatnonzero(self.table.any(axis=1) | (self.num_pages != 0) | self.first_page.any(axis=1))
        found += [f"row {row} is free but not cleared" for row in dirty if not self._in_use[row]]
        places = np.arange(self.max_pages_per_row)[None, :]
        firsts = np.tile(self.first_page, self.max_pages_per_row // self.num_groups)
        past_end = (places >= self.num_pages[:, None]) | (places // self.num_groups < firsts)
        beyond = (self.table != 0) & past_end
        found += [
            f"row {row} has entries past its end or before its first" for row in np.flatnonzero(beyond.any(axis=1))
        ]
        sinks = (self.table == 0) & ~past_end
        found += [f"row {row} lists page 0 as its own" for row in np.flatnonzero(sinks.any(axis=1))]
        return found
