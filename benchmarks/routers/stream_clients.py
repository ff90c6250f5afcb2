"""Hold many event streams open, as a process of its own, and count their events: the client of router measurements.

    python -m benchmarks.routers.stream_clients PORT --streams 10000 [--per-s 500] [--max-tokens 64]
                                                [--prompt-tokens 32]

The process prints one line of JSON when all streams have an event or were refused, and then one for each line that it
reads: the counts so far. When its input ends, it hangs up. With `--again`, a stream whose answer ends is opened again.
With `--together`, the requests are sent at one moment, after all connections are open.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from dataclasses import dataclass, field
from typing import cast

import uvloop

from shared.wire.descriptors import raise_limit

STATUS, EVENT, DONE = re.compile(rb"HTTP/1\.1 (\d{3})"), b"data: {", b"data: [DONE]"
TAIL = len(DONE) - 1  # no pattern is longer
OPEN_TIMEOUT_S = 240.0


@dataclass
class Counts:
    """`events`: of all streams. `begun`: streams with an event. `whole`: answers with their last event."""

    events: int = 0
    begun: int = 0
    whole: int = 0
    lost: int = 0  # connections that ended before their answer
    statuses: dict[str, int] = field(default_factory=dict)

    @property
    def refused(self) -> int:
        return sum(count for status, count in self.statuses.items() if status != "200")

    def line(self) -> str:
        return json.dumps({"at": time.monotonic(), **vars(self)})


class Stream(asyncio.Protocol):
    """One connection with one request after another. `_tail` keeps the part of a line that a read may have cut."""

    def __init__(self, request: bytes, counts: Counts, *, asks_again: bool, asks_later: bool = False) -> None:
        self._request = request
        self._counts = counts
        self._asks_again, self._asks_later = asks_again, asks_later
        self._tail = b""
        self._has_begun = self._has_status = False
        self._is_whole = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._asks_later:
            self.ask()

    def ask(self) -> None:
        assert self._transport is not None
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        text = self._tail + data
        if not self._has_status and (head := STATUS.search(text)):  # the end of the answer before it may come first
            self._has_status = True
            status = head[1].decode()
            self._counts.statuses[status] = self._counts.statuses.get(status, 0) + 1
        found = text.count(EVENT, max(0, len(self._tail) + 1 - len(EVENT)))  # those in the tail have been counted
        self._counts.events += found
        if found and not self._has_begun:
            self._has_begun = True
            self._counts.begun += 1
        self._tail = text[-TAIL:]
        if DONE in text:
            self._end()

    def _end(self) -> None:
        self._counts.whole += 1
        self._tail = b""
        self._is_whole = not self._asks_again
        if self._asks_again and self._transport is not None:
            self._has_status = False
            self.ask()

    def connection_lost(self, exc: Exception | None) -> None:
        self._counts.lost += not self._is_whole


def make_request(args: argparse.Namespace, rng: random.Random) -> bytes:
    """Return a whole HTTP request. Chats have words, completions token ids."""
    body: dict[str, object] = {"model": args.model, "max_tokens": args.max_tokens, "stream": True, "temperature": 0}
    if args.chat:
        text = " ".join(rng.choice(("red", "green", "blue", "black")) for _ in range(args.prompt_tokens))
        path, more = "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}
    else:
        ids = [rng.randrange(10, 90) for _ in range(args.prompt_tokens)]
        path, more = "/v1/completions", {"prompt": ids}
    data = json.dumps({**body, **more, "ignore_eos": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return f"{head}\r\n\r\n".encode() + data


async def open_all(args: argparse.Namespace, counts: Counts) -> list[asyncio.BaseTransport]:
    """Open the streams one after another at the pace, and wait until each has an event or a refusal."""
    loop, rng = asyncio.get_running_loop(), random.Random(args.seed)
    transports: list[asyncio.BaseTransport] = []
    streams: list[Stream] = []
    began = time.monotonic()
    for index in range(args.streams):
        await asyncio.sleep(max(0.0, began + index / args.per_s - time.monotonic()))
        stream = Stream(make_request(args, rng), counts, asks_again=args.again, asks_later=args.together)
        transport, _ = await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", args.port)  # type: ignore[misc]
        transports.append(transport)
        streams.append(stream)
    for stream in streams if args.together else ():
        stream.ask()
    while counts.begun + counts.refused < args.streams and time.monotonic() < began + OPEN_TIMEOUT_S:
        await asyncio.sleep(0.05)
    return transports


async def run(args: argparse.Namespace) -> None:
    counts = Counts()
    transports = await open_all(args, counts)
    print(counts.line(), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(counts.line(), flush=True)
    for transport in transports:
        transport.close()
    await asyncio.sleep(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--per-s", type=float, default=500.0, help="streams that are opened in a second")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--model", default="bench")
    parser.add_argument("--chat", action="store_true", help="chat completions with words, not completions with ids")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    raise_limit()
    uvloop.run(run(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
