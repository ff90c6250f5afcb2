"""Tell routers which pages are cached here, in numbered CacheEvents. Sans-IO.

    a router asks (CacheReplay 0) -> a message with `cleared`, then all pages -> changes, as they come
    it asks again after a gap     -> the missed messages; if these have left the ring, `cleared` and all pages

Numbers never restart, so messages of a lost connection that come late are old to the router.
Memory is bounded: unsent changes are kept by page, and sent messages in a ring buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice

from shared.kv.manager import KVManager
from shared.wire.messages import CacheEvents

BATCH_PAGES = 2048
RING_BATCHES = 32


@dataclass(slots=True, eq=False)
class EventStream:
    """The CacheEvents to one router. `changes`: page with an unsent change -> whether this page is cached."""

    changes: dict[bytes, bool]
    begins: bool = True  # whether the next message sets its field `cleared`
    seq: int = 0
    ring: deque[CacheEvents] = field(default_factory=lambda: deque(maxlen=RING_BATCHES))
    again: list[CacheEvents] = field(default_factory=list)

    def next(self, node_id: str, epoch: int) -> CacheEvents:
        names = list(islice(self.changes, BATCH_PAGES))
        states = [(name, self.changes.pop(name)) for name in names]
        removed = [name for name, is_cached in states if not is_cached]
        stored = [name for name, is_cached in states if is_cached]
        self.seq += 1
        message = CacheEvents(node_id, epoch, self.seq, self.begins, removed, stored)
        self.begins = False
        self.ring.append(message)
        return message


class CacheTeller:
    """Owned by the node's loop. The teller follows the cache's changes once any router has sent a CacheReplay."""

    def __init__(self, kv: KVManager, node_id: str, epoch: int) -> None:
        self._cache = kv.cache
        self._most_changes = 2 * kv.allocator.num_total
        self._name = node_id, epoch
        self._streams: dict[str, EventStream] = {}
        self._last_seq = 0  # the highest of forgotten streams

    def asked(self, peer: str, after: int) -> None:
        """Let the next `tell` yield this router's messages after number `after`."""
        stream = self._streams.get(peer)
        if stream is None:
            self._streams[peer] = EventStream(dict.fromkeys(self._cache.cached_names(), True), seq=self._last_seq)
            self._cache.listener = self._changed
        elif stream.ring and stream.ring[0].seq <= after + 1 <= stream.seq + 1:
            stream.again = [message for message in stream.ring if message.seq > after]
        elif not stream.begins:
            self._begin_anew(stream)

    def _begin_anew(self, stream: EventStream) -> None:
        stream.changes = dict.fromkeys(self._cache.cached_names(), True)
        stream.begins = True
        stream.again.clear()

    def _changed(self, identity: bytes, is_cached: bool) -> None:
        for stream in self._streams.values():
            if len(stream.changes) > self._most_changes:
                self._begin_anew(stream)
            stream.changes[identity] = is_cached

    def tell(self, peers: Collection[str]) -> Iterator[tuple[str, CacheEvents]]:
        """Yield, for each served router, the messages to repeat and then the next message."""
        for peer in [peer for peer in self._streams if peer not in peers]:
            self._last_seq = max(self._last_seq, self._streams.pop(peer).seq)
        if not self._streams:
            self._cache.listener = None
        for peer, stream in self._streams.items():
            again, stream.again = stream.again, []
            yield from ((peer, message) for message in again)
            if stream.changes or stream.begins:
                yield peer, stream.next(*self._name)

    def seq(self, peer: str) -> int:
        stream = self._streams.get(peer)
        return 0 if stream is None else stream.seq

    @property
    def has_more(self) -> bool:
        return any(stream.changes or stream.again for stream in self._streams.values())
