"""The real router behind nginx, HAProxy and Caddy, with the settings that docs/operations.md asks for."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.clusters.router_fake_node import FakeNode
from tests.support.clusters.router_process import RouterProcess, eventually
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.web.reverse_proxies import each_proxy, reverse_proxy
from tests.support.wire.tcp_relay import tcp_relay

PATH = "/v1/completions"
KEPT_S = 2
# The proxy's own limit is half of the router's. HAProxy needs several rounds for all of its connections.
IDLE_MS = {"nginx": 1000, "haproxy": 100, "caddy": 1000}
WAY_S = 0.03  # so long does a proxy not know that the router has closed a connection
NUM_CLIENTS = 50
PAUSES_S = (0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0)  # before each request: at both limits too
SPREAD_S = 0.001  # from one client's pause to the next one's

behind_each = pytest.mark.parametrize("proxy", each_proxy())


@contextlib.contextmanager
def served(*flags: str) -> Iterator[tuple[RouterProcess, FakeNode]]:
    router = RouterProcess(*flags)
    node = FakeNode("decode", router.nodes, "d0").start()
    eventually(lambda: httpx.get(router.url + "/ready", timeout=HANG_GUARD_S).status_code == 200)
    yield router, node
    node.stop()
    assert router.stop() == 0
    assert not [line for line in router.lines if " ERROR " in line]


def ask(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": "hashlm", "prompt": prompt, "max_tokens": 4, **more}


def keep_asking(url: str, pauses_s: list[float], statuses: Counter[object]) -> None:
    """All on one connection, if the server leaves it open."""
    client = http.client.HTTPConnection(urlsplit(url).netloc, timeout=HANG_GUARD_S)
    with contextlib.closing(client):
        for pause_s in pauses_s:
            time.sleep(pause_s)
            try:
                client.request("POST", PATH, json.dumps(ask("say:ok")), {"content-type": "application/json"})
                answer = client.getresponse()
                answer.read()
                statuses[answer.status] += 1
            except (OSError, http.client.HTTPException) as error:
                statuses[repr(error)] += 1
                client.close()


@pytest.mark.parametrize("proxy", each_proxy("plain nginx"))  # that one keeps no connections
def test_a_thousand_requests_get_no_502(proxy: str, tmp_path: Path) -> None:
    """POST is never sent twice, so a request that meets a closed connection is lost."""
    statuses: Counter[object] = Counter()
    with served("--keep-alive-s", str(KEPT_S)) as (router, _), contextlib.ExitStack() as open_ones:
        far = open_ones.enter_context(tcp_relay([("127.0.0.1", urlsplit(router.url).port or 0)], way_s=WAY_S))
        front = reverse_proxy(proxy, f"http://127.0.0.1:{far}", tmp_path, idle_ms=IDLE_MS[proxy])
        url = open_ones.enter_context(front)
        pauses_s = [[p and p + i * SPREAD_S for p in PAUSES_S] for i in range(-NUM_CLIENTS // 2, NUM_CLIENTS // 2)]
        threads = [threading.Thread(target=keep_asking, args=(url, mine, statuses)) for mine in pauses_s]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert statuses == {200: NUM_CLIENTS * len(PAUSES_S)}


def events(response: httpx.Response) -> Iterator[str]:
    return (line[6:] for line in response.iter_lines() if line.startswith("data: "))


@behind_each
def test_each_token_is_passed_on_before_the_next_is_there(proxy: str, tmp_path: Path) -> None:
    with served() as (router, node), reverse_proxy(proxy, router.url, tmp_path) as url:
        node.paused.set()
        opened = threading.Thread(target=lambda: (eventually(lambda: node.num_running), node.say_one()))
        opened.start()
        body = ask("a", stream=True)
        with httpx.stream("POST", url + PATH, json=body, timeout=HANG_GUARD_S) as response:
            texts = ""
            for event in events(response):
                if event != "[DONE]":
                    texts += json.loads(event)["choices"][0]["text"]
                    node.say_one()
        opened.join()
        assert (texts, event) == ("abcd", "[DONE]")
        # for how long the router keeps its connections tells nothing about the proxy's
        assert response.status_code == 200 and "keep-alive" not in response.headers


@pytest.mark.parametrize("path", [PATH, "/api/generate"])
def test_streams_ask_proxies_not_to_hold_them_back(path: str) -> None:
    """Without this header, nginx as it comes sends a stream in blocks of 4 KiB."""
    with served() as (router, _):
        response = httpx.post(
            router.url + path, json=ask("a", stream=True, options={"num_predict": 4}), timeout=HANG_GUARD_S
        )
    assert (response.status_code, response.headers.get("x-accel-buffering")) == (200, "no")


def send(url: str, body: dict[str, Any]) -> socket.socket:
    parts, data = urlsplit(url), json.dumps(body).encode()
    client = socket.create_connection((parts.hostname or "", parts.port or 0), HANG_GUARD_S)
    head = f"POST {PATH} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    client.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    return client


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@behind_each
def test_a_request_ends_when_its_client_goes(proxy: str, tmp_path: Path) -> None:
    """In a stream of tokens, and while there is nothing to send: then nobody finds out by writing."""
    ways: tuple[Callable[[socket.socket], None], ...] = (reset, socket.socket.close)
    with served() as (router, node), reverse_proxy(proxy, router.url, tmp_path) as url:
        node.period_s = 0.01
        for count, (leave, prompt, stream) in enumerate(
            (leave, prompt, stream) for leave in ways for prompt in ("a", "hold:") for stream in (True, False)
        ):
            client = send(url, ask(prompt, stream=stream, max_tokens=4000))
            eventually(lambda: len(node.generates) == count + 1)  # noqa: B023
            if stream and prompt == "a":  # the other one's head comes with the first `: waiting`
                assert client.recv(5) == b"HTTP/"
            leave(client)
            eventually(lambda: len(node.aborts) == count + 1)  # noqa: B023
        assert node.num_running == 0


@behind_each
def test_streams_of_a_router_that_stops_end_with_its_error(proxy: str, tmp_path: Path) -> None:
    with served("--shutdown-s", "1") as (router, node), reverse_proxy(proxy, router.url, tmp_path) as url:
        node.period_s = 0.01
        with httpx.Client(base_url=url, timeout=HANG_GUARD_S) as client:
            with client.stream("POST", PATH, json=ask("a", stream=True, max_tokens=4000)) as response:
                found = events(response)
                assert json.loads(next(found))["choices"][0]["text"] == "a"
                router.process.send_signal(signal.SIGTERM)
                *_, last = found
            assert json.loads(last)["error"]["message"] == "this server is shutting down"
            assert client.post(PATH, json=ask("a")).status_code in (502, 503)  # nobody is there any more
