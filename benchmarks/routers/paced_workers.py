"""Run mock inference servers as a process of its own, for measurements of an HTTP router: they compute nothing.

    python -m benchmarks.routers.paced_workers --decode 2 --prefill 0 --itl 0.032

They answer as SGLang's servers do, as far as a router asks, and stream one event per token at a pace. Servers for
prefill stream a single token. The process prints its ports as a line of JSON. For each line that it reads, it prints
how many requests the servers of each kind got. It ends with its input.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

import uvloop

from tests.support.web.mock_openai import MODEL, Behaviour, Mock, Peer

CONTEXT = 1 << 17
INFO: dict[str, object] = {
    "model_path": MODEL,
    "served_model_name": MODEL,
    "tokenizer_path": "",
    "is_generation": True,
    "max_total_num_tokens": 1 << 20,
    "max_model_len": CONTEXT,
    "dp_size": 1,
    "version": "0.5.6",
}
CARDS = {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "sglang", "max_model_len": CONTEXT}]}
HEALTH = ("/health", "/health_generate", "/flush_cache")
FACTS = ("/get_server_info", "/server_info", "/get_model_info", "/model_info")


class Worker(Peer):  # type: ignore[misc]  # the mock is not typed
    """One connection to a mock server. `num_tokens`: the length of its answers; None: as the request says."""

    num_tokens: int | None = None
    num_requests = 0  # of all servers of this kind

    def on_message_complete(self) -> None:
        path = self.url.decode().partition("?")[0]
        if path in HEALTH or path in FACTS or path == "/v1/models":
            self._next()
            answer = CARDS if path == "/v1/models" else INFO if path in FACTS else {}
            self.plain(200, json.dumps(answer).encode())
        else:
            super().on_message_complete()

    def generate(self, body: dict[str, Any], is_chat: bool) -> None:
        type(self).num_requests += 1
        self.mock.seen.clear()
        self.mock.asked.clear()
        super().generate(body if self.num_tokens is None else body | {"max_tokens": self.num_tokens}, is_chat)


class PrefillWorker(Worker):
    num_tokens = 1
    num_requests = 0


async def serve(args: argparse.Namespace) -> None:
    loop, ports = asyncio.get_running_loop(), []
    mock = Mock(Behaviour(itl_s=args.itl, ours=False))
    for kind in (*[PrefillWorker] * args.prefill, *[Worker] * args.decode):
        server = await loop.create_server(lambda kind=kind: kind(mock), "127.0.0.1", 0, backlog=4096)  # type: ignore[misc]
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps({"prefill": ports[: args.prefill], "decode": ports[args.prefill :]}), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps({"prefill": PrefillWorker.num_requests, "decode": Worker.num_requests}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--itl", type=float, required=True, help="seconds between a stream's tokens")
    uvloop.run(serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
