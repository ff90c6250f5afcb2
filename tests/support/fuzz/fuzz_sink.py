"""Takes whatever comes and throws it away, at the other end of every connection that a fuzzer makes: what its generator
alone costs the machine. Runs as a process of its own until its input ends.

    python -m tests.support.fuzz.fuzz_sink zmtp|http         anything over TCP, with the few bytes that clients wait for
    python -m tests.support.fuzz.fuzz_sink zmq [SECRET]      whole messages, by libzmq, perhaps under a router's key
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

import zmq

from shared.wire.keys.key_files import KeyPair, read_pair
from tests.support.wire.raw_zmtp import COMMAND, GREETING, prop

READY = b"\x05READY" + prop("Socket-Type", "ROUTER")
FIRST = {"zmtp": GREETING + bytes((COMMAND, len(READY))) + READY, "http": b""}
ANSWER = {"zmtp": b"", "http": b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"}


class Sink:
    """The process, and where it listens."""

    def __init__(self, kind: str, keys: Path | None = None, name: str = "router") -> None:
        command = [sys.executable, "-m", "tests.support.fuzz.fuzz_sink", kind, *((str(keys), name) if keys else ())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.endpoint = f"tcp://127.0.0.1:{int(self._process.stdout.readline())}"

    @property
    def url(self) -> str:
        return self.endpoint.replace("tcp://", "http://")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Swallow(asyncio.Protocol):
    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._has_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(FIRST[self._kind])

    def data_received(self, data: bytes) -> None:
        if ANSWER[self._kind] and self._transport.can_write_eof() and not self._has_answered:
            self._has_answered = True
            self._transport.write(ANSWER[self._kind])
            self._transport.write_eof()


async def swallow(kind: str) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Swallow(kind), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def swallow_messages(pair: KeyPair | None) -> None:
    socket = zmq.Context[zmq.Socket[bytes]]().socket(zmq.ROUTER)
    if pair is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    print(socket.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    while True:
        socket.recv_multipart(copy=False)


def main(argv: list[str]) -> None:
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    if argv[0] == "zmq":
        swallow_messages(read_pair(Path(argv[1]), argv[2]) if len(argv) > 1 else None)
    else:
        asyncio.run(swallow(argv[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
