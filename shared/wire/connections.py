"""Which peers of a ROUTER have gone, from what its monitor says of descriptors. Knows nothing of sockets.

The monitor reports ACCEPTED and DISCONNECTED by descriptor, and descriptors are reused: at once, by anybody, also by
connections that never come about (a foreign key). A message carries its descriptor and the routing id of its
connection, which libzmq counts upwards and never uses twice. In one receive:

    monitor: drain   ->   messages: until the queue is empty   ->   report who is gone

libzmq emits DISCONNECTED when the last message of a connection is in our queue, and before its descriptor is closed, so
nothing of a gone peer can follow its report. A DISCONNECTED with an ACCEPTED behind it is about the connection before.
"""

from __future__ import annotations

from collections.abc import Callable


class Connections:
    """`drain` fetches what the monitor has and passes it, in order, to `accepted` and `closed`."""

    def __init__(self, drain: Callable[[], None]) -> None:
        self._drain = drain
        self._current: dict[int, tuple[bytes, str]] = {}  # fd -> (routing id, peer) of the last one heard there
        self._closed: set[int] = set()  # descriptors of which a DISCONNECTED was the last that we heard
        self._over: set[bytes] = set()  # routing ids of ended connections; messages of theirs may still be in the queue
        self._gone: list[str] = []

    def accepted(self, fd: int) -> None:
        """A new connection: whoever was there before is gone, heard or not."""
        self._end(fd)
        self._closed.discard(fd)

    def closed(self, fd: int) -> None:
        self._closed.add(fd)

    def seen(self, fd: int, route: bytes, peer: str) -> None:
        """A message of `peer` came in through `fd`, by the connection with that routing id."""
        known = self._current.get(fd)
        if route in self._over or (known is not None and known[0] == route):
            return
        self._drain()  # its own ACCEPTED is there by now
        known = self._current.get(fd)
        if known is not None and known[0] > route:
            self._over.add(route)  # the last words of the one before
            self._gone.append(peer)
            return
        self._end(fd)
        self._current[fd] = (route, peer)

    def take_gone(self) -> list[str]:
        """To be called when the message queue is empty. A peer that is back on another connection is not gone."""
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
