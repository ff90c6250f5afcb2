"""Finds out from a ROUTER's monitor which peers have gone.

The monitor reports ACCEPTED and DISCONNECTED with the connection's descriptor. The system may reuse a descriptor
immediately, even for a connection that is then refused. Messages carry their connection's descriptor and routing id.
Later connections have higher routing ids. `receive` runs these steps:

    drain the monitor   ->   read messages until the queue is empty   ->   report peers that are gone

libzmq emits DISCONNECTED after it has queued the connection's last message, and before it closes the descriptor. So a
peer's messages come before the report that it has gone.
"""

from __future__ import annotations

from collections.abc import Callable


class Connections:
    """`drain` passes the monitor's events, in order, to `accepted` and `closed`."""

    def __init__(self, drain: Callable[[], None]) -> None:
        self._drain = drain
        self._current: dict[int, tuple[bytes, str]] = {}  # descriptor -> last message's routing id and peer
        self._closed: set[int] = set()  # descriptors whose last event was DISCONNECTED
        self._over: set[bytes] = set()  # routing ids of ended connections
        self._gone: list[str] = []

    def accepted(self, fd: int) -> None:
        """End any earlier connection that had this descriptor."""
        self._end(fd)
        self._closed.discard(fd)

    def closed(self, fd: int) -> None:
        self._closed.add(fd)

    def seen(self, fd: int, route: bytes, peer: str) -> None:
        known = self._current.get(fd)
        if route in self._over or (known is not None and known[0] == route):
            return
        self._drain()  # by now libzmq has emitted this connection's ACCEPTED
        known = self._current.get(fd)
        if known is not None and known[0] > route:
            self._over.add(route)  # a late message of an earlier connection
            self._gone.append(peer)
            return
        self._end(fd)
        self._current[fd] = (route, peer)

    def take_gone(self) -> list[str]:
        """Return the peers without a connection. Call this method only when the message queue is empty."""
        for fd in self._closed:
            self._end(fd)
        self._closed.clear()
        self._over.clear()
        alive = {peer for _, peer in self._current.values()}
        gone, self._gone = [peer for peer in dict.fromkeys(self._gone) if peer not in alive], []
        return gone

    def _end(self, fd: int) -> None:
        known = self._current.pop(fd, None)
        if known is not None:
            self._over.add(known[0])
            self._gone.append(known[1])
