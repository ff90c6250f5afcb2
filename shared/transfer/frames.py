"""Transport `zmq`: pages follow their Ready as frames.

A CPU pool's frames are views that libzmq reads while it sends. A GPU pool's frames are copies in pinned memory
(host_bytes.py).
"""

from __future__ import annotations

import numpy as np
import torch

from shared.core.errors import HandoffFailed
from shared.device.gpu import Gpu
from shared.kv.pool import KVPool
from shared.transfer.digest import page_digest
from shared.transfer.host_bytes import reader_of, writer_of
from shared.transfer.interface import (
    WHOLE,
    Frames,
    PageList,
    PageSet,
    Part,
    identify_pages,
    part_of,
    require_digest,
    require_lengths,
    require_part_bytes,
)
from shared.wire.messages import Ready


class FrameSender:
    name = "zmq"
    is_inline = True

    def __init__(self, pool: KVPool, gpu: Gpu | None = None) -> None:
        self._pool = pool
        self._reader = reader_of(pool, gpu)
        self.num_blocks = self._reader.num_blocks

    def describe(self, pages: PageList, part: Part = WHOLE) -> PageSet:
        numbers, generations = identify_pages(self._pool, pages)
        found, block = self._reader.read(numbers, part.bytes_in(self._pool.planes))
        frames, digests = tuple(page.data for page in found), [page_digest(page) for page in found]
        return PageSet(numbers, generations, digests, frames=frames, part=part, block=block)


class FrameReceiver:
    name = "zmq"

    def __init__(self, pool: KVPool, gpu: Gpu | None = None) -> None:
        self._pool = pool
        self._writer = writer_of(pool, gpu)

    def pull(self, ready: Ready, frames: Frames, dst_pages: PageList) -> None:
        require_lengths(ready, dst_pages, self._pool.num_pages)
        part = part_of(ready, self._pool)
        if not ready.inline or isinstance(frames, torch.Tensor) or len(frames) != len(ready.pages):
            raise HandoffFailed(f"{len(ready.pages)} pages announced, {len(frames)} frames came")
        for frame, digest, src, dst in zip(frames, ready.digests, ready.pages, dst_pages, strict=True):
            require_part_bytes(len(frame), part, self._pool)
            copied = self._writer.write(int(dst), part, np.frombuffer(frame, np.uint8))
            require_digest(copied, digest, src, subject=ready.key.rid)

    def forget_dead(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
