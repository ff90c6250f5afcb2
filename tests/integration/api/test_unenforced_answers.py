"""Nodes that follow no grammars, behind a real router: chats with tools and JSON are answered, and headers say what
was not enforced. A node that follows them is used for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from shared.wire.fitting import no_grammar_because
from tests.support.clusters.router_fake_node import FINGERPRINT, FakeNode
from tests.support.clusters.router_process import RouterProcess

HEADER = "x-baton-unenforced"
CHAT, RESPONSES, MESSAGES, OLLAMA, COMPLETIONS = (
    *("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"),
    "/v1/completions",
)
WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": WEATHER}]
JSON_OBJECT = {"response_format": {"type": "json_object"}}
WHY = "nodes with --pp have none"
WITHOUT = msgspec.structs.replace(FINGERPRINT, grammar=no_grammar_because(WHY))


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    router = RouterProcess("--tool-format", "hermes")
    nodes = [FakeNode(role, router.nodes, role, fingerprint=WITHOUT) for role in ("decode", "prefill")]
    nodes[1].peer = nodes[0]
    for node in nodes:
        node.start()
    with httpx.Client(base_url=router.url, timeout=None) as client:
        yield client
    for node in nodes:
        node.stop()
    assert router.stop() == 0


def asked(
    path: str, says: str, *, has_tools: bool = False, is_json: bool = False, stream: bool = False
) -> dict[str, Any]:
    said = f"say:{says}"
    body: dict[str, Any] = {"stream": stream}
    if path == COMPLETIONS:
        return body | {"prompt": said, "max_tokens": 200} | (JSON_OBJECT if is_json else {})
    if path == RESPONSES:
        body |= {"input": said} | ({"text": {"format": {"type": "json_object"}}} if is_json else {})
        return body | ({"tools": [{"type": "function", **WEATHER}]} if has_tools else {})
    body |= {"messages": [{"role": "user", "content": said}]}
    if path == MESSAGES:
        form = {"output_format": {"type": "json_schema", "schema": {"type": "object"}}} if is_json else {}
        own = {"name": "get_weather", "input_schema": WEATHER["parameters"]}
        return body | {"max_tokens": 200} | form | ({"tools": [own]} if has_tools else {})
    if path == OLLAMA:
        return body | ({"format": "json"} if is_json else {}) | ({"tools": TOOLS} if has_tools else {})
    return body | (JSON_OBJECT if is_json else {}) | ({"tools": TOOLS} if has_tools else {})


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, OLLAMA, COMPLETIONS])
def test_json_is_answered_and_checked_at_its_end(client: httpx.Client, path: str) -> None:
    for says, valid in (('{"a": 1}', "yes"), ("Sure! {", "no")):
        whole = client.post(path, json=asked(path, says, is_json=True))
        assert whole.status_code == 200, whole.text
        assert whole.headers[HEADER] == f"json;valid={valid}"
        assert json.dumps(says)[1:-1] in whole.text
        stream = client.post(path, json=asked(path, says, is_json=True, stream=True))
        assert stream.status_code == 200 and stream.headers[HEADER] == "json"
    assert HEADER not in client.post(path, json=asked(path, "hi")).headers


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, OLLAMA])
def test_calls_are_read_though_they_are_not_enforced(client: httpx.Client, path: str) -> None:
    """Whatever the model writes: a call, a call of another shape, one of no tool, or none."""
    call = '<tool_call> {"name": "get_weather", "arguments": {"town": 7}} </tool_call>'
    for stream in (False, True):
        answer = client.post(path, json=asked(path, call, has_tools=True, stream=stream))
        assert answer.status_code == 200 and answer.headers[HEADER] == "tools"
        assert "get_weather" in answer.text and "<tool_call>" not in answer.text
        assert stream or "town" in answer.text
        for odd in (
            '<tool_call> {"name": "get_weather", "arguments": {"town": }} </tool_call>',
            '<tool_call> {"name": "other", "arguments": {}} </tool_call>',
            '<tool_call> {"name": "get_weather", "arguments": [1]} </tool_call>',
            "<tool_call> get_weather",
            "no call",
        ):
            answer = client.post(path, json=asked(path, odd, has_tools=True, stream=stream))
            assert answer.status_code == 200 and answer.headers[HEADER] == "tools", answer.text
            assert '"error":{' not in answer.text


def test_a_call_beside_json_is_no_wrong_json(client: httpx.Client) -> None:
    call = '<tool_call> {"name": "get_weather", "arguments": {"city": "Rome"}} </tool_call>'
    answer = client.post(CHAT, json=asked(CHAT, call, has_tools=True, is_json=True))
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
    assert answer.headers[HEADER] == "tools, json;valid=yes"


def test_what_must_be_enforced_is_refused_by_name(client: httpx.Client) -> None:
    """The reason is the nodes', not a guess."""
    strict = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, "strict": True}}
    for param, more in {
        "tool_choice": {"tools": TOOLS, "tool_choice": "required"},
        "tools": {"tools": [{"type": "function", "function": WEATHER | {"strict": True}}]},
        "response_format": {"response_format": strict},
        "guided_regex": {"guided_regex": "a+"},
    }.items():
        answer = client.post(CHAT, json=asked(CHAT, "hi") | more)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == param and WHY in error["message"], answer.text


def test_one_node_that_follows_grammars_is_enough() -> None:
    """It gets the requests that need it, and all of them are enforced again."""
    router = RouterProcess("--tool-format", "hermes")
    without = FakeNode("decode", router.nodes, "without", fingerprint=WITHOUT).start()
    body = asked(CHAT, "{}", is_json=True)
    with httpx.Client(base_url=router.url, timeout=None) as client:
        assert client.post(CHAT, json=body).headers[HEADER] == "json;valid=yes"
        assert [bool(one.sampling.grammar) for one in without.generates] == [False]
        follows = FakeNode("decode", router.nodes, "follows").start()
        for _ in range(6):
            answer = client.post(CHAT, json=body)
            assert answer.status_code == 200 and HEADER not in answer.headers
        assert len(without.generates) == 1
        assert [bool(one.sampling.grammar) for one in follows.generates] == [True] * 6
    for node in (without, follows):
        node.stop()
    assert router.stop() == 0
