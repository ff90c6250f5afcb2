"""Histories as agents send them back, and the turns that a template gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.api.ask.parts import Parts
from router.api.fields.parse import BodyParser
from router.api.openai.chat import CHAT
from router.api.openai.chat_messages import Turn, turns_of
from shared.core.errors import InvalidRequest

PARSER = BodyParser(CHAT)


def turns(*messages: dict[str, Any]) -> list[Turn]:
    return turns_of(PARSER.parse(json.dumps({"messages": messages}).encode()).body.messages, Parts())


def test_a_tool_call_and_its_result() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    assert turns(
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{**call, "index": 0}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    ) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    ]


def test_the_older_form_of_a_call() -> None:
    assert turns(
        {"role": "assistant", "function_call": {"name": "f", "arguments": {"a": 1}}},
        {"role": "function", "name": "f", "content": "2"},
    ) == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "name": "f"},
    ]


@pytest.mark.parametrize(
    "message",
    [
        {"content": "so", "reasoning_content": "because"},
        {"content": "so", "reasoning": "because"},
        {"content": "so", "reasoning": "because", "reasoning_details": [{"type": "reasoning.text", "text": "because"}]},
        {"content": [{"type": "thinking", "thinking": "because", "signature": "x"}, {"type": "text", "text": "so"}]},
        {"content": [{"type": "reasoning", "text": "because"}, "so"]},
    ],
)
def test_reasoning_is_kept_apart(message: dict[str, Any]) -> None:
    assert turns({"role": "assistant", **message}) == [
        {"role": "assistant", "content": "so", "reasoning_content": "because"}
    ]


def test_vendors_marks_change_nothing() -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    assert turns({"role": "user", "content": [part], "cache_control": {}}) == [{"role": "user", "content": "hi"}]


def test_what_the_model_refused_is_its_text() -> None:
    for message in ({"refusal": "no"}, {"content": [{"type": "refusal", "refusal": "no"}]}):
        assert turns({"role": "assistant", **message}) == [{"role": "assistant", "content": "no"}]


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "image_url", "image_url": {"url": "data:..."}}], "messages[0].content[0].type"),
        (["a", {"type": "input_audio", "input_audio": {}}], "messages[0].content[1].type"),
        ([{"type": "file", "file": {}}], "messages[0].content[0].type"),
        ([{"type": "text"}], "messages[0].content[0].text"),
        ([{"type": "refusal", "text": "no"}], "messages[0].content[0].refusal"),
    ],
)
def test_what_is_no_text_is_refused_by_name(content: list[Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        turns({"role": "user", "content": content})
    assert error.value.param == param
