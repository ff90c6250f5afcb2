"""Ask any OpenAI-compatible server, one request per connection: streamed or not, alone or many at once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.client import HTTPResponse
from typing import Any

from deploy.router_http import UNREACHABLE, RouterHttp, error_message, printable
from deploy.tools.prove.asks import Ask, Way, limit_of
from deploy.tools.prove.recorded import RecordedAnswer, read_answer
from deploy.tools.traffic.sse import DONE, Splitter
from shared.core.errors import ConfigError

TIMEOUT_S = 600.0  # of a whole answer, however its bytes come
MOST_LOST = 3
MAX_BYTES = 1 << 26  # of a whole answer
LOST = RecordedAnswer(error="no answer", status=0)
READ_BYTES = 1 << 16
MAX_SHOWN = 200
TOP = 5  # most likely tokens asked for: as many as every engine gives
PROBE_TOKENS = 4
PROBE = Ask("probe", "greedy", "Say yes.", {"temperature": 0.0})
PATHS = {True: "/v1/chat/completions", False: "/v1/completions"}
LOGPROBS: dict[bool, dict[str, Any]] = {True: {"logprobs": True, "top_logprobs": TOP}, False: {"logprobs": TOP}}
IDS = {"return_token_ids": True}
NEUTRAL = {"repetition_penalty": 1.0}  # some engines take another one from the model's files
USAGE = {"stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True)
class Offers:
    """What a server takes beside a prompt. `refused`: what it doesn't, with its words."""

    is_chat: bool
    extra: Mapping[str, Any] = field(default_factory=dict)
    streamed: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


class AnyServer:
    def __init__(self, http: RouterHttp, model: str, max_tokens: int) -> None:
        self._http, self._model, self._max_tokens = http, model, max_tokens
        self._lock = threading.Lock()
        self._num_lost = 0
        self.offers = Offers(True)

    def find_offers(self) -> None:
        """Try what OpenAI's API has, one field at a time. Raise ConfigError if neither endpoint answers."""
        chat = self._probe(Offers(True))
        if chat.error:
            plain = self._probe(Offers(False))
            if plain.error:
                raise ConfigError(f"{self._http.url}: {PATHS[True]}: {chat.error}; {PATHS[False]}: {plain.error}")
        is_chat = not chat.error
        extra, streamed, refused = dict[str, Any](), dict[str, Any](), dict[str, str]()
        if chat.error:
            refused["chat"] = chat.error
        for name, fields, is_shown in (
            ("logprobs", LOGPROBS[is_chat], lambda answer: bool(answer.scores)),
            ("token ids", IDS, lambda answer: bool(answer.ids)),
        ):
            why = self._why_not(Offers(is_chat, extra | fields), is_shown)
            extra |= {} if why else fields
            refused |= {name: why} if why else {}
        extra |= {} if self._probe(Offers(is_chat, extra | NEUTRAL)).error else NEUTRAL
        why = self._why_not(Offers(is_chat, extra, USAGE), lambda answer: answer.usage is not None, streams=True)
        streamed |= {} if why else USAGE
        refused |= {"usage in streams": why} if why else {}
        self.offers = Offers(is_chat, extra, streamed, refused)

    def _why_not(self, offers: Offers, is_shown: Callable[[RecordedAnswer], bool], *, streams: bool = False) -> str:
        answer = self._probe(offers, streams=streams)
        return answer.error or ("" if is_shown(answer) else "taken, but the answer does not have it")

    def _probe(self, offers: Offers, *, streams: bool = False) -> RecordedAnswer:
        return self._send(PROBE, offers, PROBE_TOKENS, streams=streams)

    def perform(self, asks: Sequence[Ask], way: Way, told: Callable[[], None]) -> list[RecordedAnswer]:
        """Return the answers in the order of `asks`. Call `told` after each."""

        def one(ask: Ask, after: float = 0.0) -> RecordedAnswer:
            time.sleep(after)
            if self._num_lost >= MOST_LOST:
                return replace(LOST, error=f"not sent: {MOST_LOST} requests had no answer within {TIMEOUT_S:g} s")
            answer = self._send(ask, self.offers, limit_of(ask, self._max_tokens), streams=way.streamed)
            told()
            return answer

        if way.offsets is None:
            return [one(ask) for ask in asks]
        answers = [LOST] * len(asks)

        def keep(place: int, ask: Ask, after: float) -> None:
            answers[place] = one(ask, after)

        # daemons, which Ctrl-C does not wait for
        threads = [
            threading.Thread(target=keep, args=(place, *each), daemon=True)
            for place, each in enumerate(zip(asks, way.offsets, strict=True))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    def _send(self, ask: Ask, offers: Offers, limit: int, *, streams: bool) -> RecordedAnswer:
        prompt = {"messages": [{"role": "user", "content": ask.prompt}]} if offers.is_chat else {"prompt": ask.prompt}
        body: dict[str, Any] = {"model": self._model, **prompt, "max_tokens": limit, **ask.fields, **offers.extra}
        body |= {"stream": True, **offers.streamed} if streams else {}
        answer = self._post_body(PATHS[offers.is_chat], body, streams=streams)
        return replace(answer, error=printable(answer.error))

    def _post_body(self, path: str, body: dict[str, Any], *, streams: bool) -> RecordedAnswer:
        try:
            with self._http.opened("POST", path, body, TIMEOUT_S) as reply:
                if reply.status != 200:
                    refusal = b"".join(pieces(reply))
                    said = " ".join((error_message(refusal) or refusal.decode("utf-8", "replace")).split())
                    return RecordedAnswer(error=f"{reply.status} {said[:MAX_SHOWN]}", status=reply.status)
                return read_answer(chunks(reply) if streams else [json.loads(b"".join(pieces(reply)))])
        except UNREACHABLE as error:
            with self._lock:
                self._num_lost += isinstance(error, TimeoutError)
            return replace(LOST, error=f"no answer: {error}")
        except (ValueError, RecursionError) as error:
            return RecordedAnswer(error=f"not JSON: {error}", status=500)


def chunks(reply: HTTPResponse) -> Iterator[dict[str, Any]]:
    splitter = Splitter()
    for data in pieces(reply):
        for event in splitter.feed_bytes(data):
            if event != DONE:
                yield json.loads(event)


def pieces(reply: HTTPResponse) -> Iterator[bytes]:
    """Raise TimeoutError for an answer that takes too long, and ValueError for one that is too large."""
    begun, size = time.monotonic(), 0
    while data := reply.read1(READ_BYTES):
        size += len(data)
        if size > MAX_BYTES:
            raise ValueError(f"the answer is larger than {MAX_BYTES} bytes")
        if time.monotonic() - begun > TIMEOUT_S:
            raise TimeoutError(f"it had no end after {TIMEOUT_S:g} s")
        yield data
