"""Transports that read a peer's pool where it lies, through a library: `cuda_ipc` and `nixl`. Here is what they share;
how a library exports a pool and reads another is behind RemoteMemory.

    sender     describe: pages, digests, handle of the pool   (the library's own bytes, the same in every message)
    receiver   open the handle once, read the parts of pages into the own ones, then the digests of what arrived

A page that was freed too early shows in its digest. Knows nothing of requests, leases or sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from shared.core.errors import BatonError, HandoffFailed
from shared.kv.pool import KVPool
from shared.transfer.digest import tensor_digests
from shared.transfer.interface import (
    WHOLE,
    Frames,
    PageList,
    PageSet,
    Part,
    describe_pages,
    digest_differs,
    part_of,
    require_lengths,
    require_part_bytes,
)
from shared.wire.messages import Ready

MAX_OPEN = 64


class OpenMemory(Protocol):
    """A peer's pool, open for reading. Used on one thread."""

    num_pages: int
    page_bytes: int
    owner: str  # has one pool at a time: when it shows another one, this one is gone

    def read(self, pages: Sequence[int], part_bytes: slice, dst_pages: Sequence[int]) -> None:
        """Bytes part_bytes of each of the peer's pages into the same place of the own dst_pages; returns when they are
        there. Never given up half-way: the library may still write into the own pages."""
        ...

    @property
    def is_dead(self) -> bool:
        """Whether its process is known to be gone."""
        ...

    def close(self) -> None: ...


class RemoteMemory(Protocol):
    """One library, on the own pool."""

    name: str

    def export(self) -> bytes:
        """What a peer needs to open the own pool; it stays good as long as the pool lives."""
        ...

    def open(self, handle: bytes) -> OpenMemory:
        """HandoffFailed for bytes that are no handle: they came from a peer."""
        ...


class RemoteSender:
    num_blocks = 0

    def __init__(self, pool: KVPool, memory: RemoteMemory) -> None:
        self.name = memory.name
        self._pool = pool
        self._handle = memory.export()

    def describe(self, pages: PageList, part: Part = WHOLE) -> PageSet:
        described = describe_pages(self._pool, pages, part, tensor_digests)
        return PageSet(*described, part=part, handle=self._handle)


class RemoteReceiver:
    """Keeps each peer's pool open, so that a pull costs its copies only."""

    def __init__(self, pool: KVPool, memory: RemoteMemory) -> None:
        self.name = memory.name
        self._pool = pool
        self._memory = memory
        self._open: dict[bytes, OpenMemory] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    def pull(self, ready: Ready, frames: Frames, dst_pages: PageList) -> None:
        require_lengths(ready, dst_pages, self._pool.num_pages)
        part = part_of(ready, self._pool)
        if not ready.handle or len(frames):
            raise HandoffFailed(f"pages came another way than by {self.name}")
        if not ready.pages:
            return
        source = self._opened(ready.handle)
        if not all(0 < page < source.num_pages for page in ready.pages):
            raise HandoffFailed(f"a page is out of range 1..{source.num_pages - 1}")
        where = part.bytes_in(self._pool.planes)
        come = slice(where.start, where.stop if part.count else min(where.stop, source.page_bytes))
        require_part_bytes(come.stop - come.start, part, self._pool)
        own = [int(page) for page in dst_pages]
        source.read(ready.pages, come, own)
        for page in own:
            self._pool.pages_bytes[page, come.stop : where.stop].zero_()
        for page, digest, expected in zip(
            ready.pages, tensor_digests(self._pool, own, come), ready.digests, strict=True
        ):
            if digest != expected:
                raise digest_differs(page, ready.key.rid)

    def forget_dead(self) -> None:
        self._close(lambda memory: memory.is_dead)

    def close(self) -> None:
        self._close(lambda memory: True)

    def _close(self, is_over: Callable[[OpenMemory], bool]) -> None:
        for handle, memory in list(self._open.items()):
            if is_over(memory):
                del self._open[handle]
                memory.close()

    def _opened(self, handle: bytes) -> OpenMemory:
        known = self._open.get(handle)
        if known is not None:
            return known
        self.forget_dead()
        if len(self._open) >= MAX_OPEN:
            raise HandoffFailed(f"{MAX_OPEN} pools of peers are open already")
        try:
            memory = self._memory.open(handle)
        except BatonError:
            raise
        except Exception as error:
            raise HandoffFailed(f"{self.name}: a peer's pool can't be opened: {error}") from error
        try:
            require_part_bytes(memory.page_bytes, WHOLE, self._pool)
        except HandoffFailed:
            memory.close()
            raise
        self._close(lambda other: other.owner == memory.owner)
        self._open[handle] = memory
        return memory
