"""Answers probes of a node over HTTP, with 200 or with 503 and the reason.

GET /ready: does the node take requests? GET /live: does it respond at all? A node that drains is alive.

Only a reason from this file is told, so the port needs neither keys nor TLS. A node that loads its model has no such
port yet.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable

from shared.config.settings.endpoints import bracketed
from shared.core.errors import ConfigError

READY, LIVE = "/ready", "/live"
SLOW_CALLER_S = 1.0  # for a whole call
MOST_CALLERS = 64  # at once; one more ends the oldest call, so that silent callers keep no probe out
MAX_HEAD_BYTES = 8192
STATUS_LINES = {200: "200 OK", 404: "404 Not Found", 503: "503 Service Unavailable"}
NO_ROUTER, LEAVING, HANGS = "no router serves this node", "this node is draining", "this node does not respond"
BROKEN = (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)  # calls


class ReadyPort:
    """`silence_s`: after this time without a call of `tell` the node counts as hanging, as it does at its routers.

    Raises ConfigError if the port can't be had. The node's loop calls `tell`; a thread of the port's own answers.
    """

    def __init__(self, host: str, port: int, silence_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._silence_s = silence_s
        self._clock = clock
        self._told: tuple[float, str] = (clock(), NO_ROUTER)
        self._questions = {READY: self.why_not, LIVE: self.why_dead}  # "": none, the answer is 200
        self._calls: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host.strip("[]"), port), family=family)
        except OSError as error:
            raise ConfigError(f"--ready-port {port}: can't listen on {bracketed(host)}: {error.strerror}") from None
        self.port: int = listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._is_over = asyncio.Event()
        self._thread = threading.Thread(target=self._answer_probes, args=(listener,), name="ready-port", daemon=True)
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
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join()

    def _answer_probes(self, listener: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._take_call, sock=listener, limit=MAX_HEAD_BYTES)
        await self._is_over.wait()
        server.close()
        for writer in self._calls:
            writer.transport.abort()
        while self._calls:
            await asyncio.sleep(0)

    async def _take_call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Say nothing of errors: the caller is gone, and its errors are not the node's."""
        if len(self._calls) >= MOST_CALLERS:
            self._end_oldest()
        self._calls[writer] = None
        try:
            async with asyncio.timeout(SLOW_CALLER_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer_to(head.decode("latin-1")))
                await writer.drain()
        except BROKEN:
            return
        finally:
            self._calls.pop(writer, None)
            writer.close()

    def _end_oldest(self) -> None:
        oldest = next(iter(self._calls))
        del self._calls[oldest]
        oldest.transport.abort()

    def _answer_to(self, head: str) -> bytes:
        method, _, rest = head.partition(" ")
        question = self._questions.get(rest.partition(" ")[0]) if method == "GET" else None
        status, text = (404, "") if question is None else (503 if (why := question()) else 200, why or "yes")
        lines = [
            f"HTTP/1.1 {STATUS_LINES[status]}",
            "Server: baton",
            "Content-Type: text/plain",
            f"Content-Length: {len(text) + 1}",
            "Connection: close",
        ]
        return "\r\n".join([*lines, "", f"{text}\n"]).encode()
