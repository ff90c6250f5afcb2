"""Answers probes of a node over HTTP, with 200 or with 503 and the reason.

GET /ready: does the node take requests? GET /live: does it respond at all? A node that drains is alive.

Only a reason from this file is told, so the port needs neither keys nor TLS. A node that loads its model has no such
port yet.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from shared.config.endpoints import bracketed
from shared.core.errors import ConfigError

READY, LIVE = "/ready", "/live"
SLOW_CALLER_S = 1.0  # callers are answered one after another, so none may take long
POLL_S = 0.1  # the longest that `close` waits
NO_ROUTER, LEAVING, HANGS = "no router serves this node", "this node is draining", "this node does not respond"


class ReadyPort:
    """`silence_s`: after this time without a call of `tell` the node counts as hanging, as it does at its routers.

    Raises ConfigError if the port can't be had. The node's loop calls `tell`; a thread of the port's own answers.
    """

    def __init__(self, host: str, port: int, silence_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._silence_s = silence_s
        self._clock = clock
        self._told: tuple[float, str] = (clock(), NO_ROUTER)
        try:
            self._server = ReadyServer(host.strip("[]"), port, {READY: self.why_not, LIVE: self.why_dead})
        except OSError as error:
            raise ConfigError(f"--ready-port {port}: can't listen on {bracketed(host)}: {error.strerror}") from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="ready-port", daemon=True
        )
        self._thread.start()

    def tell(self, *, is_served: bool, is_leaving: bool) -> None:
        why_not = LEAVING if is_leaving else "" if is_served else NO_ROUTER
        self._told = (self._clock(), why_not)

    def why_not(self) -> str:
        """Return why the node takes no requests; "" if it takes some."""
        return self.why_dead() or self._told[1]

    def why_dead(self) -> str:
        return HANGS if self._clock() - self._told[0] > self._silence_s else ""

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class ReadyServer(HTTPServer):
    """`questions`: path -> the reason for a 503; "": none, the answer is 200."""

    def __init__(self, host: str, port: int, questions: Mapping[str, Callable[[], str]]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.questions = questions
        super().__init__((host, port), ReadyHandler)

    def server_bind(self) -> None:
        """Bind without the look-up of the host's name that HTTPServer does, which may take long."""
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the caller is gone, and its errors are not the node's."""


class ReadyHandler(BaseHTTPRequestHandler):
    server: ReadyServer
    timeout = SLOW_CALLER_S

    def do_GET(self) -> None:  # noqa: N802 - the library's name
        if self.path not in self.server.questions:
            self.send_error(404)
            return
        why_not = self.server.questions[self.path]()
        text = f"{why_not or 'yes'}\n".encode()
        self.send_response(503 if why_not else 200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def version_string(self) -> str:
        return "baton"

    def log_message(self, format: str, *args: Any) -> None:
        """Log no probes."""
