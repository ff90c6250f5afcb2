"""Track the arrived pages of a hand-off, by layer. Page numbers follow the order of the request's tokens."""

from __future__ import annotations

import numpy as np

from shared.core.errors import HandoffFailed
from shared.kv.manager import page_count
from shared.transfer.interface import WHOLE, Part


class PageRanges:
    """Expects pages [first, end) in any order, and each layer of a page once.

    | cached here, not sent | first ........ end |

    A claimed page was announced by the source. An arrived page was pulled.
    """

    def __init__(self, num_tokens: int, cached_tokens: int, page_size: int, num_layers: int = 1) -> None:
        self.first = cached_tokens // page_size
        self.end = page_count(num_tokens, page_size)
        # [page, layer]. The last layer's entry also covers the planes that follow the layers in the page.
        self._claimed = np.zeros((self.end, num_layers), np.bool_)
        self._claimed[: self.first] = True
        self._arrived = self._claimed.copy()
        self.num_whole = self.first  # how many pages, from the first one on, are here with all layers

    def claim(self, first: int, count: int, part: Part = WHOLE) -> bool:
        """Claim pages before their pull. Return False if all are claimed already.

        Raise HandoffFailed if only some are claimed, or if pages or layers are out of range.
        """
        if first < self.first or first + count > self.end:
            raise HandoffFailed(f"got pages {first}..{first + count - 1}, asked for {self.first}..{self.end - 1}")
        layers = self._layers(part)
        claimed = self._claimed[first : first + count, layers]
        if claimed.all():
            return False
        if claimed.any():
            raise HandoffFailed(f"pages {first}..{first + count - 1} overlap earlier ones")
        self._claimed[first : first + count, layers] = True
        return True

    def arrived(self, first: int, count: int, part: Part = WHOLE) -> None:
        self._arrived[first : first + count, self._layers(part)] = True
        while self.num_whole < self.end and self._arrived[self.num_whole].all():
            self.num_whole += 1

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
