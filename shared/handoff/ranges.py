"""Which pages of a hand-off have arrived. Plain numbers of pages in the request's own order, no page ids."""

from __future__ import annotations

import numpy as np

from shared.core.errors import HandoffFailed
from shared.kv.manager import page_count


class PageRanges:
    """Pages [first, end) are expected, in any order, each once.

    | cached here, not sent | first ........ end |
    `claimed`: a pull was launched for it;  `arrived`: that pull is over.
    """

    def __init__(self, num_tokens: int, cached_tokens: int, page_size: int) -> None:
        self.first = cached_tokens // page_size
        self.end = page_count(num_tokens, page_size)
        self._claimed = np.zeros(self.end, np.bool_)
        self._claimed[: self.first] = True
        self._num_left = self.end - self.first

    def claim(self, first: int, count: int) -> bool:
        """Take a range before it is pulled. False: all of it came before (a duplicate). HandoffFailed: not ours."""
        if first < self.first or first + count > self.end:
            raise HandoffFailed(f"pages {first}..{first + count - 1} where {self.first}..{self.end - 1} were asked for")
        claimed = self._claimed[first : first + count]
        if claimed.all():
            return False
        if claimed.any():
            raise HandoffFailed(f"pages {first}..{first + count - 1} overlap others that came before")
        self._claimed[first : first + count] = True
        return True

    def arrived(self, count: int) -> None:
        self._num_left -= count

    @property
    def all_claimed(self) -> bool:
        return bool(self._claimed.all())

    @property
    def complete(self) -> bool:
        return self._num_left == 0
