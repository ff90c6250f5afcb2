"""Transport `zmq`: the pages follow their Ready as frames, from the sender's pool into the receiver's.

The frames are views, not copies: libzmq reads the pool while it sends. A page freed too early would travel with the
next owner's bytes, which the receiver's digest tells. Knows nothing of the socket they travel on.
"""

from __future__ import annotations

import numpy as np
import torch

from shared.core.errors import HandoffFailed
from shared.kv.pool import KVPool
from shared.transfer.interface import (
    WHOLE,
    Frames,
    PageList,
    PageSet,
    Part,
    describe_pages,
    fill_page,
    part_of,
    require_digest,
    require_lengths,
    require_part_bytes,
)
from shared.wire.messages import Ready


class FrameSender:
    name = "zmq"

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def describe(self, pages: PageList, part: Part = WHOLE) -> PageSet:
        numbers, generations, digests = describe_pages(self._pool, pages, part)
        where = part.bytes_in(self._pool.planes)
        frames = tuple(self._pool.page_view(page)[where].data for page in numbers)
        return PageSet(numbers, generations, digests, frames=frames, part=part)


class FrameReceiver:
    name = "zmq"

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def pull(self, ready: Ready, frames: Frames, dst_pages: PageList) -> None:
        require_lengths(ready, dst_pages, self._pool.num_pages)
        part = part_of(ready, self._pool)
        if not ready.inline or isinstance(frames, torch.Tensor) or len(frames) != len(ready.pages):
            raise HandoffFailed(f"{len(ready.pages)} pages announced, {len(frames)} frames came")
        for frame, digest, src, dst in zip(frames, ready.digests, ready.pages, dst_pages, strict=True):
            require_part_bytes(len(frame), part, self._pool)
            source = np.frombuffer(frame, np.uint8)
            copied = fill_page(self._pool.page_view(int(dst)), part, self._pool.planes, source)
            require_digest(copied, digest, src, subject=ready.key.rid)

    def forget_dead(self) -> None:
        """Nothing of a peer is kept."""

    def close(self) -> None:
        """Nothing is open."""
