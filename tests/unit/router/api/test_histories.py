"""Conversations of /v1/messages and /v1/responses as the turns that templates get."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from router.api.anthropic.messages import MESSAGES, MessagesRequest, conversation_of
from router.api.ask.parts import Parts
from router.api.fields.parse import BodyParser
from router.api.openai.responses import RESPONSES, ResponsesRequest
from router.api.openai.responses_input import turns_of
from router.text.chat.conversation import Conversation

CALLS = [
    {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
    {"id": "b", "type": "function", "function": {"name": "g", "arguments": {}}},
]


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


def test_thoughts_texts_and_calls_of_a_message_are_one_turn() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    _, said, *_ = claude(
        ("user", "hi"), ("assistant", [thought, redacted, text("I "), text("look.")]),
        ("assistant", [used("a", "f", x=1), used("b", "g")]), ("user", [result("a", "1"), result("b", "2")]),
    )  # fmt: skip
    assert said == {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": CALLS}


def test_items_of_the_assistant_are_one_turn() -> None:
    _, said, *_ = openai(
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
    )
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    assert said == {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]}


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


@pytest.mark.parametrize(
    ("system", "kept"),
    [
        ("{0}\nBe brief.", "Be brief."),
        ([text("{0}"), text("\nBe brief.")], "\nBe brief."),
        ([text("{0}\n"), text("Be brief.")], "Be brief."),
    ],
)
def test_a_line_that_differs_with_each_request_is_no_prompt(system: Any, kept: str) -> None:
    """Claude Code begins its system prompt with one; nothing behind it could be cached."""
    header = "x-anthropic-billing-header: cc_version=2.1; cch=00af3;"
    filled = msgspec.json.decode(msgspec.json.encode(system).replace(b"{0}", header.encode()))
    assert claude(("user", "a"), system=filled)[0] == {"role": "system", "content": kept}
    assert claude(("user", "a"), system=header)[0]["role"] == "user"
    assert [turn["role"] for turn in claude(("system", header), ("user", "a"))] == ["user"]


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
