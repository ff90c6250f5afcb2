"""Which peers of a ROUTER have gone, from what its monitor says of descriptors. Knows nothing of sockets.

The monitor reports a closed connection as a file descriptor; which peer that was is known from the descriptor that
each message carries. Numbers are reused, so the order matters. In one receive:

    monitor: drain   ->   messages: until the queue is empty   ->   report who is gone

libzmq emits DISCONNECTED when the last message of a connection is in our queue, and before its descriptor is closed.
So the drain comes first and nothing of a gone peer can follow its report; and a message by another peer on the same
descriptor proves that the first one is gone, its DISCONNECTED being here or in the monitor by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class Connections:
    """`drain` fetches what the monitor has and passes it to `closed`."""

    def __init__(self, drain: Callable[[], None]) -> None:
        self._drain = drain
        self._peer_of_fd: dict[int, str] = {}
        self._closed_fds: list[int] = []
        self._gone: list[str] = []

    def closed(self, fds: Iterable[int]) -> None:
        """The monitor's reports, in order."""
        self._closed_fds.extend(fds)

    def seen(self, fd: int, peer: str) -> None:
        """A message of `peer` came in through `fd`."""
        before = self._peer_of_fd.get(fd)
        if before == peer or peer in self._gone:  # a gone peer's last messages prove nothing
            return
        if before is not None:
            self._gone.append(before)
            self._drain()
            if fd in self._closed_fds:  # this report is about the first peer, not about its successor
                self._closed_fds.remove(fd)
        self._peer_of_fd[fd] = peer

    def take_gone(self) -> list[str]:
        """To be called when the message queue is empty. A peer that is back under another descriptor is not gone."""
        for fd in self._closed_fds:
            peer = self._peer_of_fd.pop(fd, None)
            if peer is not None and peer not in self._gone:
                self._gone.append(peer)
        self._closed_fds.clear()
        alive = set(self._peer_of_fd.values())
        gone, self._gone = [peer for peer in self._gone if peer not in alive], []
        return gone
