"""How KV pages get from one node's pool into another's: the receiver pulls, checks, and trusts nobody.

    sender      describe(pages, part): generation and digest of each page's part     on its transfer stream, pinned
    message     Ready (part, generations, digests; where the bytes are, or they follow as frames)
    receiver    pull(ready): copy -> digest (shm: generation, too)                   on its transfer stream

A part is some layers of a page: those of layer i can travel while layer i + 1 is computed.

    page        | layer 0 | layer 1 | ... | layer n - 1 | planes of a draft head |
    Part(0, 2)  |=================|
    Part(2)                       |=============================================|     all that is behind, too

The digest is taken of the copy, so whatever happened on the way (a reused page, a torn write, a wrong frame) is seen
where it would do harm. A GPU's receiver takes it in pinned memory, on the way into the page. Knows nothing of requests,
leases or sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from shared.core.errors import HandoffFailed
from shared.kv.layout import PlaneSpec, layer_bytes, num_layers, page_bytes
from shared.kv.pool import ByteArray, KVPool
from shared.transfer.digest import Digests, host_digests, page_digest
from shared.wire.codec import Buffer
from shared.wire.messages import Key, PoolRef, Ready, Take

READY_BYTES = 3 << 20  # most page bytes in one Ready: the peer pulls one while the next is described
PageList = Sequence[int] | npt.NDArray[np.int32]
Frames = Sequence[Buffer] | torch.Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Layers [first, first + count) of a page; count 0: everything from `first` on, other planes included."""

    first: int = 0
    count: int = 0

    def bytes_in(self, planes: tuple[PlaneSpec, ...]) -> slice:
        """Where it is in a page of these planes."""
        one = layer_bytes(planes)
        return slice(self.first * one, (self.first + self.count) * one if self.count else page_bytes(planes))


WHOLE = Part()


@dataclass(frozen=True, slots=True)
class PageSet:
    """A part of some pages of a sender, final, in order. How the bytes come: from `pool`; as `frames`, views of the
    sender's pool that are pinned until Installed, or of host memory that is the frames' own; through a library, by
    `handle`; or when the receiver asks for them, and then `staged_bytes` is each page's."""

    pages: list[int]
    generations: list[int]
    digests: list[int]
    pool: PoolRef | None = None
    frames: tuple[memoryview, ...] = ()
    part: Part = WHOLE
    staged_bytes: int = 0
    handle: bytes = b""
    block: ByteArray | None = field(default=None, compare=False)  # the frames' own memory, gone when nobody reads them

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
            inline=self.pool is None and not self.staged_bytes and not self.handle,
            first_layer=self.part.first,
            num_layers=self.part.count,
            handle=self.handle,
            staged_bytes=self.staged_bytes,
        )

    def split(self, num_pages: int) -> list[PageSet]:
        """The same in sets of at most num_pages, in order. One Ready each lets the receiver of frames copy the
        first pages while the next are on the wire: with zmq, pages of 1 to 2 MiB per message are the fastest."""
        cuts = [slice(i, i + num_pages) for i in range(0, len(self.pages), num_pages)]
        return [
            replace(
                self,
                pages=self.pages[cut],
                generations=self.generations[cut],
                digests=self.digests[cut],
                frames=self.frames[cut],
            )
            for cut in cuts
        ]


class PageSender(Protocol):
    """One node's outgoing side of a transport. `name` is what Offer and Grant call it. `num_blocks`: how many page sets
    may have memory of the sender's own at a time, for their frames; 0: they need none."""

    name: str
    num_blocks: int

    def describe(self, pages: PageList, part: Part = WHOLE) -> PageSet:
        """Reads every byte of that part of the pages: run it on the transfer stream, after the layers that wrote it,
        never on the loop. The pages stay pinned until the receiver has answered."""
        ...


class PageReceiver(Protocol):
    """One node's incoming side. All methods run on its transfer stream, so that none races with another."""

    name: str

    def pull(self, ready: Ready, frames: Frames, dst_pages: PageList) -> None:
        """Copy the part of ready.pages[i] into the own pool's page dst_pages[i]. The caller has ordered the stream
        behind the newest launched step (it may still read or write these pages). HandoffFailed when anything is off;
        then some of dst_pages have been written, which is why the whole attempt fails. Long copies run without the
        GIL. `frames` is what came with the Ready, or the staging buffer that a process group filled."""
        ...

    def forget_dead(self) -> None:
        """Let go of what belongs to processes that are gone. Call it when a peer has closed."""
        ...

    def close(self) -> None: ...


def part_of(ready: Ready | Take, pool: KVPool) -> Part:
    """The part that a peer announced; HandoffFailed when our pages have none like it."""
    part = Part(ready.first_layer, ready.num_layers)
    if part != WHOLE and part.first + max(1, part.count) > num_layers(pool.planes):
        raise HandoffFailed(f"layers {part.first} + {part.count}, ours are {num_layers(pool.planes)}")
    return part


def require_part_bytes(num_bytes: int, part: Part, pool: KVPool) -> None:
    """The rest of a sender's page may consist of all our planes, or of the leading ones: it has no draft head, and we
    have."""
    ends = [page_bytes(pool.planes[:count]) for count in range(1, len(pool.planes) + 1)]
    where = part.bytes_in(pool.planes)
    sizes = [where.stop - where.start] if part.count else [end - where.start for end in ends]
    if num_bytes not in sizes:
        raise HandoffFailed(f"{num_bytes} bytes of a page, ours have {' or '.join(map(str, sizes))} there")


def fill_page(page: ByteArray, part: Part, planes: tuple[PlaneSpec, ...], source: ByteArray) -> ByteArray:
    """Copy what came and zero what did not, so that draft KV is never that of a page's last owner. Gives the bytes of
    `page` that were copied."""
    target = page[part.bytes_in(planes)]
    copied = target[: len(source)]
    np.copyto(copied, source)
    target[len(source) :] = 0
    return copied


def describe_pages(
    pool: KVPool, pages: PageList, part: Part, digests: Digests = host_digests
) -> tuple[list[int], list[int], list[int]]:
    """(pages, generations, digests)."""
    numbers, generations = identify_pages(pool, pages)
    return numbers, generations, digests(pool, numbers, part.bytes_in(pool.planes))


def identify_pages(pool: KVPool, pages: PageList) -> tuple[list[int], list[int]]:
    """(pages, generations). They are read before the bytes: a page that changes owner in between can then only look
    stale, never fresh."""
    numbers = [int(page) for page in pages]
    return numbers, [int(pool.generation[page]) for page in numbers]


def require_digest(page: ByteArray, expected: int, src: int, subject: str) -> None:
    if page_digest(page) != expected:
        raise digest_differs(src, subject)


def digest_differs(src: int, subject: str) -> HandoffFailed:
    return HandoffFailed(f"page {src}: its digest differs from the one announced", subject=subject)


def require_lengths(ready: Ready, dst_pages: PageList, num_pages: int) -> None:
    """The lists came from a peer and from our own tables; a mismatch must not become a wrong copy."""
    wanted = len(ready.pages)
    if not len(ready.generations) == len(ready.digests) == len(dst_pages) == wanted:
        raise HandoffFailed(f"{wanted} pages announced, {len(dst_pages)} granted, {len(ready.digests)} digests")
    for page in dst_pages:
        if not 0 < page < num_pages:
            raise HandoffFailed(f"page {page} of the receiver is out of range 1..{num_pages - 1}")
