"""Run a socketserver in a thread for as long as a `with` block, and answer HTTP requests without logging them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from socketserver import BaseServer
from typing import TypeVar

S = TypeVar("S", bound=BaseServer)


class QuietHandler(BaseHTTPRequestHandler):
    def say(self, status: int, data: bytes, *headers: tuple[str, str]) -> None:
        """Answer. The body's length is added to `headers`; a HEAD gets no body."""
        self.send_response(status)
        for name, value in (*headers, ("content-length", str(len(data)))):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """The requests are no news here."""


@contextlib.contextmanager
def serving(server: S) -> Iterator[S]:
    """Close it at the end."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
