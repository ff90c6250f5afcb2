"""An OpenAI-compatible server whose answers are a function of the request, and which lies as it is told.

A fault's time is told by how often the same request was asked before: `baton prove URL` asks alone, again, not
streamed, in a crowd, and in another order.
"""

from __future__ import annotations

import json
import math
import threading
import zlib
from collections import Counter
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ALONE, AGAIN, WHOLE, CROWD, OTHERWISE = range(5)
CHANGED_AT = 3  # the position of a changed token
DAY = ['{"weather": "fog', '", "boats": 3', ', "harbour_open":', " true}"]


@dataclass
class Lies:
    """What the server does wrong; nothing, by default. Times count how often the same request was asked before."""

    changes: tuple[int, ...] = ()  # when the token at CHANGED_AT is the second best one, or after a seed another one
    only: str = ""  # the kind of requests that change: "greedy" or "seeded"; "": all
    margin: float = 2.0  # of the best two tokens, in logprob
    moves: float = 0.0  # how far log-probabilities move whenever a request is asked again
    usage: dict[str, int] | None = None  # by field: added to the true number
    longer_prompt_at: int | None = None
    cached: int | None = None  # told instead of the truth
    hides_best: bool = False  # the chosen token is never the most likely one
    penalises: bool = False  # repeated tokens, unless the request says not to: then the best one is not chosen
    sums: bool = False  # probabilities add up to more than 1
    counter_moves: bool = True
    hands_over: bool = True
    has_metrics: bool = True
    refuses: tuple[str, ...] = ()  # fields
    ignores: tuple[str, ...] = ()  # fields that are taken and not heeded
    prose: bool = False  # instead of JSON
    fails_at: int | None = None
    breaks_at: int | None = None  # the stream ends without a finish_reason
    chat: bool = True


class FaultyOpenAI(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, lies: Lies) -> None:
        super().__init__(("127.0.0.1", 0), FaultyHandler)
        self.lies = lies
        self.asked: Counter[str] = Counter()
        self.prompts: set[str] = set()
        self.hits = self.handed_over = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def metrics(self) -> str:
        hits = self.hits if self.lies.counter_moves else 0
        transfers = self.handed_over if self.lies.hands_over else 0
        names = {"vllm:prefix_cache_hits_total": hits, "vllm:nixl_bytes_transferred_count": transfers}
        return "".join(f'{name}{{engine="0"}} {value}.0\n' for name, value in names.items())

    def note(self, body: dict[str, Any]) -> tuple[int, int]:
        """Return (how often this request was asked, how many tokens of its prompt are cached)."""
        prompt = prompt_of(body)
        key = json.dumps({name: body.get(name) for name in ("temperature", "seed", "top_p", "presence_penalty")})
        with self.lock:
            times = self.asked[prompt + key]
            self.asked[prompt + key] += 1
            cached = len(prompt.split()) - 1 if prompt in self.prompts else 0
            self.prompts.add(prompt)
            self.hits += cached
            self.handed_over += 1
        return times, cached


def prompt_of(body: dict[str, Any]) -> str:
    return str(body["prompt"] if "prompt" in body else body["messages"][0]["content"])


def number_of(body: dict[str, Any], position: int) -> int:
    drawn = [body.get(name) for name in ("temperature", "seed", "top_p", "presence_penalty")]
    return zlib.crc32(f"{prompt_of(body)} {drawn} {position}".encode()) % 900


def tokens_of(body: dict[str, Any], times: int, lies: Lies) -> list[str]:
    if "response_format" in body and not lies.prose:
        return DAY
    tokens = [token_at(body, position) for position in range(body["max_tokens"])]
    kind = "seeded" if body["temperature"] else "greedy"
    if times in lies.changes and lies.only in ("", kind) and len(tokens) > CHANGED_AT:
        tokens[CHANGED_AT] = " second"
    return tokens


def token_at(body: dict[str, Any], position: int) -> str:
    return f" w{number_of(body, position)}"


def score_of(token: str, usual: str, times: int, lies: Lies, *, is_greedy: bool) -> dict[str, Any]:
    """Return the token's entry of chat's logprobs. `usual`: the token of a truthful server."""
    best = -1.0 - lies.moves * times
    top = {usual: best, " second": best - lies.margin, " third": -9.0}
    if token != usual and is_greedy:  # the second best one has become the best one
        top = {usual: best - lies.margin, " second": best, " third": -9.0}
    if lies.hides_best and is_greedy:
        top[" other"] = best + 0.1
    if lies.sums:
        top[" more"] = math.log(0.9)
    listed = [{"token": name, "logprob": value} for name, value in top.items()]
    return {"token": token, "logprob": top[token], "top_logprobs": listed}


class FaultyHandler(BaseHTTPRequestHandler):
    server: FaultyOpenAI
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(200, {"data": [{"id": "faulty", "owned_by": "vllm"}]})
        elif self.path == "/version":
            self._send(200, {"version": "0.0.1"})
        elif self.path == "/metrics" and self.server.lies.has_metrics:
            self._bytes(200, self.server.metrics().encode())
        else:
            self._send(404, {"error": {"message": "not here"}})

    def do_POST(self) -> None:
        lies = self.server.lies
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        refused = [name for name in lies.refuses if name in body]
        if refused or (self.path.startswith("/v1/chat") and not lies.chat):
            self._send(400, {"error": {"message": f"{refused} not supported"}})
            return
        for name in lies.ignores:
            body.pop(name, None)
        times, cached = self.server.note(body)
        if times == lies.fails_at:
            self._send(503, {"error": {"message": "too busy"}})
            return
        tokens = tokens_of(body, times, lies)
        usage = self._usage(body, times, cached, len(tokens))
        finish = None if times == lies.breaks_at else "stop" if tokens is DAY else "length"
        if not body.get("stream"):
            self._send(200, {"choices": [self._choice(body, tokens, times, finish)], "usage": usage})
            return
        parts = [{"choices": [self._choice(body, [token], times, None, i)]} for i, token in enumerate(tokens)]
        parts[-1]["choices"][0]["finish_reason"] = finish
        if body.get("stream_options"):
            parts.append({"choices": [], "usage": usage})
        events = [f"data: {json.dumps(part)}\n\n" for part in parts]
        self._bytes(200, "".join([*events, "data: [DONE]\n\n"]).encode())

    def _choice(
        self, body: dict[str, Any], tokens: list[str], times: int, finish: str | None, first: int = 0
    ) -> dict[str, Any]:
        lies, kind = self.server.lies, {"is_greedy": not body["temperature"]}
        if lies.penalises and body.get("repetition_penalty") != 1.0:
            lies = replace(lies, hides_best=True)
        text = "".join(tokens)
        is_chat = "messages" in body
        said = ({"delta" if body.get("stream") else "message": {"content": text}}) if is_chat else {"text": text}
        scores = [
            score_of(token, token if token in DAY else token_at(body, first + i), times, lies, **kind)
            for i, token in enumerate(tokens)
        ]
        shown = {"content": scores} if is_chat else legacy(scores)
        return {"index": 0, **said, "finish_reason": finish, "logprobs": shown if body.get("logprobs") else None}

    def _usage(self, body: dict[str, Any], times: int, cached: int, completion: int) -> dict[str, Any]:
        lies = self.server.lies
        prompt = len(prompt_of(body).split()) + (times == lies.longer_prompt_at)
        told = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        for name, more in (lies.usage or {}).items():
            told[name] += more
        return told | {"prompt_tokens_details": {"cached_tokens": cached if lies.cached is None else lies.cached}}

    def _send(self, status: int, body: dict[str, Any]) -> None:
        self._bytes(status, json.dumps(body).encode())

    def _bytes(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def legacy(scores: list[dict[str, Any]]) -> dict[str, Any]:
    """The form of /v1/completions."""
    return {
        "tokens": [one["token"] for one in scores],
        "token_logprobs": [one["logprob"] for one in scores],
        "top_logprobs": [{top["token"]: top["logprob"] for top in one["top_logprobs"]} for one in scores],
    }
