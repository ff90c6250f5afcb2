"""Reads a node's links while its model is loaded. Without this, connections and their memory would have no limits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shared.wire.link import NodeLinks

POLL_S = 0.1


@contextmanager
def drop_early_messages(links: NodeLinks) -> Iterator[None]:
    """Drop all messages until the end of the block. Only the new thread may use `links` meanwhile, except `wakeup`.

    No message can be for this node, because no router knows it yet."""
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
        links.wakeup.set()  # what was set for the node's loop, `read` may have cleared
