"""Transport `zmq`: the pages follow their Ready as frames, from the sender's pool into the receiver's.

The frames are views, not copies: libzmq reads the pool while it sends. A page freed too early would travel with the
next owner's bytes, which the receiver's digest tells. Knows nothing of the socket they travel on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.core.errors import HandoffFailed
from shared.kv.pool import KVPool
from shared.transfer.interface import (
    PageList,
    PageSet,
    fill_page,
    page_digest,
    require_digest,
    require_lengths,
    require_page_bytes,
)
from shared.wire.codec import Buffer
from shared.wire.messages import Ready


class FrameSender:
    name = "zmq"

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def describe(self, pages: PageList) -> PageSet:
        views = [self._pool.page_view(int(page)) for page in pages]
        return PageSet(
            pages=[int(page) for page in pages],
            generations=[int(self._pool.generation[page]) for page in pages],
            digests=[page_digest(view) for view in views],
            frames=tuple(view.data for view in views),
        )


class FrameReceiver:
    name = "zmq"

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def pull(self, ready: Ready, frames: Sequence[Buffer], dst_pages: PageList) -> None:
        require_lengths(ready, dst_pages, self._pool.num_pages)
        if not ready.inline or len(frames) != len(ready.pages):
            raise HandoffFailed(f"{len(ready.pages)} pages announced, {len(frames)} frames came")
        for frame, digest, src, dst in zip(frames, ready.digests, ready.pages, dst_pages, strict=True):
            require_page_bytes(len(frame), self._pool)
            copied = fill_page(self._pool.page_view(int(dst)), np.frombuffer(frame, np.uint8))
            require_digest(copied, digest, src, subject=ready.key.rid)

    def forget_dead(self) -> None:
        """Nothing of a peer is kept."""

    def close(self) -> None:
        """Nothing is open."""
