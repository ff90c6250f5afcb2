"""Read a peer's pool in place with a library: the common half of `cuda_ipc` and `nixl`.

sender     describe: pages, digests, handle of the pool   (bytes that the library makes, the same in every message)
receiver   open the handle once, read parts of pages into our own pages, compare the copies' digests
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
    """A peer's pool, open for reading by one thread."""

    num_pages: int
    page_bytes: int
    owner: str  # a new pool of the same owner replaces this pool

    def read(self, pages: Sequence[int], part_bytes: slice, dst_pages: Sequence[int]) -> list[int]:
        """Copy the range `part_bytes` of the peer's pages to the same place in dst_pages. Return the copies' digests.

        Return only when the library no longer writes into our pages.
        """
        ...

    @property
    def is_dead(self) -> bool:
        """Whether the pool's process is known to be gone."""
        ...

    def close(self) -> None: ...


class RemoteMemory(Protocol):
    name: str

    def export(self) -> bytes:
        """Return the handle, which is valid while our own pool exists."""
        ...

    def open(self, handle: bytes) -> OpenMemory:
        """Raise HandoffFailed for invalid bytes."""
        ...


class RemoteSender:
    num_blocks = 0
    is_inline = False

    def __init__(self, pool: KVPool, memory: RemoteMemory) -> None:
        self.name = memory.name
        self._pool = pool
        self._handle = memory.export()

    def describe(self, pages: PageList, part: Part = WHOLE) -> PageSet:
        described = describe_pages(self._pool, pages, part, tensor_digests)
        return PageSet(*described, part=part, handle=self._handle)


class RemoteReceiver:
    """Keeps peers' pools open, so that a pull costs only its copies."""

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
            raise HandoffFailed(f"the pages did not come by {self.name}")
        if not ready.pages:
            return
        source = self._opened(ready.handle)
        if not all(0 < page < source.num_pages for page in ready.pages):
            raise HandoffFailed(f"a page is out of range 1..{source.num_pages - 1}")
        where = part.bytes_in(self._pool.planes)
        come = slice(where.start, where.stop if part.count else min(where.stop, source.page_bytes))
        require_part_bytes(come.stop - come.start, part, self._pool)
        own = [int(page) for page in dst_pages]
        found = source.read(ready.pages, come, own)
        for page in own:
            self._pool.pages_bytes[page, come.stop : where.stop].zero_()
        for page, digest, expected in zip(ready.pages, found, ready.digests, strict=True):
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
