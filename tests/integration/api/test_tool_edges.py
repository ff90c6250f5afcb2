"""Tools as clients have them, through a real router: answers that are cut, stop strings, schemas no grammar can follow.
The node says what the last message tells it to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.clusters.router_fake_node import FakeNode
from tests.support.clusters.router_process import RouterProcess

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "parameters": SCHEMA}
MAIL_SCHEMA = {
    "type": "object",
    "properties": {"to": {"type": "string", "format": "email", "pattern": r"^(?!\.)[a-z.]+@[a-z.]+$"}},
    "required": ["to"],
}
MAIL = {"name": "mail", "parameters": MAIL_SCHEMA}
CALL = '<tool_call> {"name": "get_weather", "arguments": {"city": "Rome"}} </tool_call>'
TEXT = "I look. "
CHAT, RESPONSES, MESSAGES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"
LOOSENED = "x-baton-loosened-tools"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    router = RouterProcess("--tool-format", "hermes")
    node = FakeNode("decode", router.nodes, "d0").start()
    with httpx.Client(base_url=router.url, timeout=None) as client:
        yield client
    node.stop()
    assert router.stop() == 0


def body_of(path: str, says: str, tools: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    said = f"say:{says}"
    if path == COMPLETIONS:
        return {"prompt": said, **more}
    if path == RESPONSES:
        return {"input": said, "tools": [{"type": "function", **tool} for tool in tools], **more}
    asked = {"messages": [{"role": "user", "content": said}], **more}
    if path == MESSAGES:
        own = [
            {"name": tool["name"], "input_schema": tool["parameters"], "strict": tool.get("strict")} for tool in tools
        ]
        return {"max_tokens": 200, **asked, "tools": own}
    return asked | {"tools": [{"type": "function", "function": tool} for tool in tools]}


def texts(path: str, body: dict[str, Any]) -> str:
    """Return all text that a whole answer shows outside calls."""
    if path == CHAT:
        return body["choices"][0]["message"]["content"] or ""
    if path == COMPLETIONS:
        return str(body["choices"][0]["text"])
    if path == MESSAGES:
        return "".join(block.get("text", "") for block in body["content"])
    parts = [part for item in body["output"] for part in item.get("content", [])]
    return "".join(part.get("text", "") for part in parts)


def streamed_text(path: str, data: str) -> str:
    """Return all text that a stream shows outside calls."""
    lines = [line[6:] for line in data.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
    shown = ""
    for event in map(json.loads, lines):
        if path == CHAT:
            shown += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        elif path == COMPLETIONS:
            shown += "".join(choice["text"] for choice in event["choices"])
        elif path == MESSAGES:
            shown += event.get("delta", {}).get("text", "")
        elif event["type"] == "response.output_text.delta":
            shown += event["delta"]
    return shown


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_cut_answer_shows_no_mark_up(client: httpx.Client, path: str) -> None:
    cap = "max_output_tokens" if path == RESPONSES else "max_tokens"
    for most in range(1, len(TEXT + CALL), 3):
        body = body_of(path, TEXT + CALL, [WEATHER], **{cap: most})
        whole = client.post(path, json=body)
        assert whole.status_code == 200, whole.text
        stream = client.post(path, json=body | {"stream": True})
        assert texts(path, whole.json()) == streamed_text(path, stream.text), most
        assert TEXT.startswith(texts(path, whole.json()))


def test_a_completion_has_no_calls_and_shows_all(client: httpx.Client) -> None:
    body = body_of(COMPLETIONS, CALL, [], max_tokens=12)
    whole, stream = client.post(COMPLETIONS, json=body), client.post(COMPLETIONS, json=body | {"stream": True})
    assert texts(COMPLETIONS, whole.json()) == streamed_text(COMPLETIONS, stream.text) == CALL[:12]


@pytest.mark.parametrize("path, stop", [(CHAT, "stop"), (MESSAGES, "stop_sequences")])
@pytest.mark.parametrize("word", ["Rome", "get_", '"', "}}", "tool"])
def test_a_stop_string_ends_no_call(client: httpx.Client, path: str, stop: str, word: str) -> None:
    body = body_of(path, CALL, [WEATHER], **{stop: [word]})
    answer = client.post(path, json=body).json()
    if path == CHAT:
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome"}
    else:
        assert answer["stop_reason"] == "tool_use" and answer["content"][0]["input"] == {"city": "Rome"}
    stream = client.post(path, json=body | {"stream": True}).text
    assert "stop_sequence" not in stream.replace('"stop_sequence":null', "") and '"stop"' not in stream


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_schema_that_no_grammar_can_follow_blocks_no_tool(client: httpx.Client, path: str) -> None:
    answer = client.post(path, json=body_of(path, "hi", [WEATHER, MAIL]))
    assert answer.status_code == 200 and texts(path, answer.json()) == "hi"
    assert answer.headers[LOOSENED] == "mail.properties.to.pattern"
    stream = client.post(path, json=body_of(path, "hi", [WEATHER, MAIL], stream=True))
    assert stream.status_code == 200 and stream.headers[LOOSENED] == "mail.properties.to.pattern"
    assert LOOSENED not in client.post(path, json=body_of(path, "hi", [WEATHER])).headers


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_strict_tool_is_refused_by_name_and_path(client: httpx.Client, path: str) -> None:
    answer = client.post(path, json=body_of(path, "hi", [WEATHER, MAIL | {"strict": True}]))
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message == "tools: mail is strict, but no grammar can enforce its properties.to.pattern"


@pytest.mark.parametrize("flags", [(), ("--open-objects",)])
def test_the_operator_opens_objects(flags: tuple[str, ...]) -> None:
    router = RouterProcess("--tool-format", "hermes", *flags)
    node = FakeNode("decode", router.nodes, "d0").start()
    asked = [
        (CHAT, body_of(CHAT, "hi", [WEATHER])),
        (COMPLETIONS, {"prompt": "say:hi", "guided_json": SCHEMA}),
        (RESPONSES, {"input": "say:hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}),
        (MESSAGES, body_of(MESSAGES, "hi", [], output_format={"type": "json_schema", "schema": SCHEMA})),
    ]
    for path, body in asked:
        assert httpx.post(router.url + path, json=body, timeout=None).status_code == 200
    grammars = [generate.sampling.grammar.replace("\\", "") for generate in node.generates]
    node.stop()
    assert router.stop() == 0
    assert ['"additionalProperties"' in grammar for grammar in grammars] == [not flags] * len(asked)


def test_a_long_name_is_cut_in_the_header(client: httpx.Client) -> None:
    name = "é, " + "x" * 300
    mail = {"name": "mail", "parameters": {"type": "object", "properties": {name: {"pattern": "(?=a)"}}}}
    answer = client.post(CHAT, json=body_of(CHAT, "hi", [mail]))
    assert answer.status_code == 200 and answer.headers[LOOSENED].startswith("mail.properties.%C3%A9%2C%20xxx")
