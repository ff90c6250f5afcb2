"""Limit the bytes of frames on their way to a peer, and the pinned blocks that hold frames.

    describe -> Ready and frames -> | our queue, TCP, the peer's inbox | -> taken by the peer's loop -> FramesTaken
    describe -> frames, in a block of the sender -> | queue of the peer's connection | -> gone, and the block is back.

Only pages of a GPU's pool travel in blocks (shared/transfer/host_bytes.py).
"""

from __future__ import annotations

import queue
import weakref
from collections import Counter
from collections.abc import Callable

from shared.transfer.interface import PageSender, PageSet

SHARES = 4  # one peer may hold 1/SHARES of the blocks
UNTAKEN_BYTES = 24 << 20  # per peer; a peer closes a connection with 80 MiB unread (shared/wire/zeromq/watch.py)


class Unread:
    """Owned by the node's loop. `wake` is called on any thread when a peer has read a block."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._num: Counter[str] = Counter()  # by peer: page sets that are not read yet
        self._read: queue.SimpleQueue[str] = queue.SimpleQueue()  # peers that have read a set; filled on any thread

    def has_room(self, peer: str, sender: PageSender, untaken: int, num_bytes: int) -> bool:
        """Return whether a page set with `num_bytes` of frames may go to a peer with `untaken` bytes.

        A peer without untaken frames gets a set of any size. Return False without a free block: the transfer thread
        would wait."""
        fits = not untaken or untaken + num_bytes <= UNTAKEN_BYTES
        return fits and self._has_block(peer, sender)

    def _has_block(self, peer: str, sender: PageSender) -> bool:
        most = sender.num_blocks
        return not most or (self._num[peer] < max(1, most // SHARES) and self._num.total() < most)

    def begin(self, peer: str) -> None:
        self._num[peer] += 1

    def described(self, peer: str, page_set: PageSet | None) -> None:
        """Mark a page set as read. A set in a block is marked later, when the peer has read the block."""
        if page_set is None or page_set.block is None:
            self._read.put(peer)
        else:
            weakref.finalize(page_set.block, self._tell, peer).atexit = False

    def _tell(self, peer: str) -> None:
        self._read.put(peer)
        self._wake()

    def take_read(self) -> None:
        """Stop counting the page sets marked as read."""
        while not self._read.empty():
            peer = self._read.get()
            self._num[peer] -= 1
            if not self._num[peer]:
                del self._num[peer]
