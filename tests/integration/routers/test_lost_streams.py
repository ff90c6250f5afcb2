"""Two real routers share a key file and nothing else: what one began, the other one goes on with. And whole answers
that were asked for twice."""

from __future__ import annotations

import concurrent.futures
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from router.api.answer.marks import read_id
from stream_conformance.apis import APIS
from stream_conformance.client import Asker
from stream_conformance.rules import judge
from stream_conformance.run import Options, Run
from tests.support.clusters.router_fake_node import FakeNode
from tests.support.clusters.router_process import RouterProcess, eventually
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.worlds.lost_streams import Event, last_id

HEADERS = {"Authorization": "Bearer sesame", "X-Stream-Ids": "1"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "say:hello there", "seed": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "say:hello there"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "say:hello there"}], "max_tokens": 30},
    "/v1/responses": {"input": "say:hello there"},
}


@pytest.fixture(scope="module")
def routers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RouterProcess]]:
    key = tmp_path_factory.mktemp("keys") / "api.key"
    key.write_text("sesame\n")
    key.chmod(0o600)
    routers = [
        RouterProcess("--api-key-file", str(key), "--max-open-requests", "4", "--max-queued-requests", "0")
        for _ in range(2)
    ]
    for router in routers:
        router.key = "sesame"
    nodes = [FakeNode("decode", router.nodes, f"d{i}").start() for i, router in enumerate(routers)]
    yield routers
    for node in nodes:
        node.stop()
    for router in routers:
        assert router.stop() == 0


def stream(router: RouterProcess, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(router.url + path, json={"stream": True, **body}, headers=HEADERS | headers, timeout=HANG_GUARD_S)


def events_of(response: httpx.Response) -> list[Event]:
    assert response.status_code == 200, response.text
    return [Event(text) for text in response.text.split("\n\n")[:-1]]


@pytest.mark.parametrize("path", BODIES)
def test_another_router_goes_on_behind_any_event(routers: list[RouterProcess], path: str) -> None:
    whole = events_of(stream(routers[0], path, BODIES[path]))
    for place in range(1, len(whole), 3):
        header = {"Last-Event-ID": last_id(whole[:place])}
        rest = events_of(stream(routers[1], path, BODIES[path], **header))
        assert text_of([*whole[:place], *rest]) == text_of(whole) == "hello there"
        numbers = [event.id.rpartition("/")[2].partition(".")[0] for event in [*whole[:place], *rest]]
        assert numbers == [str(number) for number in range(1, len(numbers) + 1)]


def text_of(events: list[Event]) -> str:
    found = ""
    for event in events:
        data = {} if event.raw == "[DONE]" else event.data
        for choice in data.get("choices", ()):
            found += choice.get("delta", choice).get("content", choice.get("text")) or ""
        if event.name == "content_block_delta":
            found += data["delta"]["text"]
        elif event.name == "response.output_text.delta":
            found += data["delta"]
    return found


def test_an_unresumable_stream_shows_in_status_metric_and_log(routers: list[RouterProcess]) -> None:
    path, body = "/v1/completions", BODIES["/v1/completions"]
    header = {"Last-Event-ID": last_id(events_of(stream(routers[0], path, body))[:3])}
    answer = stream(routers[1], path, body | {"prompt": "say:hallo there"}, **header)
    assert answer.status_code == 422 and answer.json()["error"]["code"] == "resume_mismatch"
    assert routers[1].metric('baton_requests_total{outcome="resume_mismatch"}') == 1
    eventually(lambda: any("code=resume_mismatch" in line for line in routers[1].lines))
    unknown = stream(routers[1], path, body, **{"Last-Event-ID": "x/1.0.0-0123456789abcdef"})
    assert unknown.status_code == 400 and unknown.json()["error"]["code"] == "unknown_stream"


def test_the_same_body_in_other_bytes_is_the_same(routers: list[RouterProcess]) -> None:
    header = {
        "Last-Event-ID": last_id(events_of(stream(routers[0], "/v1/completions", {"prompt": "say:a", "seed": 1})))
    }
    answer = httpx.post(
        routers[1].url + "/v1/completions",
        content=b'{ "seed": 1,\n"prompt":"say:\\u0061", "stream": true, "user": "of no effect"}',
        headers=HEADERS | header,
        timeout=HANG_GUARD_S,
    )
    assert answer.status_code == 200 and answer.text == ""


def test_streams_that_go_on_count_against_the_limits(routers: list[RouterProcess]) -> None:
    path, body = "/v1/completions", BODIES["/v1/completions"]
    seen = events_of(stream(routers[0], path, body))[:3]
    header = {"Last-Event-ID": last_id(seen)}
    before = routers[1].metric("baton_recomputed_tokens_total")
    held = [open_for_ever(routers[1]) for _ in range(4)]
    try:
        eventually(lambda: routers[1].metric("baton_open_requests") == 4)
        refused = stream(routers[1], path, body, **header)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "queue_full"
        held.pop().close()
        eventually(lambda: routers[1].metric("baton_open_requests") == 3)
        assert events_of(stream(routers[1], path, body, **header))
    finally:
        for one in held:
            one.close()
    num_seen = read_id(last_id(seen))[1].choices[0].num_tokens
    assert routers[1].metric("baton_recomputed_tokens_total") == before + num_seen > before


def open_for_ever(router: RouterProcess) -> socket.socket:
    """A request that no node answers, until the socket is closed."""
    url = urlsplit(router.url)
    body = b'{"prompt": "hold:", "max_tokens": 5}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: {HEADERS['Authorization']}\r\n"
    one = socket.create_connection((url.hostname, url.port))
    one.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return one


def test_events_have_ids_for_who_asks_for_them(routers: list[RouterProcess]) -> None:
    """Many clients take an event for one line of data."""
    path, plain = "/v1/completions", {"Authorization": HEADERS["Authorization"]}
    body = {"stream": True, **BODIES[path]}
    answer = httpx.post(routers[0].url + path, json=body, headers=plain, timeout=HANG_GUARD_S)
    assert not any(event.id for event in events_of(answer))
    assert all(event.id for event in events_of(stream(routers[0], path, BODIES[path])))


@pytest.mark.parametrize("api", APIS)
def test_baton_keeps_the_contract_for_streams(routers: list[RouterProcess], api: str) -> None:
    """docs/spec/exactly-once-streaming.md. Faults are a long test's: the nodes here are no processes."""
    asker = Asker([router.url for router in routers], APIS[api].path, "sesame", HANG_GUARD_S)
    verdicts = list(judge(Run(asker, APIS[api], Options("hashlm", has_key=True))))
    assert [verdict for verdict in verdicts if verdict.result != "pass" and verdict.rule != "faults lose nothing"] == []


# ---- whole answers


def ask(router: RouterProcess, key: str, body: dict[str, Any]) -> httpx.Response:
    headers = HEADERS | {"Idempotency-Key": key}
    return httpx.post(router.url + "/v1/completions", json=body, headers=headers, timeout=HANG_GUARD_S)


def test_an_answer_that_is_asked_for_twice_is_computed_once(routers: list[RouterProcess]) -> None:
    body = {"prompt": "abc", "max_tokens": 200}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: ask(routers[0], "k1", body), range(2))
    third = ask(routers[0], "k1", body)
    assert first.status_code == 200 and first.content == second.content == third.content  # its id is one
    assert third.headers["idempotent-replayed"] == "true"
    assert {"idempotent-replayed" in first.headers, "idempotent-replayed" in second.headers} == {True, False}
    assert ask(routers[0], "k2", body).json()["id"] != first.json()["id"]
    other = ask(routers[0], "k1", body | {"max_tokens": 201})
    assert other.status_code == 422 and other.json()["error"]["code"] == "idempotency_key_reused"


def test_a_client_that_hung_up_comes_back_for_its_answer(routers: list[RouterProcess]) -> None:
    body = {"prompt": "xyz", "max_tokens": 400}
    before = routers[0].metric('baton_requests_total{outcome="length"}')
    with pytest.raises(httpx.ReadTimeout):
        headers = HEADERS | {"Idempotency-Key": "k3"}
        httpx.post(routers[0].url + "/v1/completions", json=body, headers=headers, timeout=0.1)
    answer = ask(routers[0], "k3", body)
    assert answer.json()["usage"]["completion_tokens"] == 400 and "idempotent-replayed" in answer.headers
    assert routers[0].metric('baton_requests_total{outcome="length"}') == before + 1
