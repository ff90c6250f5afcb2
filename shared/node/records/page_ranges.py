"""Track the arrived pages of a hand-off or a pull, by layer. Page numbers are entries of the row's page list."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shared.core.errors import HandoffFailed
from shared.kv.pages import PageIds
from shared.transfer.interface import WHOLE, Part


class PageRanges:
    """Expects pages [first, end) in any order, and each layer of a page once.

    | cached here, not sent | first ........ end |

    A claimed page was announced by the source. An arrived page was pulled. No page comes for an entry of 0, which no
    step reads (with windows): the source leaves out the same ones.
    """

    def __init__(self, pages: PageIds, first: int, num_layers: int = 1) -> None:
        """`pages`: the row's page list, as far as it comes."""
        self.first, self.end = first, len(pages)
        self._expected = np.flatnonzero(pages)
        # [page, layer]. The last layer's entry also covers the planes that follow the layers in the page.
        self._claimed = np.ones((self.end, num_layers), np.bool_)
        wanted = self._expected[self._expected >= first]
        self.num_wanted = len(wanted)  # how many pages come
        self._claimed[wanted] = False
        self._arrived = self._claimed.copy()
        self.num_whole = 0  # how many pages, from the first one on, are here with all layers
        self._count_whole()

    def claim(self, first: int, count: int, part: Part = WHOLE) -> bool:
        """Claim pages before their pull. Return False if all are claimed already.

        Raise HandoffFailed if only some are claimed, or if pages or layers are out of range.
        """
        entries = self.entries(first, count)
        if first < self.first or len(entries) < count:
            raise HandoffFailed(f"got {count} pages from {first} on, asked for {self.first}..{self.end - 1}")
        layers = self._layers(part)
        claimed = self._claimed[entries, layers]
        if claimed.all():
            return False
        if claimed.any():
            raise HandoffFailed(f"{count} pages from {first} on overlap earlier ones")
        self._claimed[entries, layers] = True
        return True

    def entries(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return the entries of `count` pages that come from entry `first` on; fewer at the list's end."""
        begin = int(np.searchsorted(self._expected, first))
        return self._expected[begin : begin + count]

    def arrived(self, first: int, count: int, part: Part = WHOLE) -> None:
        self._arrived[self.entries(first, count), self._layers(part)] = True
        self._count_whole()

    def _count_whole(self) -> None:
        missing = np.flatnonzero(~self._arrived[self.num_whole :].all(axis=1))
        self.num_whole = self.num_whole + int(missing[0]) if len(missing) else self.end

    def _layers(self, part: Part) -> slice:
        num_layers = self._claimed.shape[1]
        layers = slice(part.first, part.first + part.count if part.count else num_layers)
        if not layers.start < layers.stop <= num_layers:
            raise HandoffFailed(f"first layer {part.first}, {part.count} layers (0: all later), of {num_layers}")
        return layers

    @property
    def all_claimed(self) -> bool:
        return bool(self._claimed.all())

    @property
    def complete(self) -> bool:
        return self.num_whole == self.end
