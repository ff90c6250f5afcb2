"""Reads a node's links while its model is loaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shared.wire.zeromq.link import NodeLinks

POLL_S = 0.1


@contextmanager
def drop_early_messages(links: NodeLinks) -> Iterator[None]:
    """Read and drop messages on a thread. Inside the block, the caller may use only `links.wakeup`."""
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            links.poll(POLL_S)

    thread = threading.Thread(target=read, name="early-peers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        links.wakeup.set()
        thread.join()
        links.wakeup.set()
