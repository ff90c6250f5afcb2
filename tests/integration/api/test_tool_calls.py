"""Calls of tools through a real router, read by the openai SDK. The node says what the last message tells it to."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from router.requests.returns import ASSUMED_S
from shared.wire.messages import Keep
from tests.support.clusters.router_fake_node import FakeNode
from tests.support.clusters.router_process import RouterProcess
from tests.support.machine.patience import HANG_GUARD_S

MODEL = "hashlm"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "tells it", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call> {"name": "weather", "arguments": {"city": "Oslo", "days": 3}} </tool_call>'
SECOND = '<tool_call> {"name": "time", "arguments": {}} </tool_call>'


Site = tuple[openai.OpenAI, FakeNode]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    router = RouterProcess("--tool-format", "hermes")
    node = FakeNode("decode", router.nodes, "d0").start()
    with openai.OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0) as client:
        yield client, node
    node.stop()
    assert router.stop() == 0


@pytest.fixture
def client(site: Site) -> openai.OpenAI:
    return site[0]


def ask(client: openai.OpenAI, says: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": f"say:{says}"}]
    given: Any = {"tools": [WEATHER, TIME], **more}
    return client.chat.completions.create(model=MODEL, messages=messages, **given)


def test_a_whole_answer_with_two_calls(client: openai.OpenAI) -> None:
    (choice,) = ask(client, f"let me see {CALL} {SECOND}").choices
    assert choice.finish_reason == "tool_calls" and choice.message.content.strip() == "let me see"
    first, second = choice.message.tool_calls
    assert (first.function.name, json.loads(first.function.arguments)) == ("weather", {"city": "Oslo", "days": 3})
    assert (second.function.name, json.loads(second.function.arguments)) == ("time", {})
    assert first.id.startswith("call_") and first.id != second.id and first.type == "function"


def test_a_call_alone_has_no_content(client: openai.OpenAI) -> None:
    (choice,) = ask(client, CALL).choices
    assert choice.message.content is None and len(choice.message.tool_calls) == 1


def test_calls_come_in_pieces(client: openai.OpenAI) -> None:
    """Names and ids first, then arguments as they grow; together they are what the whole answer says."""
    calls: dict[int, dict[str, str]] = {}
    content, reason, num_pieces = "", None, 0
    for chunk in ask(client, f"so: {CALL}{SECOND}", stream=True, extra_body={"request_id": "mine"}):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(part.index, {"id": part.id, "name": part.function.name, "arguments": ""})
                call["arguments"] += part.function.arguments
                num_pieces += 1
    whole = ask(client, f"so: {CALL}{SECOND}", extra_body={"request_id": "mine"}).choices[0]
    assert content.strip() == (whole.message.content or "").strip() == "so:" and reason == "tool_calls"
    told = [(call.id, call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert [(call["id"], call["name"], call["arguments"]) for call in calls.values()] == told
    assert num_pieces > 4, "arguments are streamed"


def test_without_a_call_nothing_changes(client: openai.OpenAI) -> None:
    (choice,) = ask(client, "no tool is needed").choices
    assert choice.message.content == "no tool is needed" and choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


def test_an_unknown_name_is_text(client: openai.OpenAI) -> None:
    said = CALL.replace("weather", "launch")
    (choice,) = ask(client, said).choices
    assert choice.message.tool_calls is None and choice.message.content == said


def test_half_a_call_stays_one(client: openai.OpenAI) -> None:
    (choice,) = ask(client, CALL, max_completion_tokens=60).choices
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather" and '{"city": "Oslo", "days": 3}'.startswith(call.function.arguments)


def test_the_one_that_is_named_ends_with_stop(client: openai.OpenAI) -> None:
    (choice,) = ask(client, CALL, tool_choice={"type": "function", "function": {"name": "weather"}}).choices
    assert choice.finish_reason == "stop" and choice.message.tool_calls[0].function.name == "weather"


def test_a_history_with_calls_is_taken_back(client: openai.OpenAI) -> None:
    message = ask(client, CALL).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    history: Any = [message.model_dump(), result, {"role": "user", "content": "say:rain it is"}]
    answer = client.chat.completions.create(model=MODEL, messages=history, tools=[WEATHER])  # type: ignore[list-item]
    assert answer.choices[0].message.content == "rain it is"


def test_errors_name_the_member(client: openai.OpenAI) -> None:
    broken = {"type": "function", "function": {"name": "x", "strict": True, "parameters": {"uniqueItems": True}}}
    for more, words in (
        ({"tools": [broken], "tool_choice": "required"}, "uniqueItems"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"extra_body": {"guided_regex": "x"}, "tool_choice": "required"}, "another grammar"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            ask(client, "x", **more)


def heard(node: FakeNode) -> Keep:
    try:
        return node.keeps.get(timeout=HANG_GUARD_S)
    except queue.Empty:
        raise AssertionError("the router said nothing") from None


def test_the_node_hears_what_to_keep(site: Site) -> None:
    """Streams and whole answers with calls, and what clients ask for; answers without calls say nothing."""
    client, node = site
    told = node.keeps
    while not told.empty():
        told.get()
    ask(client, "no tool is needed", user="first")
    ask(client, CALL)
    list(ask(client, CALL, stream=True))
    ask(client, "hold it", extra_body={"prompt_cache_retention": "24h"})
    expected = (ASSUMED_S, ASSUMED_S, 24 * 3600)
    generates = node.generates[-3:]
    for seconds, generate in zip(expected, generates, strict=True):
        word = heard(node)
        assert (word.key, word.keep_ms) == (generate.key, 1000 * seconds)
    with pytest.raises(openai.BadRequestError, match="prompt_cache_retention"):
        ask(client, "x", extra_body={"prompt_cache_retention": "1h"})


def test_an_edited_history_spends_the_older_branch(site: Site) -> None:
    client, node = site
    for text in (f"{'x' * 64}{'a' * 64} say:a", f"{'x' * 64}{'b' * 64} say:b"):
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], extra_headers={"X-Session-ID": "mine"}
        )
    word = heard(node)
    assert (word.key, word.keep_ms) == (node.generates[-2].key, 0)
