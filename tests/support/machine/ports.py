"""Ports for servers of tests. The kernel gives none of them to connections, so they stay free until a server starts."""

from __future__ import annotations

import contextlib
import random
import socket

FIRST, END = 20000, 32000


def free_port(count: int = 1) -> int:
    """Return the first of `count` neighbouring free ports of the loopback address.

    The start is drawn anew in each process, so test processes that run at once do not meet. Raises AssertionError if
    no ports are free.
    """
    start = random.SystemRandom().randrange(END - FIRST)
    for offset in range(0, END - FIRST, count):
        port = FIRST + (start + offset) % (END - FIRST)
        with contextlib.ExitStack() as taken, contextlib.suppress(OSError):
            for number in range(port, port + count):
                taken.enter_context(socket.create_server(("127.0.0.1", number)))
            return port
    raise AssertionError(f"no {count} neighbouring ports are free")
