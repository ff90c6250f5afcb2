"""A socket that programs outside the cluster subscribe to: numbered messages of one topic.

It has none of the guards of `sockets.py`, because its callers send no more than subscriptions. So it has its own I/O
thread, and a limit on what they send: it can't delay or end the links.
"""

from __future__ import annotations

import itertools

import zmq

from shared.config.settings.endpoints import is_ipv6
from shared.core.errors import ConfigError
from shared.wire.zeromq.monitor import has_input

MOST_WAITING = 1000  # messages for one subscriber; it misses what comes beyond
MAX_CALL_BYTES = 1024  # of a subscription
CALLS_AT_ONCE = 64


class Publisher:
    """Used by one thread. No call waits. Messages are [topic, number (8 bytes, big-endian), payload], from number 0."""

    def __init__(self, endpoint: str, topic: str) -> None:
        """Raise ConfigError if the address is in use or not this machine's."""
        self._topic = topic.encode()
        self._numbers = itertools.count()
        self._followed: set[bytes] = set()  # what subscribers asked for, if our topic begins with it
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, MOST_WAITING)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # a full inbox is one half of libzmq's issue 4364
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_CALL_BYTES)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # tells of each subscriber, not of the first alone
        self._socket.setsockopt(zmq.IPV6, is_ipv6(endpoint))
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"can't bind {endpoint}: {error.strerror}") from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\x00")

    def look_for_followers(self) -> tuple[bool, bool]:
        """Return whether anybody is subscribed, and whether somebody has joined since the last call."""
        has_joined = False
        for _ in range(CALLS_AT_ONCE):
            if not has_input(self._socket):
                break
            call = self._socket.recv(zmq.NOBLOCK)
            prefix = call[1:]
            if not self._topic.startswith(prefix):
                continue
            if call[:1] == b"\x01":
                has_joined = True
                self._followed.add(prefix)
            elif call[:1] == b"\x00":
                self._followed.discard(prefix)
        return bool(self._followed), has_joined

    def publish(self, payload: bytes) -> None:
        """A subscriber whose queue is full misses this message."""
        self._socket.send_multipart([self._topic, next(self._numbers).to_bytes(8), payload], zmq.NOBLOCK)

    def close(self) -> None:
        """Drop what waits. Idempotent."""
        self._socket.close(0)
        self._context.term()
