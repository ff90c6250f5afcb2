"""The real router process while clients hang up and nodes die, freeze, fail, restart and talk nonsense."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import openai
import pytest
import zmq

from shared.core import launcher
from shared.core.stop_signals import stop_signals
from shared.wire.codec import encode
from shared.wire.messages import Goodbye, Hello, TokenRun, Tokens
from tests.support.clusters.router_fake_node import FINGERPRINT, FakeNode, prompt_text
from tests.support.clusters.router_process import ROOT, RouterProcess, eventually
from tests.support.machine.patience import HANG_GUARD_S, SILENCE_S

MODEL = "hashlm"
FLAGS = (
    "--node-silence-s",
    str(SILENCE_S),
    "--local-prefill-tokens",
    "0",
    "--max-open-requests",
    "4",
    "--max-queued-requests",
    "0",
)
FLAGS += ("--max-attempts", "1")  # what a fault means for the request it hits; test_resume.py has the rest


@pytest.fixture
def router(request: pytest.FixtureRequest) -> Iterator[RouterProcess]:
    process = RouterProcess(*FLAGS, "--shutdown-s", getattr(request, "param", "1"))
    yield process
    assert process.stop() == 0
    assert not [line for line in process.lines if " ERROR " in line]


class Pair:
    """A prefill and a decode node that a test may replace."""

    def __init__(self, router: RouterProcess) -> None:
        self.router = router
        self.decode = FakeNode("decode", router.nodes, "d0", period_s=0.005).start()
        self.prefill = FakeNode("prefill", router.nodes, "p0", peer=self.decode).start()

    @property
    def all(self) -> tuple[FakeNode, FakeNode]:
        return self.prefill, self.decode


@pytest.fixture
def pair(router: RouterProcess) -> Iterator[Pair]:
    pair = Pair(router)
    yield pair
    for node in pair.all:
        node.stop()


def post(router: RouterProcess, prompt: Any, **body: Any) -> httpx.Response:
    return httpx.post(
        router.url + "/v1/completions",
        json={"model": MODEL, "prompt": prompt, "max_tokens": 2000, **body},
        timeout=HANG_GUARD_S,
    )


def error_code(response: httpx.Response) -> str:
    return str(response.json()["error"]["code"])


def stream_events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def hang_up_after(router: RouterProcess, sent: dict[str, Any], until: Callable[[], object]) -> None:
    """A client that goes away without a word once `until` holds."""
    host, port = router.url.removeprefix("http://").split(":")
    body = json.dumps({"model": MODEL, "max_tokens": 4000, **sent}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head + body)
        eventually(until)


def num_nodes(router: RouterProcess) -> int:
    return len(httpx.get(router.url + "/ready", timeout=HANG_GUARD_S).json()["nodes"])


def test_no_node_at_all(router: RouterProcess) -> None:
    response = post(router, "x")
    assert response.status_code == 503 and error_code(response) == "no_nodes"
    assert int(response.headers["retry-after"]) >= 1
    ready = httpx.get(router.url + "/ready", timeout=HANG_GUARD_S)
    assert ready.status_code == 503 and ready.json()["ready"] is False
    assert httpx.get(router.url + "/health", timeout=HANG_GUARD_S).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["waiting", "decoding"])
def test_a_client_that_hangs_up_cancels_its_request(pair: Pair, phase: str, stream: bool) -> None:
    prompt = "hold:" if phase == "waiting" else "x"

    def until() -> bool:
        return bool(pair.prefill.generates) and (phase == "waiting" or pair.decode.num_running > 0)

    hang_up_after(pair.router, {"prompt": prompt, "stream": stream, "n": 2}, until)
    for node in pair.all:
        eventually(lambda node=node: any(abort.all_sequences for abort in node.aborts))
    eventually(lambda: pair.decode.num_running == 0)
    eventually(lambda: pair.router.metric('baton_requests_total{outcome="abort"}') == 1)
    assert pair.router.metric("baton_open_requests") == 0


def test_a_client_that_hangs_up_in_the_middle_of_its_body(pair: Pair) -> None:
    host, port = pair.router.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    assert post(pair.router, "say:fine").status_code == 200


def test_the_sdk_closing_a_stream_cancels_it(pair: Pair) -> None:
    with openai.OpenAI(base_url=pair.router.url + "/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model=MODEL, prompt="x", max_tokens=4000, stream=True)
        next(iter(stream))
        stream.close()
    eventually(lambda: pair.decode.num_running == 0 and pair.decode.aborts)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_that_dies_before_the_first_token_is_a_5xx(pair: Pair, role: str) -> None:
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(post, pair.router, "hold:", stream=True)
        eventually(lambda: pair.prefill.generates)
        getattr(pair, role).stop()
        response = answer.result(HANG_GUARD_S)
    assert response.status_code == 502 and error_code(response) == "node_lost"
    survivor = pair.decode if role == "prefill" else pair.prefill
    eventually(lambda: survivor.aborts)


def test_a_node_that_dies_in_a_stream_is_an_error_event(pair: Pair) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 4000, "stream": True}
    with httpx.stream("POST", pair.router.url + "/v1/completions", json=body, timeout=HANG_GUARD_S) as response:
        events = stream_events(response)
        assert response.status_code == 200 and next(events)["choices"][0]["text"] == "a"
        pair.decode.stop()
        assert list(events)[-1]["error"]["code"] == "node_lost"
    assert pair.router.metric('baton_requests_total{outcome="node_lost"}') == 1
    assert pair.router.metric("baton_open_requests") == 0


def test_other_requests_go_on_when_a_node_dies(pair: Pair) -> None:
    """The prefill node dies; a stream that decodes already never notices, and new ones run on the decode node alone."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 200, "stream": True}
    with httpx.stream("POST", pair.router.url + "/v1/completions", json=body, timeout=HANG_GUARD_S) as response:
        events = stream_events(response)
        texts = [next(events)["choices"][0]["text"] for _ in range(2)]  # the second one is the decode node's
        pair.decode.paused.set()
        pair.prefill.stop()
        eventually(lambda: num_nodes(pair.router) == 1)
        pair.decode.paused.clear()
        texts += [event["choices"][0]["text"] for event in events]
    assert len("".join(texts)) == 200
    assert post(pair.router, "say:alone").json()["choices"][0]["text"] == "alone"
    assert pair.decode.generates[-1].decode_node == ""


def test_prefill_decodes_when_no_decode_node_is_left(pair: Pair) -> None:
    pair.decode.stop()
    eventually(lambda: num_nodes(pair.router) == 1)
    assert post(pair.router, "say:alone").json()["choices"][0]["text"] == "alone"


def test_a_frozen_node_is_noticed_and_comes_back(pair: Pair) -> None:
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(post, pair.router, "x", max_tokens=4000)
        eventually(lambda: pair.decode.num_running > 0)
        pair.decode.frozen.set()
        response = answer.result(HANG_GUARD_S)
    assert response.status_code == 502 and error_code(response) == "node_lost"
    pair.decode.frozen.clear()
    eventually(lambda: pair.decode.num_running == 0)  # the abort was waiting for it
    eventually(lambda: httpx.get(pair.router.url + "/ready", timeout=HANG_GUARD_S).json()["pair"])
    assert post(pair.router, "say:again").json()["choices"][0]["text"] == "again"


def test_a_restarted_node_replaces_its_earlier_life(pair: Pair) -> None:
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(post, pair.router, "hold:")
        eventually(lambda: pair.prefill.generates)
        fresh = FakeNode("prefill", pair.router.nodes, "p0", peer=pair.decode).start()
        response = answer.result(HANG_GUARD_S)
    old, pair.prefill = pair.prefill, fresh
    try:
        assert response.status_code == 502
        assert post(pair.router, "say:new").status_code == 200 and len(fresh.generates) == 1
    finally:
        old.stop()
    # the old connection's end must not take the new epoch with it
    assert post(pair.router, "say:still").status_code == 200 and len(fresh.generates) == 2


@pytest.mark.parametrize(
    ("code", "status"), [("step_failed", 500), ("handoff_failed", 502), ("overloaded", 429), ("too_large", 400)]
)
def test_an_error_of_a_node_is_a_clear_answer(pair: Pair, code: str, status: int) -> None:
    for body in ({"stream": True}, {"stream": False}, {"n": 3}):
        response = post(pair.router, f"fail:{code}", **body)
        assert response.status_code == status and error_code(response) == code
    assert post(pair.router, "say:next").status_code == 200


def test_a_too_large_request_is_tried_once_and_blames_no_node(pair: Pair) -> None:
    for attempt in range(1, 5):
        assert post(pair.router, "fail:too_large").json()["error"]["type"] == "invalid_request_error"
        assert len(pair.prefill.generates) == attempt, "the breaker lets the next one through, too"
    assert pair.router.metric('baton_requests_total{outcome="too_large"}') == 4


def test_an_error_in_a_stream_does_not_look_like_an_end(pair: Pair) -> None:
    response = post(pair.router, "late:step_failed", stream=True)
    assert response.status_code == 200 and "[DONE]" not in response.text
    assert json.loads(response.text.strip().splitlines()[-1][6:])["error"]["code"] == "step_failed"


def test_too_many_open_requests(pair: Pair) -> None:
    pair.decode.paused.set()
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(post, pair.router, "x", max_tokens=400) for _ in range(4)]
        eventually(lambda: pair.decode.num_running == 4)
        refused = post(pair.router, "x")
        assert refused.status_code == 503 and error_code(refused) == "queue_full" and "retry-after" in refused.headers
        pair.decode.paused.clear()
        assert [answer.result(HANG_GUARD_S).status_code for answer in answers] == [200] * 4
    assert post(pair.router, ["say:a"] * 5).status_code == 503


def test_a_draining_node_gets_no_new_requests(pair: Pair) -> None:
    pair.prefill.is_draining = True
    eventually(
        lambda: any(n["draining"] for n in httpx.get(pair.router.url + "/ready", timeout=HANG_GUARD_S).json()["nodes"])
    )
    assert post(pair.router, "say:x").status_code == 200 and not pair.prefill.generates


def test_goodbye_is_a_loss_at_once(pair: Pair) -> None:
    node = pair.prefill
    node.raw.put(lambda links: links.send("router", Goodbye(node.node_id, node.epoch)) and None)
    eventually(lambda: num_nodes(pair.router) == 1)


def test_nodes_that_do_not_fit_are_named(router: RouterProcess, pair: Pair) -> None:
    odd = FakeNode("prefill", router.nodes, "odd", fingerprint=msgspec.structs.replace(FINGERPRINT, page_size=64))
    try:
        odd.start()
        misfits = httpx.get(router.url + "/ready", timeout=HANG_GUARD_S).json()["misfits"]
        assert {"a": "d0", "b": "odd", "differs": "page_size"} in misfits
        for _ in range(4):
            post(router, "say:x")
        assert not odd.generates
        assert any("do not fit" in line and "page_size" in line for line in router.lines)
    finally:
        odd.stop()


NONSENSE = [[b""], [b"\xff" * 100], [b"\x80"], [b"\x81\xa1t\xa5Hello"], [b"x", b"y", b"z"], [b"\x81\xa1t\xa4Nope"],
            [encode(Goodbye("somebody-else", 1))],
            [encode(Hello("cook", "evil", 1, "", FINGERPRINT, 1, 1, "", [], 1, []))],
            [b"\xdd\xff\xff\xff\xff"], [b"\x91" * 5000]]  # fmt: skip


@pytest.mark.parametrize("identity", [b"evil@1", b"no epoch", b"\x00\x01"])
def test_nonsense_on_the_node_socket_is_dropped_and_hurts_nobody(pair: Pair, identity: bytes) -> None:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        if identity[0]:
            dealer.setsockopt(zmq.METADATA, b"X-Peer:" + identity)
        dealer.connect(pair.router.nodes)
        for frames in NONSENSE:
            dealer.send_multipart(frames)
        assert post(pair.router, "say:fine").json()["choices"][0]["text"] == "fine"
        eventually(lambda: any("dropped a message" in line for line in pair.router.lines))
    finally:
        dealer.close(0)
        context.term()


def test_a_node_can_not_speak_for_anothers_requests(pair: Pair) -> None:
    """A registered node sends tokens for a request that runs elsewhere, and for none at all."""
    other_pages = msgspec.structs.replace(FINGERPRINT, page_size=64)  # fits no decode node: gets no prompt
    spy = FakeNode("prefill", pair.router.nodes, "spy", fingerprint=other_pages)
    try:
        spy.start()
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(post, pair.router, "hold:", max_tokens=5)
            eventually(lambda: pair.prefill.generates)
            generate = pair.prefill.generates[0]
            false = Tokens("spy", spy.epoch, [TokenRun(generate.key, 0, [1, 2, 3, 4, 5], [])], [])
            spy.raw.put(lambda links: links.send("router", false) and None)
            eventually(lambda: spy.aborts)  # it is told to stop what it has no part in
            assert not answer.done()
            pair.prefill.install(msgspec.structs.replace(generate, prompt_ids=[1]))
            assert answer.result(HANG_GUARD_S).json()["choices"][0]["text"] == "abcde"
    finally:
        spy.stop()


def test_many_streams_at_once_are_all_right(router: RouterProcess) -> None:
    decode = FakeNode("decode", router.nodes, "d0", period_s=0.001).start()
    try:

        def one(index: int) -> str:
            response = post(router, f"say:stream number {index} says its own text and no other", stream=True)
            return "".join(json.loads(line[6:])["choices"][0]["text"] for line in response.text.splitlines()
                           if line.startswith("data: {"))  # fmt: skip

        with ThreadPoolExecutor(4) as pool:
            texts = list(pool.map(one, range(40)))
        assert texts == [f"stream number {index} says its own text and no other" for index in range(40)]
        eventually(lambda: router.metric("baton_open_requests") == 0)
    finally:
        decode.stop()


def test_a_client_that_does_not_read_is_cut_off() -> None:
    """Its sockets' buffers fill up; then the router gives up on it and tells the node."""
    router = RouterProcess("--slow-reader-s", "1")
    node = FakeNode("decode", router.nodes, "d0", burst=10, period_s=0.005, max_context=65_536).start()
    try:
        host, port = router.url.removeprefix("http://").split(":")
        fields = {"model": MODEL, "prompt": "x", "max_tokens": 60_000, "stream": True, "logprobs": 20, "n": 2}
        body = json.dumps(fields).encode()
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        eventually(router.outcomes)
        assert router.outcomes() == {'outcome="abort"': 1}
        connection.close()
    finally:
        node.stop()
        router.stop()


@pytest.mark.parametrize("router", [str(HANG_GUARD_S)], indirect=True)
def test_sigterm_lets_open_streams_finish(router: RouterProcess, pair: Pair) -> None:
    pair.decode.paused.set()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(post, router, "x", max_tokens=60)
        eventually(lambda: pair.decode.num_running > 0)
        os.kill(router.process.pid, signal.SIGTERM)
        pair.decode.paused.clear()
        assert len(answer.result(HANG_GUARD_S).json()["choices"][0]["text"]) == 60
    assert router.process.wait(HANG_GUARD_S) == 0


def test_a_hang_up_does_not_wait_for_ever(router: RouterProcess, pair: Pair) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 4000, "stream": True}
    with httpx.stream("POST", router.url + "/v1/completions", json=body, timeout=HANG_GUARD_S) as response:
        events = stream_events(response)
        next(events)
        os.kill(router.process.pid, stop_signals()[-1])  # SIGHUP, unless these tests run under nohup
        assert "shutting down" in list(events)[-1]["error"]["message"]
    assert router.process.wait(HANG_GUARD_S) == 0
    eventually(lambda: pair.decode.aborts)


def test_a_taken_port_is_a_clear_message(router: RouterProcess) -> None:
    port = router.url.rpartition(":")[2]
    command = launcher.command("deploy.cli", "router", "--model", "hashlm", "--port", port)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_GUARD_S)
    assert done.returncode != 0 and port in done.stderr and "Traceback" not in done.stderr


def test_torch_is_never_loaded(tmp_path: Any) -> None:
    """Everything the process builds, the default model's tokenizer included."""
    program = (
        "import sys, router.app, router.text.load\n"
        "router.text.load.load_text_model('smollm2').tokenizer.encode('x', add_special=True)\n"
        "bad = [m for m in ('torch', 'transformers', 'numba') if m in sys.modules]\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=HANG_GUARD_S)


def test_prompts_are_not_logged(pair: Pair) -> None:
    post(pair.router, "say:my secret words")
    post(pair.router, "fail:step_failed my secret words")
    assert prompt_text(pair.prefill.generates[0]) == "say:my secret words"
    assert not [line for line in pair.router.lines if "secret" in line]


def test_threads_of_the_fake_nodes_end(pair: Pair) -> None:
    names = {node.node_id for node in pair.all}
    for node in pair.all:
        node.stop()
    time.sleep(0)
    assert not names & {thread.name for thread in threading.enumerate()}
