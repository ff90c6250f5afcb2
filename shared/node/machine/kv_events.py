"""Publish which pages are cached here as KV events, in the format of vLLM's, for routers of other makes.

    message   topic | number, 8 bytes big-endian | msgpack: [seconds, [event, ...], 0]
    events    ["AllBlocksCleared"]    ["BlockRemoved", hashes, "GPU"]
              ["BlockStored", hashes, hash before them or None, their token ids, tokens in a block, None, "GPU", None]

The events' fields are those of vLLM 0.8 to 0.11 (`vllm/distributed/kv_events.py`), whose arrays all followers read: the
routers of llm-d and Dynamo, for example. A block is a page, and "GPU" names the pool that steps read, on any device.
Such followers know tokens only, so a page is told only if its tokens alone decide its KV: a page with a salt or an
adapter is not, nor one that follows a page which is not told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec
import numpy as np

from shared.core.page_identity import ROOT, SALTED
from shared.kv.prefix_cache import Added
from shared.wire.messages import CacheEvents

LOCAL = "GPU"
HASH_BITS = 62
LEAST_BETWEEN_S = 1.0  # between two times that all pages are told for newcomers
LEAST_BETWEEN_PAGES_S = 1e-4  # for each page, at least; telling one takes about 3 us


class Subscribers(Protocol):
    """`shared.wire.zeromq.publisher.Publisher`."""

    def look_for_followers(self) -> tuple[bool, bool]: ...

    def publish(self, payload: bytes) -> None: ...


def hash_of(identity: bytes) -> int:
    """Return the block hash of a page: 63 bits, the highest set, since some followers take no signed or short one."""
    return 1 << HASH_BITS | int.from_bytes(identity[:8]) & (1 << HASH_BITS) - 1


class KvEvents:
    """Owned by the node's loop, as the CacheTeller's `outsiders`.

    The order of stored pages is that of CacheTeller: each comes after the page before it, unless followers know that
    one already.
    """

    def __init__(
        self,
        subscribers: Subscribers,
        page_size: int,
        lookahead: int,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`lookahead`: of the cache's keys, see `shared.core.page_identity`."""
        self._subscribers = subscribers
        self._page_size = page_size
        self._token_shift = 32 if lookahead else 0
        self._clock = clock
        self._wall = wall
        self._pages: dict[bytes, Added] = {}  # all cached ones
        self._told: set[bytes] = set()  # what the followers have heard of
        self._has_joined = False
        self._is_telling = False
        self._next_at = 0.0

    def look_for_followers(self) -> tuple[bool, bool]:
        """Count no subscriber before all pages may be told again."""
        is_followed, has_joined = self._subscribers.look_for_followers()
        self._has_joined = is_followed and (self._has_joined or has_joined)
        begins = self._has_joined and self._clock() >= self._next_at
        if begins:
            rest_s = max(LEAST_BETWEEN_S, LEAST_BETWEEN_PAGES_S * len(self._pages))
            self._has_joined, self._next_at = False, self._clock() + rest_s
        self._is_telling = is_followed and (self._is_telling or begins)
        return self._is_telling, begins

    def note_page(self, identity: bytes, added: Added | None) -> None:
        if added is None:
            self._pages.pop(identity, None)
        else:
            self._pages[identity] = added

    def publish(self, message: CacheEvents) -> None:
        events: list[list[object]] = []
        if message.cleared:
            self._told.clear()
            events.append(["AllBlocksCleared"])
        gone = [name for name in message.removed if name in self._told]
        if gone:
            self._told.difference_update(gone)
            events.append(["BlockRemoved", [hash_of(name) for name in gone], LOCAL])
        events += [self._stored(run) for run in self._runs(message.stored)]
        if events:
            self._subscribers.publish(msgspec.msgpack.encode([self._wall(), events, 0]))

    def _runs(self, names: Sequence[bytes]) -> Iterator[list[bytes]]:
        """Yield the pages that may be told, in runs of pages that follow one another."""
        run: list[bytes] = []
        for name in names:
            keys, before = self._pages.get(name, (b"", name))
            if not self._is_plain(keys) if before == ROOT else before not in self._told:
                continue
            self._told.add(name)
            if run and run[-1] != before:
                yield run
                run = []
            run.append(name)
        if run:
            yield run

    def _is_plain(self, keys: bytes) -> bool:
        """Return whether a prompt's first page has neither a salt nor an adapter."""
        return not int.from_bytes(keys[:8], "little") & SALTED

    def _stored(self, run: Sequence[bytes]) -> list[object]:
        keys = np.frombuffer(b"".join(self._pages[name][0] for name in run), "<u8")
        tokens = (keys >> self._token_shift & 0xFFFFFFFF).tolist()
        _, before = self._pages[run[0]]
        parent = None if before == ROOT else hash_of(before)
        hashes = [hash_of(name) for name in run]
        return ["BlockStored", hashes, parent, tokens, self._page_size, None, LOCAL, None]
