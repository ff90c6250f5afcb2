"""Track one node's cached pages by its CacheEvents, and compute how much of a prompt they cover. Sans-IO.

    CacheEvents 1 (cleared), 2, 3, 5      1 to 3 are taken, 5 is dropped; a CacheReplay asks for all after 3
    heartbeat: 7 were sent                a CacheReplay asks for the lost messages

Pages that a node computes now count too: later requests wait there for them. A wrong index costs at most a cache hit,
because nodes match prompts themselves.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Sequence

from shared.core.page_identity import KEY_BYTES, adapter_of, identities, prefix_keys
from shared.wire.messages import CacheEvents, Hello

MAX_PAGES = 1 << 20  # indexed pages of all nodes together; they take about 120 MB
MAX_SCHEMES = 4  # schemes per prompt; nodes of one model normally share one


class ComingPages(Counter[bytes]):
    """Pages of open prompts, each as often as prompts have it."""

    def remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            if self[name] > 1:
                self[name] -= 1
            else:
                self.pop(name)  # Counter's own `del` is slow


class PageIndex:
    """The cached pages of one incarnation of a node. `is_asked`: whether a replay is awaited.

    `computing`, `arriving`: pages of prompts that the node computes, or whose KV it gets from a prefill node."""

    __slots__ = ("_names", "arriving", "computing", "is_asked", "seq")

    def __init__(self) -> None:
        self._names: set[bytes] = set()
        self.computing, self.arriving = ComingPages(), ComingPages()
        self.seq = 0  # number of the last message taken
        self.is_asked = False

    def __len__(self) -> int:
        return len(self._names)

    def take_events(self, message: CacheEvents) -> bool:
        """Apply a message; ignore an old one. Return False if an earlier message is missing."""
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
        """Return whether messages up to number `seq` are missing. 0: the node has forgotten this router."""
        if not seq:
            self.seq = 0
        return seq > self.seq or not seq

    def forget_pages(self) -> None:
        """Drop the pages to free memory. Later events still apply."""
        self._names.clear()

    def num_pages(self, names: Sequence[bytes], *, has_window: bool, also: Sequence[ComingPages] = ()) -> int:
        """Return how many pages of a prompt the node has, or will have. `names`: the prompt's pages, last first.

        Without a sliding window, all pages before a cached page are cached, so bisection works. With a window, only the
        last few pages are cached, and these are enough."""
        sources: tuple[Container[bytes], ...] = (self._names, *also)
        return max(num_known(names, source, has_window=has_window) for source in sources)


def num_known(names: Sequence[bytes], source: Container[bytes], *, has_window: bool) -> int:
    is_known = source.__contains__
    if has_window:
        return next((len(names) - index for index, name in enumerate(names) if is_known(name)), 0)
    return len(names) - bisect_left(names, True, key=is_known)


def place_in(num_pages: int) -> int:
    """Return the largest power of two up to half of `num_pages`, at least 1."""
    return 1 << max(0, (num_pages // 2).bit_length() - 1)


class PromptPages:
    """One prompt's page identities, made once per scheme (page size, lookahead, adapter)."""

    __slots__ = ("_adapter", "_prompt_ids", "_salt", "_schemes")

    def __init__(self, prompt_ids: Sequence[int], adapter: str, salt: int) -> None:
        self._prompt_ids, self._adapter, self._salt = prompt_ids, adapter, salt
        self._schemes: dict[tuple[int, int, str], list[bytes]] = {}

    def cached_tokens(self, index: PageIndex, hello: Hello, *, arriving: bool = False) -> int:
        """Return how many prompt tokens the node need not compute. At least one token is left to compute."""
        also = (index.computing, index.arriving) if arriving else (index.computing,)
        if not (len(index) or any(also)):
            return 0
        count = index.num_pages(self.names(hello), has_window=hello.has_window, also=also)
        return min(count * hello.fingerprint.page_size, len(self._prompt_ids) - 1)

    def names(self, hello: Hello) -> list[bytes]:
        """Return the identities of the prompt's full pages on this node, last first."""
        adapter = adapter_of(self._adapter, len(self._prompt_ids), hello.short_context)
        scheme = hello.fingerprint.page_size, min(1, hello.key_lookahead), adapter
        names = self._schemes.get(scheme)
        if names is None:
            names = self._make(*scheme) if len(self._schemes) < MAX_SCHEMES else []
            self._schemes[scheme] = names
        return names

    def beginning(self, hello: Hello) -> bytes:
        """Return one identity for all prompts that begin alike on this node; b"" if the prompt fills no page.

        It identifies page number `place_in`, which is equal for prompts of similar length."""
        names = self.names(hello)
        return names[-place_in(len(names))] if names else b""

    def _make(self, page_size: int, lookahead: int, adapter: str) -> list[bytes]:
        if not page_size:
            return []
        tokens = array("Q", self._prompt_ids).tobytes()  # "q" takes 2.5 times as long
        keys = prefix_keys(tokens, adapter, lookahead, self._salt)
        width = page_size * KEY_BYTES
        return list(identities(keys[: len(keys) // width * width], page_size))[::-1]
