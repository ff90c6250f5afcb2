"""How KV pages get from one node's pool into another's: the receiver pulls, checks, and trusts nobody.

    sender      describe(pages): generation, then digest of each page     on its transfer stream, pages pinned
    message     Ready (generations, digests, pool or frames)
    receiver    pull(ready): copy -> generation (shm) -> digest           on its transfer stream

The digest is taken of the copy, so whatever happened on the way (a reused page, a torn write, a wrong frame) is seen
where it would do harm. Knows nothing of requests, leases or sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from shared.core.errors import HandoffFailed
from shared.kv.layout import page_bytes
from shared.kv.pool import ByteArray, KVPool
from shared.wire.codec import Buffer
from shared.wire.messages import Key, PoolRef, Ready

PageList = Sequence[int] | npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PageSet:
    """Some final pages of a sender, in order. `frames` (zmq) are views of the pool: pinned until Installed."""

    pages: list[int]
    generations: list[int]
    digests: list[int]
    pool: PoolRef | None = None
    frames: tuple[memoryview, ...] = ()

    def ready(self, key: Key, lease: int, first_page: int) -> Ready:
        """The message that goes before `frames`; first_page counts in the request's own page list."""
        return Ready(
            key=key,
            lease=lease,
            first_page=first_page,
            pages=self.pages,
            generations=self.generations,
            digests=self.digests,
            pool=self.pool,
            inline=self.pool is None,
        )

    def split(self, num_pages: int) -> list[PageSet]:
        """The same in sets of at most num_pages, in order. One Ready each lets the receiver of frames copy the
        first pages while the next are on the wire: with zmq, pages of 1 to 2 MiB per message are the fastest."""
        cuts = [slice(i, i + num_pages) for i in range(0, len(self.pages), num_pages)]
        return [
            PageSet(self.pages[cut], self.generations[cut], self.digests[cut], self.pool, self.frames[cut])
            for cut in cuts
        ]


class PageSender(Protocol):
    """One node's outgoing side of a transport. `name` is what Offer and Grant call it."""

    name: str

    def describe(self, pages: PageList) -> PageSet:
        """Reads every byte of the pages: run it on the transfer stream, after the step that wrote them, never on
        the loop. The pages stay pinned until the receiver has answered."""
        ...


class PageReceiver(Protocol):
    """One node's incoming side. All methods run on its transfer stream, so that none races with another."""

    name: str

    def pull(self, ready: Ready, frames: Sequence[Buffer], dst_pages: PageList) -> None:
        """Copy ready.pages[i] into the own pool's page dst_pages[i]. The caller has ordered the stream behind the
        newest launched step (it may still read or write these pages). HandoffFailed when anything is off; then some
        of dst_pages have been written, which is why the whole attempt fails. Long copies run without the GIL."""
        ...

    def forget_dead(self) -> None:
        """Let go of what belongs to processes that are gone. Call it when a peer has closed."""
        ...

    def close(self) -> None: ...


def page_digest(page: ByteArray) -> int:
    """xxh3_64 of (page_bytes,) uint8; contiguous, any place. Without the GIL."""
    return xxhash.xxh3_64_intdigest(page.data)


def require_page_bytes(num_bytes: int, pool: KVPool) -> None:
    """A sender's page may consist of all our planes, or of the leading ones: it has no draft head, and we have."""
    sizes = [page_bytes(pool.planes[:count]) for count in range(1, len(pool.planes) + 1)]
    if num_bytes not in sizes:
        raise HandoffFailed(f"a page of {num_bytes} bytes, ours have {pool.page_bytes}")


def fill_page(target: ByteArray, source: ByteArray) -> ByteArray:
    """Copy what came and zero what did not, so that draft KV is never that of a page's last owner. Gives the part of
    `target` that was copied."""
    copied = target[: len(source)]
    np.copyto(copied, source)
    target[len(source) :] = 0
    return copied


def require_digest(page: ByteArray, expected: int, src: int, subject: str) -> None:
    if page_digest(page) != expected:
        raise HandoffFailed(f"page {src}: its digest differs from the one announced", subject=subject)


def require_lengths(ready: Ready, dst_pages: PageList, num_pages: int) -> None:
    """The lists came from a peer and from our own tables; a mismatch must not become a wrong copy."""
    wanted = len(ready.pages)
    if not len(ready.generations) == len(ready.digests) == len(dst_pages) == wanted:
        raise HandoffFailed(f"{wanted} pages announced, {len(dst_pages)} granted, {len(ready.digests)} digests")
    for page in dst_pages:
        if not 0 < page < num_pages:
            raise HandoffFailed(f"page {page} of the receiver is out of range 1..{num_pages - 1}")
