"""Transports `gloo` and `nccl`: the pair's process group carries pages into the receiver's staging buffer.

    sender's pool --group, a page at a time--> | part of page 0 | part of page 1 | ... | --pull--> receiver's pool

The group reads the sender's pool while it sends. An agreed transfer can't be cancelled, so it may arrive after the
request has ended. Staging keeps the transfer out of the request's pages.
"""

from __future__ import annotations

from collections import deque

import torch

from shared.core.errors import HandoffFailed
from shared.kv.pool import KVPool
from shared.transfer.digest import Digests, host_digests, tensor_digests
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
from shared.wire.messages import Ready, Take

STAGED = ("gloo", "nccl")
MAX_STAGING_BYTES = 64 << 20
# size of a buffer, which holds a Ready's pages, and number of free buffers to keep
BUFFER_BYTES, KEPT_BUFFERS = 4 << 20, 8
DIGESTS: dict[str, Digests] = {"gloo": host_digests, "nccl": tensor_digests}
# pages per check: one for gloo, so that the page is still in the core's cache; all for nccl
PAGES_AT_ONCE = {"gloo": 1}


def staging_bytes(num_pages: int, part_bytes: int) -> int:
    total = num_pages * part_bytes
    if total > MAX_STAGING_BYTES:
        raise HandoffFailed(f"{num_pages} pages of {part_bytes} bytes are too much for one transfer")
    return total


class StagingBuffers:
    """Buffers of staging memory, used in turn. One thread takes buffers, another gives them back.

    A buffer that is not given back is freed with its last tensor. The first use of fresh memory costs more than a
    transfer: 9 ms for 3 MB on a virtual machine.
    """

    def __init__(self, pool: KVPool) -> None:
        self._device = pool.device
        self._size = max(BUFFER_BYTES, staging_bytes(1, pool.page_bytes))
        self._free: deque[torch.Tensor] = deque(maxlen=KEPT_BUFFERS)

    def take_buffer(self, num_bytes: int) -> torch.Tensor:
        """Return a contiguous (num_bytes,) uint8 tensor with old contents."""
        if num_bytes > self._size:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        whole = self._free.popleft() if self._free else torch.empty(self._size, dtype=torch.uint8, device=self._device)
        return whole[:num_bytes]

    def give_back(self, staging: torch.Tensor) -> None:
        """Nothing may read or write the buffer."""
        with torch.inference_mode(False):  # later writes happen outside inference mode
            whole = staging.new_empty(0).set_(staging.untyped_storage())
        if whole.numel() == self._size:
            self._free.append(whole)


class StagedSender:
    num_blocks = 0
    is_inline = False

    def __init__(self, name: str, pool: KVPool) -> None:
        self.name = name
        self._pool = pool

    def describe(self, pages: PageList, part: Part = WHOLE) -> PageSet:
        described = describe_pages(self._pool, pages, part, DIGESTS[self.name])
        where = part.bytes_in(self._pool.planes)
        return PageSet(*described, part=part, staged_bytes=where.stop - where.start)

    def check(self, take: Take) -> None:
        """Raise HandoffFailed for pages that can't be staged."""
        part = part_of(take, self._pool)
        where = part.bytes_in(self._pool.planes)
        if not take.pages or not all(0 < page < self._pool.num_pages for page in take.pages):
            raise HandoffFailed("asked for pages that don't exist")
        staging_bytes(len(take.pages), where.stop - where.start)

    def views(self, take: Take) -> list[torch.Tensor]:
        """Return each page's part in the pool, (size,) uint8. Freed pages are sent too: no transfer may be skipped."""
        where = part_of(take, self._pool).bytes_in(self._pool.planes)
        return [self._pool.pages_bytes[page, where] for page in take.pages]


class StagedReceiver:
    def __init__(self, name: str, pool: KVPool) -> None:
        self.name = name
        self._pool = pool
        self._buffers = StagingBuffers(pool)

    def check(self, ready: Ready) -> None:
        """Raise HandoffFailed unless a process group brings the pages, and their size is valid."""
        if ready.inline or ready.pool is not None:
            raise HandoffFailed("the pages did not come through a process group")
        require_part_bytes(ready.staged_bytes, part_of(ready, self._pool), self._pool)
        staging_bytes(len(ready.pages), ready.staged_bytes)

    def make_staging(self, ready: Ready) -> torch.Tensor:
        """Return a (number of pages, bytes per page) uint8 tensor on the pool's device. The group then fills the
        tensor."""
        count = len(ready.pages)
        return self._buffers.take_buffer(staging_bytes(count, ready.staged_bytes)).view(count, ready.staged_bytes)

    def pull(self, ready: Ready, frames: Frames, dst_pages: PageList) -> None:
        require_lengths(ready, dst_pages, self._pool.num_pages)
        part = part_of(ready, self._pool)
        count = len(ready.pages)
        if not isinstance(frames, torch.Tensor) or frames.shape != (count, ready.staged_bytes):
            raise HandoffFailed("pages came as frames, but a process group was granted")
        require_part_bytes(ready.staged_bytes, part, self._pool)
        where = part.bytes_in(self._pool.planes)
        own, at_once = [int(page) for page in dst_pages], PAGES_AT_ONCE.get(self.name, max(1, count))
        for start in range(0, count, at_once):
            self._pull_some(ready, frames, own, range(start, min(count, start + at_once)), where)
        self._buffers.give_back(frames)

    def _pull_some(self, ready: Ready, staging: torch.Tensor, own: list[int], indices: range, where: slice) -> None:
        size = ready.staged_bytes
        for index in indices:
            target = self._pool.pages_bytes[own[index], where]
            target[:size].copy_(staging[index])
            target[size:].zero_()
        copied = slice(where.start, where.start + size)
        found = DIGESTS[self.name](self._pool, [own[index] for index in indices], copied)
        for index, digest in zip(indices, found, strict=True):
            if digest != ready.digests[index]:
                raise digest_differs(ready.pages[index], ready.key.rid)

    def forget_dead(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
