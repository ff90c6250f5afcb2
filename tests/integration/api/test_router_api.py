"""The real router process with nodes that only pretend to compute, driven by the openai SDK and raw HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.clusters.key_folders import write_key
from tests.support.clusters.router_fake_node import FakeNode, char_ids
from tests.support.clusters.router_process import RouterProcess, eventually
from tests.support.machine.patience import HANG_GUARD_S

MODEL = "hashlm"


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    process = RouterProcess("--max-body-bytes", "64KiB", "--local-prefill-tokens", "0")
    yield process
    assert process.stop() == 0
    assert not [line for line in process.lines if " ERROR " in line]


@pytest.fixture(scope="module")
def nodes(router: RouterProcess) -> Iterator[tuple[FakeNode, FakeNode]]:
    decode = FakeNode("decode", router.nodes, "d0", cached_tokens=4).start()
    prefill = FakeNode("prefill", router.nodes, "p0", peer=decode).start()
    yield prefill, decode
    for node in (prefill, decode):
        node.stop()


@pytest.fixture
def client(router: RouterProcess, nodes: tuple[FakeNode, FakeNode]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def http(router: RouterProcess, nodes: tuple[FakeNode, FakeNode]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=router.url, timeout=HANG_GUARD_S) as client:
        yield client


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream; the last line must be [DONE]."""
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert data[-1] == "[DONE]"
    return [json.loads(entry) for entry in data[:-1]]


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def streamed(http: httpx.Client, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    response = http.post(path, json={"model": MODEL, "stream": True, **body})
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    return events(response)


def test_chat_with_the_sdk(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "say:hello there"}], logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert choice.message.content == "hello there" and choice.finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens == len("user: say:hello there assistant: ")
    assert answer.usage.prompt_tokens_details is not None and answer.usage.prompt_tokens_details.cached_tokens == 4
    assert choice.logprobs is not None and choice.logprobs.content is not None
    first = choice.logprobs.content[0]
    assert (first.token, first.bytes, first.logprob) == ("h", [104], -0.5)
    assert [top.token for top in first.top_logprobs] == ["h", "i"]


def test_chat_stream_with_the_sdk(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "say:hello"}], stream=True,
        stream_options={"include_usage": True}, max_completion_tokens=50,
    )  # fmt: skip
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == len("user: say:hello assistant: ") + 6
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_completion_with_the_sdk(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["say:ab", "say:cd"], n=2, echo=True)
    assert [choice.text for choice in answer.choices] == ["say:abab", "say:ab1ab", "say:cdcd", "say:cd1cd"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None and answer.usage.prompt_tokens == 12


def test_a_stream_and_a_whole_answer_say_the_same(http: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": "x", "n": 3, "max_tokens": 20, "logprobs": 1, "return_token_ids": True}
    whole = complete(http, **body)
    chunks = streamed(http, **body)
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [i for c in mine for i in c.get("token_ids") or []] == choice["token_ids"]
        assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"] == char_ids("x")
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]] == ["length"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            parts = [entry for c in mine if c["logprobs"] for entry in c["logprobs"][name]]
            assert parts == choice["logprobs"][name] and len(parts) == 20


def test_logprobs_of_completions(http: httpx.Client) -> None:
    logprobs = complete(http, prompt="say:abc", logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "<eos>"]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["top_logprobs"][0] == {"a": -0.5, "b": -1.5}


@pytest.mark.rule("H15")
@pytest.mark.parametrize("burst", [1, 3, 50])
def test_stop_strings_across_tokens(
    http: httpx.Client, nodes: tuple[FakeNode, FakeNode], router: RouterProcess, burst: int
) -> None:
    nodes[1].burst = burst
    try:
        body = {"prompt": "say:one STOP two", "stop": ["STOP", "zzz"], "return_token_ids": True}
        choice = complete(http, **body)["choices"][0]
        chunks = streamed(http, **body)
    finally:
        nodes[1].burst = 1
    assert (choice["text"], choice["finish_reason"]) == ("one ", "stop")
    assert choice["token_ids"] == char_ids("one STOP")
    assert "".join(c["choices"][0]["text"] for c in chunks) == "one "
    eventually(lambda: nodes[1].num_running == 0)


def test_what_is_held_back_comes_out_at_the_end(http: httpx.Client) -> None:
    choice = complete(http, prompt="say:one STO", stop="STOP")["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one STO", "stop")


def test_stop_token_ids_end_the_text_before_them(http: httpx.Client) -> None:
    choice = complete(http, prompt="x", stop_token_ids=char_ids("d"), max_tokens=50)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")


def test_ignore_eos_and_min_tokens(http: httpx.Client) -> None:
    longer = complete(http, prompt="say:ab", ignore_eos=True, max_tokens=9)
    assert longer["usage"]["completion_tokens"] == 9 and longer["choices"][0]["finish_reason"] == "length"
    later = complete(http, prompt="x", stop="b", min_tokens=10, max_tokens=60)["choices"][0]
    assert later["text"] == "abcdefghijklmnopqrstuvwxyza"


def test_parameters_reach_the_node(http: httpx.Client, nodes: tuple[FakeNode, FakeNode]) -> None:
    complete(
        http, prompt=[1, 2], max_tokens=2, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, presence_penalty=1,
        frequency_penalty=-1, repetition_penalty=1.1, logit_bias={"5": -3}, seed=11, min_tokens=1, logprobs=1,
    )  # fmt: skip
    generate = nodes[0].generates[-1]
    sampling = generate.sampling
    assert (generate.prompt_ids, generate.seed, generate.num_sequences) == ([1, 2], 11, 1)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.1)
    assert (sampling.logit_bias, sampling.min_tokens, sampling.num_logprobs) == ([(5, -3.0)], 1, 1)
    assert generate.decode_node == "d0" and generate.output_ids == [[]]


def test_models_health_and_ready(client: openai.OpenAI, http: httpx.Client) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL and client.models.retrieve(MODEL).id == MODEL
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 4096  # what the nodes hold
    assert http.get("/health").json() == {"status": "ok"}
    ready = http.get("/ready")
    assert ready.status_code == 200 and ready.json()["pair"] is True
    assert http.head("/health").status_code == 200


def test_tokenize_and_back(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": "hi there"}).json()
    assert tokens == {"count": 8, "max_model_len": 4096, "tokens": char_ids("hi there")}
    assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"] == "hi there"
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["count"] == len("user: hi assistant: ")


def test_tokenizer_info(http: httpx.Client) -> None:
    assert http.get("/tokenizer_info").json() == {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": None}


REFUSED = [
    ("post", "/v1/completions", {"json": {"model": "nope", "prompt": "x"}}, 404, "model", "model_not_found"),
    ("post", "/v1/completions", {"json": {"model": MODEL, "prompt": "x" * 4096}}, 400, "prompt", None),
    ("post", "/v1/completions", {"content": b"{broken"}, 400, None, "invalid_request_error"),
    ("post", "/v1/completions", {"content": b""}, 400, None, "invalid_request_error"),
    ("post", "/v1/completions", {"content": b"x" * 70_000}, 413, None, "body_too_large"),
    ("post", "/v1/chat/completions", {"json": {"model": MODEL, "messages": []}}, 400, "messages", None),
    ("get", "/v1/completions", {}, 405, None, "method_not_allowed"),
    ("get", "/nowhere", {}, 404, None, "not_found"),
    ("post", "/nowhere", {}, 404, None, "not_found"),
    ("post", "/v1/embeddings", {"json": {"model": MODEL, "input": "x"}}, 404, None, "not_found"),
    ("delete", "/v1/models", {}, 405, None, "method_not_allowed"),
    ("get", "/v1/models/nope", {}, 404, "model", "model_not_found"),
    ("post", "/detokenize", {"json": {"tokens": [1000]}}, 400, "tokens", None),
]


@pytest.mark.parametrize(("method", "path", "sent", "status", "param", "code"), REFUSED)
def test_refusals_in_openais_form(
    http: httpx.Client, method: str, path: str, sent: dict[str, Any], status: int, param: str | None, code: str | None
) -> None:
    response = http.request(method, path, **sent)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert code is None or error["code"] == code


def test_an_endless_body_is_cut_off_while_it_is_read(http: httpx.Client) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(200):
            yield b"x" * 1024

    assert http.post("/v1/completions", content=endless()).status_code == 413


def test_the_sdk_sees_its_own_error_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=MODEL, prompt="x", temperature=9)
    assert error.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="x")


def test_what_guidellm_asks_by_default(http: httpx.Client) -> None:
    chunks = streamed(
        http,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": [{"type": "text", "text": "say:hello there"}]}],
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        max_completion_tokens=200,  # a router that the machine keeps waiting gets several tokens at once
        stop=None,
        ignore_eos=True,
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] < counts[-1] == 200
    assert not chunks[-1]["choices"] and all(chunk["choices"] for chunk in chunks[:-1])


def test_an_agent_s_history(client: openai.OpenAI) -> None:
    call: Any = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "user", "content": "now?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "noon"},
            {"role": "user", "content": "say:noon"},
        ],
        extra_body={"documents": None, "priority": 0, "surprise": 1},
    )
    assert answer.choices[0].message.content == "noon"


def test_fields_without_effect_are_named_and_counted(http: httpx.Client, router: RouterProcess) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1, "user": "me", "surprise": 1, "nothing": None}
    for _ in range(2):
        response = http.post("/v1/completions", json=body)
        assert response.status_code == 200 and response.headers["x-baton-ignored-fields"] == "user,surprise"
    assert router.metric('baton_ignored_fields_total{field="user"}') == 2
    assert router.metric('baton_ignored_fields_total{field="other"}') >= 2
    plain = http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 1})
    assert "x-baton-ignored-fields" not in plain.headers


def test_a_request_keeps_its_client_s_name(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    for headers, more, expected in (
        ({"x-request-id": "mine-7"}, {}, "mine-7"),
        ({"x-request-id": "mine-7"}, {"request_id": "mine-8"}, "mine-8"),
        ({"x-request-id": "mine-7"}, {"temperature": 9}, "mine-7"),  # refused
    ):
        assert http.post("/v1/completions", json=body | more, headers=headers).headers["x-request-id"] == expected
    assert http.get("/health").headers["x-request-id"].startswith("req-")


def test_token_forms_of_llama_server(http: httpx.Client) -> None:
    pieces = http.post("/tokenize", json={"content": "hi", "with_pieces": True}).json()["tokens"]
    assert [one["piece"] for one in pieces] == ["h", "i"]
    ids = http.post("/tokenize", json={"prompt": "hi", "return_token_strs": True}).json()
    assert ids["token_strs"] == ["h", "i"] and ids["tokens"] == [one["id"] for one in pieces]
    back = http.post("/detokenize", json={"tokens": ids["tokens"]}).json()
    assert back == {"prompt": "hi", "content": "hi"}


def test_the_playground_loads_nothing_from_elsewhere(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text.replace("http://www.w3.org/2000/svg", "") and "https://" not in page.text
    assert 'fetch(urlOf("v1/chat/completions")' in page.text


def test_the_status_page_holds_nothing_itself(http: httpx.Client) -> None:
    """It asks with the key that its user types in, and keeps the key nowhere else."""
    page = http.get("/status")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"] == http.get("/").headers["content-security-policy"]
    assert "://" not in page.text and not re.search("innerHTML|Storage|cookie", page.text)
    assert 'fetch(urlOf("admin/status")' in page.text and http.get("/admin/status").status_code == 403


def test_metrics_show_requests_and_nodes(http: httpx.Client, router: RouterProcess) -> None:
    before = router.metric('baton_requests_total{outcome="length"}')
    complete(http, prompt="x", max_tokens=3)
    streamed(http, prompt="x", max_tokens=3)
    assert router.metric('baton_requests_total{outcome="length"}') == before + 2
    assert router.metric("baton_open_requests") == 0
    assert router.metric("baton_ttft_seconds_count") > 0 and router.metric("baton_itl_seconds_count") > 0
    states = ("free", "cached", "active", "granted", "held")
    total = sum(router.metric(f'baton_kv_pages{{node="d0",role="decode",state="{state}"}}') for state in states)
    assert total == router.metric('baton_kv_pool_pages{node="d0",role="decode"}') == 100
    eventually(lambda: router.metric('baton_step_seconds_count{node="d0"}') > 0)


def test_the_key_is_asked_for_where_it_is_set(tmp_path: Path) -> None:
    write_key(tmp_path / "key", "s3cret\n")
    router = RouterProcess("--api-key-file", str(tmp_path / "key"))
    try:
        for headers, status in (({}, 401), ({"authorization": "Bearer wrong"}, 401), ({"authorization": "s3cret"}, 401),
                                ({"authorization": "Bearer s3cret"}, 200)):  # fmt: skip
            assert httpx.get(router.url + "/v1/models", headers=headers, timeout=HANG_GUARD_S).status_code == status
        assert httpx.post(router.url + "/v1/completions", json={}, timeout=HANG_GUARD_S).status_code == 401
        assert httpx.get(router.url + "/health", timeout=HANG_GUARD_S).status_code == 200
    finally:
        router.stop()
