"""Define how KV pages get from one node's pool into another's. The receiver pulls and checks them, and trusts no peer.

    sender      describe(pages, part): generation and digest of each page's part   on its transfer stream, pages pinned
    message     Ready (part, generations, digests, and the place of the bytes, unless they follow as frames)
    receiver    pull(ready): copy -> digest (shm: generation, too)                 on its transfer stream

Layer i can travel while layer i + 1 is computed:

    page        | layer 0 | layer 1 | ... | layer n - 1 | planes of a draft head |
    Part(0, 2)  |=================|
    Part(2)                       |=============================================|     all later planes, too

The digest covers the copy, so it detects any accident on the way (a reused page, a torn write, a wrong frame). For a
GPU pool, shm and zmq digest the copy in pinned memory.
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
from shared.wire.messages import Key, Ready, Take
from shared.wire.parts import PoolRef

READY_BYTES = 3 << 20  # limit on page bytes in a Ready, so that the peer pulls one Ready while the next is described
PageList = Sequence[int] | npt.NDArray[np.int32]
Frames = Sequence[Buffer] | torch.Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Layers [first, first + count) of a page. With count 0: all layers from `first` on, and the other planes."""

    first: int = 0
    count: int = 0

    def bytes_in(self, planes: tuple[PlaneSpec, ...]) -> slice:
        one = layer_bytes(planes)
        return slice(self.first * one, (self.first + self.count) * one if self.count else page_bytes(planes))


WHOLE = Part()


@dataclass(frozen=True, slots=True)
class PageSet:
    """The same part of each of a sender's `pages`, and one of four ways to get the part's final bytes.

    - pool: the receiver reads the pool.
    - frames: views of separate host memory, or of the pool, whose pages stay pinned until Installed.
    - handle: a library reads the pages.
    - staged_bytes: the size of each page's part. The sender sends the part when the receiver asks.
    """

    pages: list[int]
    generations: list[int]
    digests: list[int]
    pool: PoolRef | None = None
    frames: tuple[memoryview, ...] = ()
    part: Part = WHOLE
    staged_bytes: int = 0
    handle: bytes = b""
    block: ByteArray | None = field(default=None, compare=False)  # the memory that holds `frames`

    def ready(self, key: Key, lease: int, first_page: int) -> Ready:
        """first_page is an index in the request's page list."""
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
        """Split into sets of at most num_pages pages, in order. The receiver copies a set while later sets travel.

        zmq is fastest with 1 to 2 MiB per message.
        """
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
    """A node's sending side of a transport.

    - num_blocks: number of page sets that may use the sender's frame memory at a time; 0 without such memory
    - is_inline: whether the bytes follow their Ready as frames
    """

    name: str
    num_blocks: int
    is_inline: bool

    def describe(self, pages: PageList, part: Part = WHOLE) -> PageSet:
        """Read all bytes of a part of the pages, and return the part's description.

        Call this on the transfer stream, after the layers that write the part. The pages stay pinned until the receiver
        answers.
        """
        ...


class PageReceiver(Protocol):
    """A node's receiving side. All methods run on the node's transfer stream, so they never race."""

    name: str

    def pull(self, ready: Ready, frames: Frames, dst_pages: PageList) -> None:
        """Copy the part of ready.pages[i] into page dst_pages[i] of our own pool.

        The caller has made the stream wait for the newest launched step, which may use these pages. `frames`: the
        Ready's frames, or a process group's staging buffer. Long copies release the GIL. Raise HandoffFailed on any
        mismatch; dst_pages may then be partly written.
        """
        ...

    def forget_dead(self) -> None:
        """Close the open pools of dead processes. Call this after a peer's connection has closed."""
        ...

    def close(self) -> None: ...


def part_of(ready: Ready | Take, pool: KVPool) -> Part:
    """Return the announced part. Raise HandoffFailed if our pages lack it."""
    part = Part(ready.first_layer, ready.num_layers)
    if part != WHOLE and part.first + max(1, part.count) > num_layers(pool.planes):
        raise HandoffFailed(f"part of layers {part.first} + {part.count}, our layers: {num_layers(pool.planes)}")
    return part


def part_bytes(part: Part, pool: KVPool) -> int:
    """Return the bytes of the part in a whole page, of all ranks."""
    where = part.bytes_in(pool.planes)
    return int(where.stop - where.start) * pool.num_parts


def require_part_bytes(num_bytes: int, part: Part, pool: KVPool) -> None:
    """Raise HandoffFailed unless `num_bytes` is a valid size of the part.

    Our last planes belong to the draft head. A sender without a head lacks them, so a part with count 0 may be
    shorter."""
    ends = [page_bytes(pool.planes[:count]) for count in range(1, len(pool.planes) + 1)]
    where = part.bytes_in(pool.planes)
    sizes = [where.stop - where.start] if part.count else [end - where.start for end in ends]
    sizes = [size * pool.num_parts for size in sizes]
    if num_bytes not in sizes:
        fitting = " or ".join(map(str, sizes))
        raise HandoffFailed(f"the sender's pages have {num_bytes} bytes in this part, ours have {fitting}")


def require_frames(ready: Ready, frames: Sequence[Buffer], pool: KVPool) -> None:
    """Raise HandoffFailed unless each inline page has one frame of a valid size."""
    part, wanted = part_of(ready, pool), len(ready.pages) if ready.inline else 0
    if len(frames) != wanted:
        raise HandoffFailed(f"{len(frames)} frames came, {wanted} were announced")
    for num_bytes in {len(frame) for frame in frames}:
        require_part_bytes(num_bytes, part, pool)


def fill_page(page: ByteArray, part: Part, planes: tuple[PlaneSpec, ...], source: ByteArray) -> ByteArray:
    """Copy `source` into the part, and return the copy. Zero the rest, so that no earlier owner's draft KV stays."""
    target = page[part.bytes_in(planes)]
    copied = target[: len(source)]
    np.copyto(copied, source)
    target[len(source) :] = 0
    return copied


def describe_pages(
    pool: KVPool, pages: PageList, part: Part, digests: Digests = host_digests
) -> tuple[list[int], list[int], list[int]]:
    numbers, generations = identify_pages(pool, pages)
    return numbers, generations, digests(pool, numbers, part.bytes_in(pool.planes))


def identify_pages(pool: KVPool, pages: PageList) -> tuple[list[int], list[int]]:
    """Return (pages, generations). Call this before bytes are read, so that a later change of owner is noticed."""
    numbers = [int(page) for page in pages]
    return numbers, [int(pool.generation[page]) for page in numbers]


def require_digest(page: ByteArray, expected: int, src: int, subject: str) -> None:
    if page_digest(page) != expected:
        raise digest_differs(src, subject)


def digest_differs(src: int, subject: str) -> HandoffFailed:
    return HandoffFailed(f"page {src}: its digest differs from the one announced", subject=subject)


def require_lengths(ready: Ready, dst_pages: PageList, num_pages: int) -> None:
    """Raise HandoffFailed if the peer's lists don't match our pages."""
    wanted = len(ready.pages)
    if not len(ready.generations) == len(ready.digests) == len(dst_pages) == wanted:
        raise HandoffFailed(f"{wanted} pages announced, {len(dst_pages)} granted, {len(ready.digests)} digests")
    for page in dst_pages:
        if not 0 < page < num_pages:
            raise HandoffFailed(f"page {page} of the receiver is out of range 1..{num_pages - 1}")
