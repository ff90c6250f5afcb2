"""The example that resumes: how long it waits, and whom it asks next."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.chaos.test_lost_streams import load_example

EVENT = 'id: token/1.0.1-0123456789abcdef\ndata: {"choices": []}\n\n'
END = "data: [DONE]\n\n"


class Servers:
    """Answers in turn, each (status, headers, text), or None: nobody is there."""

    def __init__(self, *answers: tuple[int, dict[str, str], str] | None) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, str]] = []
        self.TransportError = httpx.TransportError

    @contextlib.contextmanager
    def stream(self, method: str, url: str, *, headers: dict[str, str], **more: Any) -> Iterator[httpx.Response]:
        self.asked.append((url, headers.get("Last-Event-ID", "")))
        answer = self._answers.pop(0)
        if answer is None:
            raise httpx.ConnectError("refused")
        status, said, text = answer
        yield httpx.Response(status, headers=said, text=text, request=httpx.Request(method, url))


def play(monkeypatch: pytest.MonkeyPatch, servers: Servers, urls: Any = "a", **more: Any) -> tuple[int, list[float]]:
    """Return the number of chunks, and how long it slept each time."""
    example, slept = load_example(), list[float]()
    monkeypatch.setattr(example, "httpx", servers)
    monkeypatch.setattr(example.time, "sleep", slept.append)
    return len(list(example.stream(urls, {}, {}, **more))), slept


def test_it_waits_as_long_as_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came back after half a second, whatever the router said."""
    servers = Servers((503, {"Retry-After": "7"}, ""), (429, {"Retry-After": "3"}, ""), (200, {}, EVENT + END))
    num_chunks, slept = play(monkeypatch, servers)
    assert num_chunks == 1 and 7.0 < slept[0] < 7.2 and 3.0 < slept[1] < 3.4


def test_each_failure_makes_it_wait_longer_and_progress_less(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers(*[None] * 9, (200, {}, EVENT), None, (200, {}, EVENT + END))
    _, slept = play(monkeypatch, servers)
    assert all(0.05 * 2**n <= slept[n] <= min(5.0, 0.1 * 2**n) for n in range(6))
    assert all(2.5 <= pause <= 5.0 for pause in slept[6:9]) and slept[9] <= 0.1 and slept[10] <= 0.2


def test_the_next_router_is_asked_from_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers((200, {}, EVENT), None, (200, {}, EVENT + END))
    num_chunks, _ = play(monkeypatch, servers, ["a", "b", "c"])
    place = "token/1.0.1-0123456789abcdef"
    assert num_chunks == 2 and servers.asked == [("a", ""), ("b", place), ("c", place)]


def test_only_a_line_feed_ends_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router writes other ends of lines as they are, within an event's JSON."""
    text = "one\u2028two\u2029three\x85four"
    event = EVENT.replace("[]", f'[{{"text": "{text}"}}]')
    assert chunks_of(monkeypatch, event + event + END) == [{"choices": [{"text": text}]}] * 2


def chunks_of(monkeypatch: pytest.MonkeyPatch, content: Any) -> list[dict[str, Any]]:
    example = load_example()
    response = httpx.Response(200, content=content, request=httpx.Request("POST", "a"))
    monkeypatch.setattr(example.httpx, "stream", lambda *args, **more: contextlib.nullcontext(response))
    return list(example.stream("a", {}, {}))
