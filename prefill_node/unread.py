"""Limits the pinned blocks that each peer has not read yet, so that one that stops reading can't take them all.

    describe -> frames, in a block of the sender's -> | queue of the peer's connection | -> gone, and the block is back

Pages of a pool on a GPU travel in such blocks (shared/transfer/host_bytes.py); those of one on a CPU lie in the pool.
"""

from __future__ import annotations

import queue
import weakref
from collections import Counter
from collections.abc import Callable

from shared.transfer.interface import PageSender, PageSet

SHARES = 4  # a peer may hold 1/SHARES of the blocks


class Unread:
    """Owned by the node's loop. `wake` is called on any thread, when a peer has read something."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._num: Counter[str] = Counter()  # page sets by peer: being described, or not read yet
        self._read: queue.SimpleQueue[str] = queue.SimpleQueue()  # peers, filled by any thread

    def has_room(self, peer: str, sender: PageSender) -> bool:
        """Peers together never get more blocks than there are: to take one more would block the transfer thread."""
        most = sender.num_blocks
        return not most or (self._num[peer] < max(1, most // SHARES) and self._num.total() < most)

    def begin(self, peer: str) -> None:
        """A page set of it is being described."""
        self._num[peer] += 1

    def described(self, peer: str, page_set: PageSet | None) -> None:
        """It is, or could not be."""
        if page_set is None or page_set.block is None:
            self._read.put(peer)
        else:
            weakref.finalize(page_set.block, self._tell, peer).atexit = False

    def _tell(self, peer: str) -> None:
        self._read.put(peer)
        self._wake()

    def take_read(self) -> None:
        """Book what was read since the last call. Peers that have read all are forgotten."""
        while not self._read.empty():
            peer = self._read.get()
            self._num[peer] -= 1
            if not self._num[peer]:
                del self._num[peer]
