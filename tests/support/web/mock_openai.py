"""An OpenAI-compatible server that answers by a script: when each token comes is known, and so is every fault.

    python tests/support/web/mock_openai.py --ttft 0.2 --itl 0.02          prints its port, serves until it is ended

Its tokens are a function of the prompt. With `ours` it shows what a Baton router shows: token ids, /metrics of the real
code, the owner of the model. Faults are told by the number of the generation request that they happen to.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import queue
import threading
import zlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import httptools
import uvloop
from prometheus_client import CollectorRegistry

from shared.observe.metrics import ClusterMetrics, NodeReport, RequestMetrics, render
from tests.support.machine.patience import HANG_GUARD_S

PAGES = 64
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
MODEL = "mock"
CALL_HEAD, CALL_TAIL = '{"command":"', '"}'


@dataclass
class Behaviour:
    """`None` or 0: this fault does not happen. (number, position) count from 0."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    per_chunk: int = 1
    ours: bool = True
    metrics_shift_s: float = 0.0  # added to what its metrics say of TTFT
    refuse: int = 0  # HTTP status of all generation requests
    wrong_at: tuple[int, int] | None = None  # (the how manieth request with a prompt that was asked before, position)
    margin: float = 5.0  # between the best two tokens, wherever logprobs are asked for
    stall_at: tuple[int, int] | None = None
    stall_s: float = 0.0
    break_at: tuple[int, int] | None = None
    leak_after: int | None = None  # this request leaves a page behind
    gone_stay_open: bool = False  # requests whose clients left never end
    metrics_until: int | None = None  # from this request on nobody answers at /metrics
    closes: bool = False  # every connection after its answer
    caches: bool = False  # usage tells how many first words an earlier prompt had too
    call_words: int = 0  # length of the call of a tool that a request must get


def token_of(prompt: str, position: int) -> int:
    return 10 + zlib.crc32(f"{prompt} {position}".encode()) % 900


class Mock:
    """State of the server; `seen` holds the bodies of all generation requests in order."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.seen: list[dict] = []
        self.asked: set[str] = set()
        self.cached: set[int] = set()  # hashes of all beginnings of all prompts, in words
        self.num_repeated = 0  # requests with a prompt that was asked before
        self.num_connections = 0  # that brought a request
        self.num_gone = 0  # clients that left before their answer's end
        self.num_open = 0  # answers under way
        self.port = 0
        self._registry = CollectorRegistry()
        self.metrics = RequestMetrics(self._registry)
        self._cluster = ClusterMetrics(self._registry)

    def note(self, prompt: str) -> int | None:
        """Count a repeated prompt and return the repetitions before it; None for a new prompt."""
        if prompt not in self.asked:
            self.asked.add(prompt)
            return None
        self.num_repeated += 1
        return self.num_repeated - 1

    def num_cached(self, words: list[str]) -> int:
        """Return how many of the first words a prompt before had too, and cache them all."""
        beginnings = list(itertools.accumulate(words, lambda before, word: hash((before, word)), initial=0))[1:]
        found = sum(itertools.takewhile(bool, (one in self.cached for one in beginnings)))
        self.cached.update(beginnings)
        return found

    @property
    def has_died(self) -> bool:
        until = self.behaviour.metrics_until
        return until is not None and len(self.seen) > until

    def page(self) -> bytes:
        leaked = self.behaviour.leak_after is not None and len(self.seen) > self.behaviour.leak_after
        held = 1 if leaked else 0
        pages = {"free": PAGES - held, "held": held}
        self._cluster.update(
            NodeReport("decode-0", "decode", 1, PAGES, pages, {"free": 8}, 0, 0, counters={}, observations={})
        )
        return render(self._registry)


class Peer(asyncio.Protocol):
    """One connection: requests one after another."""

    def __init__(self, mock: Mock) -> None:
        self.mock = mock
        self.transport: asyncio.Transport | None = None
        self.answer: Answer | None = None

    def connection_made(self, transport):
        self.transport = transport
        self.is_used = False
        self._next()

    def _next(self):
        self.parser, self.url, self.body = httptools.HttpRequestParser(self), b"", b""

    def data_received(self, data):
        self.parser.feed_data(data)

    def connection_lost(self, error):
        if self.answer is not None:
            self.answer.gone()

    def on_url(self, url):
        self.url += url

    def on_body(self, body):
        self.body += body

    def on_message_complete(self):
        path, body = self.url.decode(), self.body
        self.mock.num_connections += not self.is_used
        self.is_used = True
        self._next()
        if path == "/v1/models":
            owner = "baton" if self.mock.behaviour.ours else "somebody"
            self.plain(200, json.dumps({"data": [{"id": MODEL, "owned_by": owner}]}).encode())
        elif path == "/metrics" and self.mock.has_died:
            self.transport.abort()
        elif path == "/metrics" and self.mock.behaviour.ours:
            self.plain(200, self.mock.page())
        elif path.endswith("/completions"):
            self.generate(json.loads(body), "chat" in path)
        else:
            self.plain(404, b'{"error": {"message": "there is nothing at this path"}}')

    def plain(self, status, body):
        head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)

    def generate(self, body, is_chat):
        number = len(self.mock.seen)
        self.mock.seen.append(body)
        if self.mock.behaviour.refuse:
            self.plain(self.mock.behaviour.refuse, b'{"error": {"message": "not now"}}')
        elif body.get("stream"):
            self.answer = Answer(self, number, body, is_chat)
        else:
            self.plain(200, whole(self.mock, number, body, is_chat))


def prompt_text(body, is_chat):
    return "\n".join(map(text_of, body["messages"])) if is_chat else body["prompt"]


def text_of(message):
    return message["content"] or message["tool_calls"][0]["function"]["arguments"]


def whole(mock, number, body, is_chat):
    """A golden run asks like this, with logprobs."""
    mock.note(prompt_text(body, is_chat))
    ids = [token_of(prompt_text(body, is_chat), i) for i in range(body["max_tokens"])]
    text = "".join(f" w{token}" for token in ids)
    choice = {"index": 0, "finish_reason": "length", "token_ids": ids}
    tops = [{"token": "a", "logprob": -0.1}, {"token": "b", "logprob": -0.1 - mock.behaviour.margin}]
    if is_chat:
        entry = {"token": "a", "logprob": -0.1, "top_logprobs": tops}
        choice |= {"message": {"content": text}, "logprobs": {"content": [entry] * len(ids)}}
    else:
        rows = [{top["token"]: top["logprob"] for top in tops}] * len(ids)
        choice |= {"text": text, "logprobs": {"top_logprobs": rows}}
    if not mock.behaviour.ours:
        del choice["token_ids"]
    return json.dumps({"choices": [choice]}).encode()


class Answer:
    """One streamed answer: a chunk at each time of the script."""

    def __init__(self, peer, number, body, is_chat):
        self.peer, self.number, self.is_chat = peer, number, is_chat
        self.behaviour, self.metrics = peer.mock.behaviour, peer.mock.metrics
        self.prompt = prompt_text(body, is_chat)
        self.repetition = peer.mock.note(self.prompt)
        self.is_call = bool(self.behaviour.call_words) and body.get("tool_choice") == "required"
        self.num_tokens = self.behaviour.call_words if self.is_call else body["max_tokens"]
        self.num_cached = peer.mock.num_cached(self.prompt.split()) if self.behaviour.caches else 0
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        self.head = {"id": f"x-{number}", "object": kind, "created": 1, "model": MODEL}
        self.usage = (body.get("stream_options") or {}).get("include_usage")
        self.shows_ids = bool(body.get("return_token_ids"))
        self.position = 0
        self.loop = asyncio.get_running_loop()
        self.start = self.last = self.loop.time()
        self.is_over = False
        peer.mock.num_open += 1
        self.metrics.started()
        self.timer = self.loop.call_at(self.start + self.behaviour.ttft_s, self.step)

    def write(self, data):
        self.peer.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def event(self, choices, **more):
        self.write(b"data: " + json.dumps(self.head | {"choices": choices} | more).encode() + b"\n\n")

    def step(self):
        here = (self.number, self.position)
        if here == self.behaviour.break_at:
            self.peer.transport.abort()
            return
        if self.position == 0:
            self.peer.transport.write(STREAM_HEAD)
            if self.is_chat:
                self.event([{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        self.tokens(min(self.behaviour.per_chunk, self.num_tokens - self.position))
        if self.position >= self.num_tokens:
            self.end()
            return
        stalls = self.behaviour.stall_at == (self.number, self.position)
        chunk = self.position // self.behaviour.per_chunk
        due = self.start + self.behaviour.ttft_s + chunk * self.behaviour.itl_s
        self.timer = self.loop.call_at(due + (self.behaviour.stall_s if stalls else 0.0), self.step)

    def tokens(self, count):
        ids = []
        for position in range(self.position, self.position + count):
            wrong = self.behaviour.wrong_at == (self.repetition, position)
            ids.append(token_of(self.prompt, position) + (1000 if wrong else 0))
        self.observe(count)
        self.position += count
        text = "".join(f" w{token}" for token in ids)
        is_last = self.position >= self.num_tokens
        choice = {"index": 0, "finish_reason": ("tool_calls" if self.is_call else "length") if is_last else None}
        if self.is_call:
            arguments = (text if self.position > count else CALL_HEAD + text[1:]) + CALL_TAIL * is_last
            choice |= {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}}
        else:
            choice |= {"delta": {"content": text}} if self.is_chat else {"text": text}
        if self.shows_ids:
            choice["token_ids"] = ids
        self.event([choice])

    def observe(self, count):
        now = self.loop.time()
        if self.position == 0:
            self.metrics.first_token(now - self.start + self.behaviour.metrics_shift_s)
        for _ in range(count if self.position else count - 1):
            self.metrics.next_token((now - self.last) / count)
        self.last = now

    def end(self):
        if self.usage:
            used = {"prompt_tokens": len(self.prompt.split()), "completion_tokens": self.num_tokens}
            if self.behaviour.caches:
                used["prompt_tokens_details"] = {"cached_tokens": self.num_cached}
            self.event([], usage=used)
        self.write(b"data: [DONE]\n\n")
        self.peer.transport.write(b"0\r\n\r\n")
        self.finish("length")
        if self.behaviour.closes:
            self.peer.transport.close()

    def gone(self):
        if not self.is_over:
            self.peer.mock.num_gone += 1
            self.timer.cancel()
            self.finish("abort")

    def finish(self, outcome):
        self.is_over = True
        self.peer.answer = None
        self.peer.mock.num_open -= 1
        if outcome != "abort" or not self.behaviour.gone_stay_open:
            self.metrics.ended(outcome, self.loop.time() - self.start)


@contextlib.asynccontextmanager
async def serving(behaviour: Behaviour, port: int = 0, tls=None) -> AsyncIterator[Mock]:
    mock = Mock(behaviour)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Peer(mock), "127.0.0.1", port, backlog=4096, ssl=tls)
    mock.port = server.sockets[0].getsockname()[1]
    try:
        yield mock
    finally:
        server.close()


@contextlib.contextmanager
def in_thread(behaviour: Behaviour) -> Iterator[Mock]:
    """For callers that block: the server has a thread and an event loop of its own."""
    started: queue.SimpleQueue = queue.SimpleQueue()

    async def serve_until_told() -> None:
        async with serving(behaviour) as mock:
            told = asyncio.Event()
            started.put((mock, asyncio.get_running_loop(), told))
            await told.wait()

    thread = threading.Thread(target=lambda: uvloop.run(serve_until_told()))
    thread.start()
    mock, loop, told = started.get(timeout=HANG_GUARD_S)
    try:
        yield mock
    finally:
        loop.call_soon_threadsafe(told.set)
        thread.join()


async def serve(args: argparse.Namespace) -> None:
    behaviour = Behaviour(ttft_s=args.ttft, itl_s=args.itl, ours=not args.foreign)
    async with serving(behaviour, args.port) as mock:
        print(mock.port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft", type=float, default=0.0)
    parser.add_argument("--itl", type=float, default=0.0)
    parser.add_argument("--foreign", action="store_true")
    uvloop.run(serve(parser.parse_args()))
