"""A server that says the same to every GET."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

from tests.support.web.serving import QuietHandler, serving


@contextlib.contextmanager
def answering(body: bytes) -> Iterator[str]:
    """Serve `body` on loopback, and yield the URL."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.say(200, body)

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"http://127.0.0.1:{server.server_address[1]}"
