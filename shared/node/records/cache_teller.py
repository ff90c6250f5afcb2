"""Tell routers which pages are cached here, in numbered CacheEvents. Sans-IO.

    a router asks (CacheReplay 0) -> a message with `cleared`, then all pages -> changes, as they come
    it asks again after a gap     -> the missed messages; if these have left the ring, `cleared` and all pages
    outsiders begin to follow     -> the same stream goes to `kv_events.py`, from `cleared` for each that joins

Numbers never restart, so messages of a lost connection that come late are old to the router.
Memory is bounded: unsent changes are kept by page, and sent messages in a ring buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from shared.kv.manager import KVManager
from shared.kv.prefix_cache import Added
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


class Outsiders(Protocol):
    """Programs that follow the cache from outside the cluster."""

    def look_for_followers(self) -> tuple[bool, bool]:
        """Return whether anybody follows, and whether somebody has joined since the last call."""
        ...

    def note_page(self, identity: bytes, added: Added | None) -> None:
        """Take each change of the cache, as a Listener."""
        ...

    def publish(self, message: CacheEvents) -> None: ...


class CacheTeller:
    """Owned by the node's loop. The teller follows the cache's changes once any router has sent a CacheReplay, and
    always if there are `outsiders`, which the cache must be empty for."""

    def __init__(self, kv: KVManager, node_id: str, epoch: int, outsiders: Outsiders | None = None) -> None:
        self._cache = kv.cache
        self._most_changes = 2 * kv.allocator.num_total
        self._name = node_id, epoch
        self._streams: dict[str, EventStream] = {}
        self._last_seq = 0  # the highest of forgotten streams
        self._outsiders = outsiders
        self._outward: EventStream | None = None  # None: there are no followers outside
        if outsiders is not None:
            self._cache.listener = self._changed

    def asked(self, peer: str, after: int) -> None:
        """Let the next `tell` yield this router's messages after number `after`."""
        stream = self._streams.get(peer)
        if stream is None:
            self._streams[peer] = EventStream(self._all_pages(), seq=self._last_seq)
            self._cache.listener = self._changed
        elif stream.ring and stream.ring[0].seq <= after + 1 <= stream.seq + 1:
            stream.again = [message for message in stream.ring if message.seq > after]
        elif not stream.begins:
            self._begin_anew(stream)

    def _all_pages(self) -> dict[bytes, bool]:
        """Each page comes after the one before it in its prompt."""
        return dict.fromkeys(self._cache.cached_names(), True)

    def _begin_anew(self, stream: EventStream) -> None:
        stream.changes = self._all_pages()
        stream.begins = True
        stream.again.clear()

    def _changed(self, identity: bytes, added: Added | None) -> None:
        if self._outsiders is not None:
            self._outsiders.note_page(identity, added)
        for stream in self._open_streams():
            if len(stream.changes) > self._most_changes:
                self._begin_anew(stream)
            stream.changes[identity] = added is not None

    def _open_streams(self) -> Iterator[EventStream]:
        yield from self._streams.values()
        if self._outward is not None:
            yield self._outward

    def tell(self, peers: Collection[str]) -> Iterator[tuple[str, CacheEvents]]:
        """Yield, for each served router, the messages to repeat and then the next message. Publish the next one."""
        if self._outsiders is not None:
            self._tell_outsiders(self._outsiders)
        for peer in [peer for peer in self._streams if peer not in peers]:
            self._last_seq = max(self._last_seq, self._streams.pop(peer).seq)
        if not self._streams and self._outsiders is None:
            self._cache.listener = None
        for peer, stream in self._streams.items():
            again, stream.again = stream.again, []
            yield from ((peer, message) for message in again)
            if stream.changes or stream.begins:
                yield peer, stream.next(*self._name)

    def _tell_outsiders(self, outsiders: Outsiders) -> None:
        is_followed, has_joined = outsiders.look_for_followers()
        if not is_followed:
            self._outward = None
        elif self._outward is None or has_joined:
            self._outward = EventStream(self._all_pages())
        if self._outward is not None and (self._outward.changes or self._outward.begins):
            outsiders.publish(self._outward.next(*self._name))

    def seq(self, peer: str) -> int:
        stream = self._streams.get(peer)
        return 0 if stream is None else stream.seq

    @property
    def has_more(self) -> bool:
        return any(stream.changes or stream.again for stream in self._open_streams())
