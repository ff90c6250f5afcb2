"""What one node has cached, as its CacheEvents tell, and how much of a prompt that is. Sans-IO.

    CacheEvents 1 (cleared), 2, 3, 5      taken up to 3; 4 is asked for, and 5 is of no use yet
    heartbeat: 7 were sent                the last ones were lost: asked for

A node that lies, or an index that is wrong, costs a hit: the node matches its own cache, whatever routers believe.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence

from shared.core.page_identity import KEY_BYTES, MAX_ADAPTERS, identities, prefix_keys
from shared.wire.messages import CacheEvents, Hello

MAX_PAGES = 1 << 20  # of all nodes together: about 150 MB
MAX_SCHEMES = 4  # ways to make keys that one prompt is tried with; nodes of one model have one


class PageIndex:
    """Of one life of one node. `is_asked`: it was asked for what is missing, and has not been heard since."""

    __slots__ = ("_names", "is_asked", "seq")

    def __init__(self) -> None:
        self._names: set[bytes] = set()
        self.seq = 0  # of the last message that was taken
        self.is_asked = False

    def __len__(self) -> int:
        return len(self._names)

    def names(self) -> frozenset[bytes]:
        return frozenset(self._names)

    def take(self, message: CacheEvents) -> bool:
        """False: something is missing before it. What was taken before is passed over."""
        if message.seq <= self.seq:
            return True
        if message.cleared:
            self._names.clear()
        elif message.seq != self.seq + 1:
            return False
        self._names.difference_update(message.removed)
        self._names.update(message.stored)
        self.seq, self.is_asked = message.seq, False
        return True

    def is_behind(self, seq: int) -> bool:
        """Return whether the node has sent something else than was taken. It begins to count anew only when it has
        forgotten us, and so do we."""
        if seq < self.seq:
            self.seq = 0
        return seq != self.seq or not seq

    def forget_pages(self) -> None:
        """There is no room for them. What comes later is taken."""
        self._names.clear()

    def num_pages(self, names: Sequence[bytes], *, has_window: bool) -> int:
        """Return how many pages of a prompt the node has; `names`: of all its pages, the last one first. A cached page
        has all before it cached, so the last one is found by halving. Behind a window only the last few are there,
        and are enough."""
        known = self._names
        if has_window:
            return next((len(names) - index for index, name in enumerate(names) if name in known), 0)
        return len(names) - bisect_left(names, True, key=known.__contains__)


class PromptPages:
    """The page identities of one prompt, made once for each way in which nodes make keys."""

    __slots__ = ("_adapter", "_prompt_ids", "_salt", "_schemes")

    def __init__(self, prompt_ids: Sequence[int], adapter: str, salt: int) -> None:
        self._prompt_ids, self._adapter, self._salt = prompt_ids, adapter, salt
        self._schemes: dict[tuple[int, int, int], list[bytes]] = {}

    def cached_tokens(self, index: PageIndex, hello: Hello) -> int:
        """Return the tokens of the prompt that a node need not compute, as far as is known: never all of them."""
        if not len(index):
            return 0
        count = index.num_pages(self.names(hello), has_window=hello.has_window)
        return min(count * hello.fingerprint.page_size, len(self._prompt_ids) - 1)

    def names(self, hello: Hello) -> list[bytes]:
        """Return the identities of the pages that the prompt fills on this node, the last one first."""
        slot = self._slot(hello) if self._adapter else 0
        scheme = hello.fingerprint.page_size, slot, min(1, hello.key_lookahead)
        names = self._schemes.get(scheme)
        if names is None:
            names = self._make(*scheme) if len(self._schemes) < MAX_SCHEMES else []
            self._schemes[scheme] = names
        return names

    def _slot(self, hello: Hello) -> int:
        return next((i for i, own in enumerate(hello.adapters, start=1) if own.digest == self._adapter), 0)

    def _make(self, page_size: int, slot: int, lookahead: int) -> list[bytes]:
        if not page_size or slot > MAX_ADAPTERS:
            return []
        keys = prefix_keys(array("q", self._prompt_ids).tobytes(), slot, lookahead, self._salt)
        width = page_size * KEY_BYTES
        return list(identities(keys[: len(keys) // width * width], page_size))[::-1]
