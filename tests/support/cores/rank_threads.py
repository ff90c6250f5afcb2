"""Followers of a node's rank 0 as threads of this process, each at a socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from tests.support.machine.patience import HANG_GUARD_S


class RankThreads:
    """`sockets`: rank 0's ends. `errors`: for what the followers raise."""

    def __init__(self, num: int) -> None:
        self.sockets: list[socket.socket] = []
        self.errors: list[BaseException] = []
        self.threads: list[threading.Thread] = []
        self._num = num

    def start(self, main: Callable[[int, socket.socket], None]) -> None:
        """Call `main` for ranks 1 .. num, with the rank's own end."""
        pairs = [socket.socketpair() for _ in range(self._num)]
        self.sockets = [ours for ours, _ in pairs]
        self.threads = [
            threading.Thread(target=main, args=(rank, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs, start=1)
        ]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        for ours in self.sockets:
            ours.close()
        for thread in self.threads:
            thread.join(HANG_GUARD_S)
            assert not thread.is_alive(), "a follower did not end"
