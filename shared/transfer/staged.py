"""Transports `gloo` and `nccl`: pages go through staging buffers, which a process group of the pair carries.

    sender's pool --stage--> | part of page 0 | part of page 1 | ... | generations | --group--> same --pull--> pool

The sender reads the generations after the copy, so a page that changed its owner before or while it was copied shows
in them; the digest is taken of what lies in the receiver's pool. Knows nothing of the order of transfers, nor of the
group.
"""

from __future__ import annotations

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
GENERATION_BYTES = 8
DIGESTS: dict[str, Digests] = {"gloo": host_digests, "nccl": tensor_digests}


def staging_bytes(num_pages: int, part_bytes: int) -> int:
    total = num_pages * (part_bytes + GENERATION_BYTES)
    if total > MAX_STAGING_BYTES:
        raise HandoffFailed(f"{num_pages} pages of {part_bytes} bytes in one transfer")
    return total


class StagedSender:
    """One node's outgoing pages. `stage` is for whoever carries out what a receiver asked for."""

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

    def stage(self, take: Take) -> torch.Tensor:
        """(n,) uint8 on the pool's device, fresh. Runs on the transfer stream. Pages that were freed meanwhile go out
        with whatever is in them: the receiver sees it, and the order of transfers stays as agreed."""
        where = part_of(take, self._pool).bytes_in(self._pool.planes)
        size = where.stop - where.start
        staging = torch.empty(staging_bytes(len(take.pages), size), dtype=torch.uint8, device=self._pool.device)
        for index, page in enumerate(take.pages):
            staging[index * size : (index + 1) * size].copy_(self._pool.pages_bytes[page, where])
        generations = torch.tensor([int(self._pool.generation[page]) for page in take.pages], dtype=torch.int64)
        staging[len(take.pages) * size :].copy_(generations.view(torch.uint8))
        return staging


class StagedReceiver:
    def __init__(self, name: str, pool: KVPool) -> None:
        self.name = name
        self._pool = pool

    def check(self, ready: Ready) -> None:
        """HandoffFailed when they do not come this way, or when ours are of another size."""
        if ready.inline or ready.pool is not None:
            raise HandoffFailed("pages came another way than through a process group")
        require_part_bytes(ready.staged_bytes, part_of(ready, self._pool), self._pool)
        staging_bytes(len(ready.pages), ready.staged_bytes)

    def make_staging(self, ready: Ready) -> torch.Tensor:
        """(n,) uint8 on the pool's device: what a transfer of these pages comes into."""
        num_bytes = staging_bytes(len(ready.pages), ready.staged_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._pool.device)

    def pull(self, ready: Ready, frames: Frames, dst_pages: PageList) -> None:
        require_lengths(ready, dst_pages, self._pool.num_pages)
        part = part_of(ready, self._pool)
        where, size, count = part.bytes_in(self._pool.planes), ready.staged_bytes, len(ready.pages)
        if not isinstance(frames, torch.Tensor) or frames.numel() != staging_bytes(count, size):
            raise HandoffFailed("pages came as frames where a process group was granted")
        require_part_bytes(size, part, self._pool)
        for index, page in enumerate(dst_pages):
            target = self._pool.pages_bytes[int(page), where]
            target[:size].copy_(frames[index * size : (index + 1) * size])
            target[size:].zero_()
        sent = frames[count * size :].cpu().clone().view(torch.int64)
        wanted = torch.tensor([generation - (generation >> 63 << 64) for generation in ready.generations])
        for page in torch.tensor(ready.pages)[sent != wanted]:
            raise HandoffFailed(f"page {page} has a new owner: its generation changed", subject=ready.key.rid)
        copied = slice(where.start, where.start + size)
        found = DIGESTS[self.name](self._pool, [int(page) for page in dst_pages], copied)
        for page, digest, expected in zip(ready.pages, found, ready.digests, strict=True):
            if digest != expected:
                raise digest_differs(page, ready.key.rid)

    def forget_dead(self) -> None:
        """Groups are not this object's."""

    def close(self) -> None:
        """Nothing is open."""
