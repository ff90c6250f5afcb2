"""The real router against clients who mean it no good, and what it shows to whom: keys, names, pages, bodies in sum."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deploy.cluster.ready import count_ready, is_ready
from deploy.router_http import RouterHttp
from deploy.router_url import parse_url
from deploy.tools.doctor.look_router import NoRouterError, look_at_router
from deploy.tools.plan.running import look_at_cluster
from deploy.tools.traffic.drills import ready_nodes
from deploy.tools.traffic.target import Server
from shared.core.errors import ConfigError
from tests.support.clusters.cluster import baton_up
from tests.support.clusters.key_folders import write_key
from tests.support.clusters.router_fake_node import FakeNode
from tests.support.clusters.router_process import RouterProcess, eventually
from tests.support.machine.patience import HANG_GUARD_S

MOST = 64 << 10
CLIENT, OPERATOR = {"authorization": "Bearer s3cret"}, {"x-api-key": "0perator"}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    folder = tmp_path_factory.mktemp("keys")
    write_key(folder / "api.key", "s3cret\n")
    write_key(folder / "admin.key", "0perator\n")
    flags = ("--api-key-file", str(folder / "api.key"), "--admin-key-file", str(folder / "admin.key"))
    process = RouterProcess(*flags, "--max-bodies-bytes", str(MOST), "--cors-origins", "http://good.example")
    node = FakeNode("decode", process.nodes, "d0").start()
    eventually(lambda: httpx.get(process.url + "/ready", timeout=HANG_GUARD_S).status_code == 200)
    yield process
    node.stop()
    assert process.stop() == 0
    assert not [line for line in process.lines if " ERROR " in line]


@pytest.fixture
def http(router: RouterProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=router.url, timeout=HANG_GUARD_S) as client:
        yield client


def test_what_is_shown_without_a_key_and_with_either(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    assert http.get("/ready").json() == {"ready": True, "pair": False}
    assert http.get("/ready", headers={"x-api-key": "wrong"}).json() == {"ready": True, "pair": False}
    assert http.get("/metrics").status_code == 401
    assert http.get("/metrics", headers={"x-api-key": "wrong"}).status_code == 401
    for headers in (CLIENT, OPERATOR):
        assert http.get("/ready", headers=headers).json()["nodes"][0]["node"] == "d0"
        assert "baton_open_requests" in http.get("/metrics", headers=headers).text
    assert http.get("/v1/models", headers=OPERATOR).status_code == 401  # that one is for /admin


def test_our_commands_pass_the_key(router: RouterProcess) -> None:
    url, port = parse_url(router.url), int(router.url.rpartition(":")[2])
    assert look_at_router(RouterHttp(url, "", other_key="s3cret"), "r", 0.0, lambda _: None).ready.num_nodes == 1
    assert look_at_router(RouterHttp(url, "0perator"), "r", 0.0, lambda _: None).status is not None
    with pytest.raises(NoRouterError, match="--api-key-file"):
        look_at_router(RouterHttp(url, ""), "r", 0.0, lambda _: None)
    assert look_at_cluster(url, "s3cret").decode == ("d0",)
    with pytest.raises(ConfigError, match="--api-key-file"):
        look_at_cluster(url, "")
    assert ready_nodes(Server(url, "s3cret")) == {"d0"}
    assert is_ready("127.0.0.1", port, 1, "s3cret") and not is_ready("127.0.0.1", port, 1)


def test_ray_s_actors_read_the_key_where_their_router_does(router: RouterProcess, tmp_path: Path) -> None:
    actors = pytest.importorskip("deploy.ray.actors", reason="Ray is not installed")
    write_key(tmp_path / "key", "s3cret\n")
    port = int(router.url.rpartition(":")[2])
    assert "baton_open_requests" in actors.get("127.0.0.1", port, "/metrics", (str(tmp_path / "key"), ""))
    assert count_ready(actors.get("127.0.0.1", port, "/ready", (str(tmp_path / "key"), "")).encode()) == 1
    assert actors.get("127.0.0.1", port, "/metrics", (str(tmp_path / "none"), "")) == ""


def test_a_cluster_with_a_key_says_when_it_is_ready(tmp_path: Path) -> None:
    write_key(tmp_path / "key", "s3cret\n")
    flags = ("--model", "hashlm", "--prefill", "0", "--api-key-file", str(tmp_path / "key"))
    with baton_up(tmp_path / "up.log", *flags) as cluster:
        assert httpx.get(cluster.url + "/ready", timeout=HANG_GUARD_S).json() == {"ready": True, "pair": False}


def test_other_names_and_foreign_forms_are_refused(http: httpx.Client) -> None:
    refused = http.get("/health", headers={"host": "evil.example"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (421, "host_not_allowed")
    form = CLIENT | {"content-type": "application/x-www-form-urlencoded"}
    body = b'{"prompt": "a"}'
    assert http.post("/tokenize", headers=form, content=body).status_code == 200  # curl -d
    foreign = http.post("/tokenize", headers=form | {"origin": "http://evil.example"}, content=body)
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (415, "unsupported_media_type")
    text = http.get("/metrics", headers=CLIENT).text
    assert 'baton_requests_total{outcome="host_not_allowed"} ' in text
    assert 'baton_requests_total{outcome="unsupported_media_type"} ' in text


def test_a_page_that_may_use_the_api_asks_and_reads(http: httpx.Client) -> None:
    page = {"origin": "http://good.example"}
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    answer = http.options("/v1/chat/completions", headers=page | asks)
    assert answer.status_code == 200 and answer.headers["access-control-allow-headers"] == "authorization"
    models = http.get("/v1/models", headers=page | CLIENT)
    assert models.status_code == 200 and models.headers["access-control-allow-origin"] == "http://good.example"
    other = {"origin": "http://evil.example"}
    assert "access-control-allow-origin" not in http.get("/v1/models", headers=other | CLIENT).headers
    assert http.options("/v1/chat/completions", headers=other | asks).status_code == 405


def test_deep_json_is_refused(http: httpx.Client) -> None:
    deep = http.post("/tokenize", headers=CLIENT, content=b'{"prompt": "a", "x": ' + b"[" * 128 + b"]" * 128 + b"}")
    assert deep.status_code == 400 and "nested too deeply" in deep.json()["error"]["message"]
    whole = http.post("/tokenize", headers=CLIENT, content=b'{"prompt": "a", "x": ' + b"[" * 127 + b"]" * 127 + b"}")
    assert whole.status_code == 200


def test_bodies_of_all_connections_have_a_sum(router: RouterProcess, http: httpx.Client) -> None:
    body = b'{"prompt": "%s"}' % (b"a" * (MOST // 2))
    assert http.post("/tokenize", headers=CLIENT, content=body).status_code == 200
    head = (
        f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer s3cret\r\nContent-Length: {MOST}\r\n\r\n"
    )
    host, _, port = router.url.removeprefix("http://").partition(":")

    def is_full() -> bool:
        """A body that has not all come yet takes its share; it may not have been read before ours is sent."""
        with contextlib.closing(socket.create_connection((host, int(port)))) as slow:
            slow.sendall(head.encode() + b" " * (MOST * 3 // 4))
            refused = http.post("/tokenize", headers=CLIENT, content=body)
            assert http.get("/v1/models", headers=CLIENT).status_code == 200
            return refused.status_code == 503 and refused.json()["error"]["code"] == "bodies_full"

    eventually(is_full)
    eventually(lambda: http.post("/tokenize", headers=CLIENT, content=body).status_code == 200)


def test_a_head_without_an_end_is_answered_and_hung_up(router: RouterProcess) -> None:
    host, _, port = router.url.removeprefix("http://").partition(":")
    with contextlib.closing(socket.create_connection((host, int(port)), HANG_GUARD_S)) as client:
        client.sendall((b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (32 << 10))[: 32 << 10])
        answer = b""
        while part := client.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 431") and b'"code":"headers_too_large"' in answer
