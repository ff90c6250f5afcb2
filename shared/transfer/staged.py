"""Transports `gloo` and `nccl`: a process group of the pair carries pages into a staging buffer of the receiver's.

    sender's pool --group, a page at a time--> | part of page 0 | part of page 1 | ... | --pull--> receiver's pool

The group reads the sender's pool while it sends: a page freed too early travels with the next owner's bytes, which the
digest tells, taken of what lies in the receiver's pool. Staging is there because a transfer that was agreed upon can't
be taken back, and pages whose request has ended must not be written to. Knows nothing of the order of transfers.
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
BUFFER_BYTES, KEPT_BUFFERS = 4 << 20, 8  # for pages that are announced together; for a window of them
DIGESTS: dict[str, Digests] = {"gloo": host_digests, "nccl": tensor_digests}
PAGES_AT_ONCE = {"gloo": 1}  # a page is looked at while it is in the core's cache; others: all, for each look waits


def staging_bytes(num_pages: int, part_bytes: int) -> int:
    total = num_pages * part_bytes
    if total > MAX_STAGING_BYTES:
        raise HandoffFailed(f"{num_pages} pages of {part_bytes} bytes in one transfer")
    return total


class StagingBuffers:
    """Memory into which transfers come, in turns. The first touch of fresh memory costs more than a transfer: 9 ms for
    3 MB, measured on a virtual machine. One thread takes, one gives back; what nobody gives back is freed as usual."""

    def __init__(self, pool: KVPool) -> None:
        self._device = pool.device
        self._size = max(BUFFER_BYTES, staging_bytes(1, pool.page_bytes))
        self._free: deque[torch.Tensor] = deque(maxlen=KEPT_BUFFERS)

    def take(self, num_bytes: int) -> torch.Tensor:
        """(num_bytes,) uint8, contiguous; holds whatever the last transfer left."""
        if num_bytes > self._size:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        whole = self._free.popleft() if self._free else torch.empty(self._size, dtype=torch.uint8, device=self._device)
        return whole[:num_bytes]

    def give_back(self, staging: torch.Tensor) -> None:
        """Nobody reads or writes it any more."""
        with torch.inference_mode(False):  # it will be written to where there is none
            whole = staging.new_empty(0).set_(staging.untyped_storage())
        if whole.numel() == self._size:
            self._free.append(whole)


class StagedSender:
    """One node's outgoing pages. `views` is for whoever carries out what a receiver asked for."""

    num_blocks = 0

    def __init__(self, name: str, pool: KVPool) -> None:
        self.name = name
        self._pool = pool

    def describe(self, pages: PageList, part: Part = WHOLE) -> PageSet:
        described = describe_pages(self._pool, pages, part, DIGESTS[self.name])
        where = part.bytes_in(self._pool.planes)
        return PageSet(*described, part=part, staged_bytes=where.stop - where.start)

    def check(self, take: Take) -> None:
        """HandoffFailed for what can't be staged: the numbers came from a peer."""
        part = part_of(take, self._pool)
        where = part.bytes_in(self._pool.planes)
        if not take.pages or not all(0 < page < self._pool.num_pages for page in take.pages):
            raise HandoffFailed("asked for pages that are not there")
        staging_bytes(len(take.pages), where.stop - where.start)

    def views(self, take: Take) -> list[torch.Tensor]:
        """(size,) uint8 of each page, in the pool. Pages that were freed meanwhile go out with whatever is in them: the
        receiver sees it, and the order of transfers stays as agreed."""
        where = part_of(take, self._pool).bytes_in(self._pool.planes)
        return [self._pool.pages_bytes[page, where] for page in take.pages]


class StagedReceiver:
    def __init__(self, name: str, pool: KVPool) -> None:
        self.name = name
        self._pool = pool
        self._buffers = StagingBuffers(pool)

    def check(self, ready: Ready) -> None:
        """HandoffFailed when they do not come this way, or when ours are of another size."""
        if ready.inline or ready.pool is not None:
            raise HandoffFailed("pages came another way than through a process group")
        require_part_bytes(ready.staged_bytes, part_of(ready, self._pool), self._pool)
        staging_bytes(len(ready.pages), ready.staged_bytes)

    def make_staging(self, ready: Ready) -> torch.Tensor:
        """(pages, bytes of each) uint8 on the pool's device: what these pages come into. `pull` takes it back."""
        count = len(ready.pages)
        return self._buffers.take(staging_bytes(count, ready.staged_bytes)).view(count, ready.staged_bytes)

    def pull(self, ready: Ready, frames: Frames, dst_pages: PageList) -> None:
        require_lengths(ready, dst_pages, self._pool.num_pages)
        part = part_of(ready, self._pool)
        count = len(ready.pages)
        if not isinstance(frames, torch.Tensor) or frames.shape != (count, ready.staged_bytes):
            raise HandoffFailed("pages came as frames where a process group was granted")
        require_part_bytes(ready.staged_bytes, part, self._pool)
        where = part.bytes_in(self._pool.planes)
        own, at_once = [int(page) for page in dst_pages], PAGES_AT_ONCE.get(self.name, max(1, count))
        for start in range(0, count, at_once):
            self._pull_some(ready, frames, own, range(start, min(count, start + at_once)), where)
        self._buffers.give_back(frames)

    def _pull_some(self, ready: Ready, staging: torch.Tensor, own: list[int], indices: range, where: slice) -> None:
        """Out of staging, and then what has arrived is looked at."""
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
        """Groups are not this object's."""

    def close(self) -> None:
        """Nothing is open."""
