"""The real router and clients that use HTTP in their own way: Java's, curl's, urllib's, and raw sockets."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.http.codings import zstd
from tests.support.clusters.router_fake_node import FakeNode
from tests.support.clusters.router_process import RouterProcess, eventually
from tests.support.machine.patience import HANG_GUARD_S

MODEL = "hashlm"
ASK: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 4}
CLIENTS = Path(__file__).resolve().parents[2] / "clients"
MOST = 1 << 20
KEPT_S = 100


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    process = RouterProcess("--max-body-bytes", str(MOST), "--keep-alive-s", str(KEPT_S))
    node = FakeNode("decode", process.nodes, "d0").start()
    eventually(lambda: httpx.get(process.url + "/ready", timeout=HANG_GUARD_S).status_code == 200)
    yield process
    node.stop()
    assert process.stop() == 0
    assert not [line for line in process.lines if " ERROR " in line or "upgrade" in line.lower()]


@pytest.fixture
def http(router: RouterProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=router.url, timeout=HANG_GUARD_S) as client:
        yield client


@pytest.mark.skipif(shutil.which("javac") is None, reason="needs a JDK")
def test_java_s_client_works_as_it_comes(router: RouterProcess) -> None:
    command = ["java", "-Xmx128m", str(CLIENTS / "JavaClient.java"), router.url, MODEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_GUARD_S * 4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": 200 HTTP_1_1") == 26


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("more", [[], ["-H", "Transfer-Encoding: chunked"]], ids=["length", "chunked"])
@pytest.mark.parametrize("size", [1, 200_000])
def test_curl_with_http2_works(router: RouterProcess, more: list[str], size: int) -> None:
    body = json.dumps(ASK | {"user": "x" * size})
    command = ["curl", "-sS", "--http2", *more, "-d", "@-", "-w", " %{http_code}", router.url + "/v1/completions"]
    done = subprocess.run(command, input=body, capture_output=True, text=True, timeout=HANG_GUARD_S)
    assert done.stdout.endswith(" 200"), done.stdout + done.stderr


@pytest.mark.parametrize(("coding", "encode"), [("gzip", gzip.compress), ("zstd", zstd.compress)])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/messages", "/v1/responses", "/v1/chat/completions", "/tokenize"]
)
def test_a_compressed_body_is_read(
    http: httpx.Client, path: str, coding: str, encode: Callable[[bytes], bytes]
) -> None:
    ask = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}
    asks = {
        "/v1/completions": ASK,
        "/v1/responses": {"model": MODEL, "input": "a", "max_output_tokens": 4},
        "/tokenize": {"prompt": "a"},
    }
    body = json.dumps(asks.get(path, ask) | {"padding": "x" * 300_000}).encode()
    answer = http.post(path, content=encode(body), headers={"content-encoding": coding})
    assert answer.status_code == 200, answer.text


def test_bodies_that_can_t_be_decoded_are_refused(http: httpx.Client) -> None:
    br = http.post("/v1/messages", content=b"x", headers={"content-encoding": "br"})
    assert br.status_code == 415 and br.headers["accept-encoding"] == "gzip, deflate, zstd"
    assert br.json()["error"]["type"] == "invalid_request_error"
    bad = http.post("/v1/completions", content=b"{}", headers={"content-encoding": "gzip"})
    assert bad.status_code == 400 and "gzip" in bad.json()["error"]["message"]
    bomb = http.post("/v1/completions", content=gzip.compress(bytes(100 * MOST)), headers={"content-encoding": "gzip"})
    assert bomb.status_code == 413


def test_a_body_may_begin_with_a_byte_order_mark(http: httpx.Client) -> None:
    assert http.post("/v1/completions", content=b"\xef\xbb\xbf" + json.dumps(ASK).encode()).status_code == 200


def test_urllib_reads_that_its_body_is_too_large(router: RouterProcess) -> None:
    """It sends all before it reads, and asks for the connection's end."""
    for _ in range(5):
        request = urllib.request.Request(router.url + "/v1/completions", os.urandom(5 * MOST))
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request, timeout=HANG_GUARD_S)
        with error.value as answer:
            assert answer.code == 413 and "above the limit" in json.load(answer)["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/nowhere", "/health", "/metrics"])
@pytest.mark.parametrize("framing", [b"Content-Length: 2000000\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_every_early_answer_is_read(router: RouterProcess, path: str, framing: bytes) -> None:
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n%s\r\n" % (path.encode(), framing)
    body = bytes(2_000_000) if b"Length" in framing else (b"10000\r\n" + bytes(65536) + b"\r\n") * 30 + b"0\r\n\r\n"
    assert raw(router, head + body).startswith(b"HTTP/1.1 4")


def test_an_old_client_reads_a_stream_without_chunks(router: RouterProcess) -> None:
    body = json.dumps(ASK | {"stream": True}).encode()
    got = raw(router, b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    head, _, events = got.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    assert all(line.startswith(b"data: ") for line in events.split(b"\n") if line) and b"[DONE]" in events


def test_a_kept_connection_is_announced(http: httpx.Client) -> None:
    answer = http.get("/health")
    assert answer.headers["keep-alive"] == f"timeout={KEPT_S}" and answer.headers["connection"] == "keep-alive"


def raw(router: RouterProcess, data: bytes) -> bytes:
    """All that comes back; everything is sent first."""
    host, _, port = router.url.removeprefix("http://").partition(":")
    with contextlib.closing(socket.create_connection((host, int(port)), HANG_GUARD_S)) as client:
        client.sendall(data)
        got = b""
        while part := client.recv(1 << 16):
            got += part
        return got
