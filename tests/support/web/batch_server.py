"""A fake router for `baton generate`. It does what a prompt says, and keeps the requests that it received.

plain text        answered with the prompt itself, 5 + 2 tokens, of the 5 one from a cache
busy N: ...       429 to the first N tries, then answered; `down N: ...` 503
drop N: ...       the connection is closed on the first N tries
refuse 418: ...   this status, with an error in JSON
html: ...         200 and no JSON
last: ...         answered, and the connection is closed without a word
hold: ...         answered when the test says so
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

from tests.support.machine.patience import HANG_GUARD_S
from tests.support.web.serving import QuietHandler, serving

BUSY = {"busy": 429, "down": 503}


class BatchServer(ThreadingHTTPServer):
    """`seen`: prompts in the order in which they came, tries included. `most_open`: requests at one time."""

    daemon_threads = True
    key = ""
    meeting: threading.Barrier | None = None  # every request waits until so many are there

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), BatchHandler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.seen: list[str] = []
        self.paths: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.may_answer = threading.Event()
        self.num_held = 0
        self.num_open = self.most_open = 0
        self.num_connections = 0

    def tries_of(self, prompt: str) -> int:
        return self.seen.count(prompt)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no news here."""


class BatchHandler(QuietHandler):
    protocol_version = "HTTP/1.1"
    server: BatchServer

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.server.num_connections += 1

    def do_GET(self) -> None:
        self.say(200 if self.may_ask() else 401, b'{"data": [{"id": "m"}]}')

    def may_ask(self) -> bool:
        return not self.server.key or self.headers["authorization"] == f"Bearer {self.server.key}"

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        body = json.loads(data)
        prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        with self.server.lock:
            self.server.seen.append(prompt)
            self.server.paths[self.path] += 1
            self.server.num_open += 1
            self.server.most_open = max(self.server.most_open, self.server.num_open)
            tries = self.server.tries_of(prompt)
        if self.server.meeting is not None:
            self.server.meeting.wait(HANG_GUARD_S)
        with self.server.lock:
            self.server.num_open -= 1
        self.do_as_told(prompt, tries)

    def do_as_told(self, prompt: str, tries: int) -> None:
        word, _, rest = prompt.partition(":")[0].partition(" ")
        if not self.may_ask():
            self.say(401, b'{"error": {"message": "key?"}}')
        elif word in BUSY and tries <= int(rest):
            self.say(BUSY[word], b'{"error": {"message": "not now"}}', ("retry-after", "0"))
        elif word == "drop" and tries <= int(rest):
            self.close_connection = True
        elif word == "refuse":
            self.say(int(rest), b'{"error": {"message": "no tea"}}')
        elif word == "html":
            self.say(200, b"<html>\n</html>")
        else:
            if word == "hold":
                with self.server.lock:
                    self.server.num_held += 1
                self.server.may_answer.wait(HANG_GUARD_S)
            self.say(200, whole_answer(prompt), ("x-request-id", f"r-{prompt}"))
            self.close_connection = word == "last"


def whole_answer(prompt: str) -> bytes:
    """Return an answer with line breaks, which must not end up in a file of lines."""
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    return json.dumps({"choices": [{"index": 0, "text": prompt}], "usage": usage}, indent=1).encode()


@contextlib.contextmanager
def batch_server() -> Iterator[BatchServer]:
    with serving(BatchServer()) as server:
        try:
            yield server
        finally:
            server.may_answer.set()
