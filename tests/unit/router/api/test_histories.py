"""Histories as agents send them back to each API, and the turns that a template gets."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from router.api.anthropic.messages import MESSAGES, MessagesRequest, conversation_of
from router.api.ask.parts import Parts
from router.api.fields.parse import BodyParser
from router.api.openai.chat import CHAT, ChatRequest
from router.api.openai.chat_messages import turns_of as chat_turns
from router.api.openai.responses import RESPONSES, ResponsesRequest
from router.api.openai.responses_input import turns_of
from router.text.chat.conversation import Conversation
from shared.core.errors import InvalidRequest


def claude(*messages: Any, **more: Any) -> list[Any]:
    return list(claude_chat(*messages, **more).messages)


def claude_chat(*messages: Any, **more: Any) -> Conversation:
    body = {"messages": [{"role": role, "content": content} for role, content in messages], "max_tokens": 1, **more}
    parsed: MessagesRequest = BodyParser(MESSAGES).parse(msgspec.json.encode(body)).body
    return conversation_of(parsed, (), Parts())


def openai(*items: Any, **more: Any) -> list[Any]:
    parsed: ResponsesRequest = BodyParser(RESPONSES).parse(msgspec.json.encode({"input": items, **more})).body
    return list(turns_of(parsed.instructions, parsed.input, Parts()))


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def result(call_id: str, said: object, **more: object) -> dict[str, object]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": said, **more}


def used(call_id: str, name: str, **given: object) -> dict[str, object]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def test_thoughts_texts_and_calls_are_one_turn() -> None:
    function = {"name": "f", "arguments": {"x": 1}}
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "hm"}
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    blocks = [thought, {"type": "redacted_thinking", "data": "x"}, text("I "), text("look.")]
    calls = [("assistant", [used("a", "f", x=1)]), ("user", [result("a", "1")])]
    turns = claude(("user", "hi"), ("assistant", blocks), *calls)
    assert turns[1] == said | {"tool_calls": [{"id": "a", "type": "function", "function": function}]}
    turns = openai(
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x": 1}'},
    )
    function["arguments"] = '{"x": 1}'
    assert turns[1] == said | {"tool_calls": [{"id": "a", "type": "function", "function": function}]}


def test_results_follow_the_order_of_their_calls_before_texts() -> None:
    """Many templates show no ids."""
    calls = ("assistant", [used("a", "f", x=1), used("b", "g")])
    results = [text("see"), result("b", [text("of b")]), result("zz", "of none"), result("a", "of a", is_error=True)]
    _, _, *rest = claude(("user", "hi"), calls, ("user", results))
    assert [(turn["role"], turn["content"]) for turn in rest] == [
        *(("tool", "Error: of a"), ("tool", "of b"), ("tool", "of none"), ("user", "see"))
    ]
    assert [turn.get("tool_call_id") for turn in rest] == ["a", "b", "zz", None]


def test_neighbours_of_one_role_are_one_turn() -> None:
    turns = claude(("system", "t"), ("user", "a"), ("user", [text("b"), text("c")]), system="s")
    assert [(turn["role"], turn["content"]) for turn in turns] == [("system", "s\n\nt"), ("user", "a\n\nbc")]
    turns = openai({"role": "developer", "content": "t"}, {"role": "user", "content": "a"}, instructions="s")
    assert [(turn["role"], turn["content"]) for turn in turns] == [("system", "s\n\nt"), ("user", "a")]


def test_a_system_message_in_the_middle_stays_there() -> None:
    turns = claude(("user", "a"), ("system", "t"), ("system", "u"), ("user", "b"))
    assert [turn["role"] for turn in turns] == ["user", "system", "system", "user"]


@pytest.mark.parametrize("empty", [[], [{"type": "redacted_thinking", "data": "x"}]])
def test_an_empty_last_message_is_not_continued(empty: list[Any]) -> None:
    chat = claude_chat(("user", "a"), ("assistant", empty))
    assert [turn["role"] for turn in chat.messages] == ["user"]
    assert chat.add_generation_prompt and not chat.continue_final_message
    assert claude_chat(("assistant", empty)).add_generation_prompt
    for messages in ((("assistant", "b"), ("assistant", empty)), (("assistant", ""),)):
        chat = claude_chat(("user", "a"), *messages)
        assert chat.continue_final_message and not chat.add_generation_prompt


def test_what_is_said_of_thinking_reaches_the_template() -> None:
    def kwargs(**more: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **more}
        parsed: MessagesRequest = BodyParser(MESSAGES).parse(msgspec.json.encode(body)).body
        return dict(conversation_of(parsed, (), Parts()).kwargs)

    assert kwargs() == kwargs(thinking={"type": "adaptive"}) == {}
    assert kwargs(thinking={"type": "enabled", "budget_tokens": 2048}) == {"enable_thinking": True}
    assert kwargs(thinking={"type": "disabled"}) == {"enable_thinking": False}
    assert kwargs(output_config={"effort": "low"}) == {"reasoning_effort": "low"}


# ---- /v1/chat/completions


def chat(*messages: dict[str, Any]) -> list[Any]:
    parsed: ChatRequest = BodyParser(CHAT).parse(msgspec.json.encode({"messages": messages})).body
    return chat_turns(parsed.messages, Parts())


def test_a_tool_call_and_its_result() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    assert chat(
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
    assert chat(
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
    assert chat({"role": "assistant", **message}) == [
        {"role": "assistant", "content": "so", "reasoning_content": "because"}
    ]


def test_what_the_model_refused_is_its_text() -> None:
    for message in ({"refusal": "no"}, {"content": [{"type": "refusal", "refusal": "no"}]}):
        assert chat({"role": "assistant", **message}) == [{"role": "assistant", "content": "no"}]


@pytest.mark.parametrize(
    ("part", "param"), [({"type": "text"}, "text"), ({"type": "refusal", "text": "no"}, "refusal")], ids=str
)
def test_a_part_without_its_text_is_refused_by_name(part: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        chat({"role": "user", "content": ["a", part]})
    assert error.value.param == f"messages[0].content[1].{param}"
