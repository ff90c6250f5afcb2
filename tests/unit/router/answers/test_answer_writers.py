"""/v1/messages and /v1/responses write the same answer streamed and whole, however it was cut: read by their SDKs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import anthropic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.answer.blocks import Block, BlockKind, whole_blocks
from router.api.answer.choice_text import Delta
from router.api.answer.generation_plan import AnswerForm
from router.api.answer.writer import AnswerFacts
from router.api.anthropic.messages_writer import MessagesWriter
from router.api.openai.responses_writer import ResponsesWriter
from router.tools.calls.format_row import CallIds
from router.tools.calls.formats import BY_NAME
from router.tools.reasoning import THINK, Thought, framed
from shared.core.errors import Overloaded
from shared.core.states import FinishReason
from tests.support.bodies.tool_cases import CASES, TOOLS, Case
from tests.support.web.written_answers import anthropic_reads, deltas_of, facts_of, openai_reads, streamed, whole

OPEN = Thought(THINK, is_open=True)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TEXT = f"I think.</think>\n\nLet me look.\n{CALL}\n{CALL}"
REASONS = [FinishReason.STOP, FinishReason.LENGTH]
PIECES = [
    *("<tool_call>", '{"name": "stop", ', '"arguments": {}}', "</tool_call>", "</think>", " ", "\n", "a", "é", CALL)
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def messages_writer(facts: AnswerFacts) -> MessagesWriter:
    return MessagesWriter(facts)


def responses_writer(facts: AnswerFacts) -> ResponsesWriter:
    return ResponsesWriter(facts, {"instructions": "be brief", "tools": [], "tool_choice": "auto"})


def cut(text: str, places: Sequence[int]) -> list[str]:
    marks = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in zip(marks, marks[1:], strict=False)]


def shown(blocks: Sequence[Block]) -> list[tuple[BlockKind, str, str, bool]]:
    return [(block.kind, block.name, block.text, block.is_whole) for block in blocks]


# ---- blocks


def test_space_between_blocks_goes_and_an_answer_of_space_stays() -> None:
    (answer,) = [Delta(text=" \n", finish_reason=FinishReason.STOP)]
    assert shown(whole_blocks(answer)) == [(BlockKind.TEXT, "", " \n", True)]
    spaced = Delta(parts=[d for one in deltas_of([f"\n\n{CALL}"]) for d in one.parts], has_calls=True)
    assert [block.kind for block in whole_blocks(spaced)] == [BlockKind.CALL]
    assert whole_blocks(Delta(finish_reason=FinishReason.STOP)) == []


# ---- /v1/messages


@given(TEXTS, st.lists(st.integers(0, 500), max_size=8), st.sampled_from(REASONS))
def test_a_message_is_the_same_streamed_and_whole(text: str, places: list[int], reason: FinishReason) -> None:
    deltas = deltas_of(cut(text, places), reason=reason, thought=OPEN)
    one = anthropic_reads(whole(messages_writer(facts_of()), deltas)).to_dict()
    other = anthropic_reads(streamed(messages_writer(facts_of()), deltas), is_stream=True).to_dict()
    calls = [block for block in other["content"] if block["type"] == "tool_use"]  # type: ignore[attr-defined]
    if calls and not deltas[-1].has_calls:  # the last one was cut: only a stream has its beginning
        other["content"].remove(calls[-1])  # type: ignore[attr-defined]
    assert comparable(one) == comparable(other)


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """Without what the SDK adds to what it accumulates."""
    block_keys = ("type", "text", "thinking", "id", "name", "input")
    blocks = [{key: block[key] for key in block_keys if key in block} for block in message["content"]]
    usage = {name: count for name, count in message["usage"].items() if count is not None}
    keys = ("id", "type", "role", "model", "stop_reason", "stop_sequence")
    return {"content": blocks, "usage": usage, **{key: message[key] for key in keys}}


def test_the_events_of_a_message() -> None:
    deltas = deltas_of([TEXT[:30], TEXT[30:60], TEXT[60:]], thought=OPEN)
    names = [name for name, _ in events_of(streamed(messages_writer(facts_of()), deltas))]
    squeezed = [name for i, name in enumerate(names) if name != "content_block_delta" or names[i - 1] != name]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert squeezed == ["message_start", *block * 4, "message_delta", "message_stop"]
    message = anthropic_reads(streamed(messages_writer(facts_of()), deltas), is_stream=True)
    assert [one.type for one in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.id == "msg_t0" and message.stop_reason == "tool_use" and message.stop_sequence is None
    call = message.content[2]
    assert isinstance(call, anthropic.types.ToolUseBlock)
    assert call.input == {"city": "Oslo"} and call.id.startswith("toolu_")
    assert call.id != message.content[3].id  # type: ignore[union-attr]
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (6, 4, 5)


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        ("x", {}, ("end_turn", None)),
        ("x", {"reason": FinishReason.LENGTH}, ("max_tokens", None)),
        ("x", {"stopped_by": "END"}, ("stop_sequence", "END")),
        (CALL, {}, ("tool_use", None)),
        (CALL[:-20], {"reason": FinishReason.LENGTH}, ("max_tokens", None)),
        (CALL[:-20], {"stopped_by": "Os"}, ("stop_sequence", "Os")),
    ],
)
def test_why_a_message_ended(text: str, fields: dict[str, Any], expected: tuple[str, str | None]) -> None:
    deltas = deltas_of([text], **fields)
    for is_stream, write in ((False, whole), (True, streamed)):
        message = anthropic_reads(write(messages_writer(facts_of()), deltas), is_stream=is_stream)
        assert (message.stop_reason, message.stop_sequence) == expected


def test_an_error_in_a_stream_of_messages_is_raised_by_the_sdk() -> None:
    writer = messages_writer(facts_of())
    data = writer.opening() + writer.more({0: Delta(text="x")}) + writer.failed(Overloaded("too much"))
    with pytest.raises(anthropic.APIStatusError, match="too much"):
        anthropic_reads(data, is_stream=True)


def test_a_call_that_is_no_json_is_left_out() -> None:
    """Readers count brackets only. An answer that is not streamed must be JSON as a whole."""
    broken = CALL.replace('"Oslo"', "Oslo")
    message = anthropic_reads(whole(messages_writer(facts_of()), deltas_of([f"so: {broken}"])))
    assert [block.type for block in message.content] == ["text"] and message.stop_reason == "end_turn"
    message = anthropic_reads(whole(messages_writer(facts_of()), deltas_of([f"{broken}{CALL}"])))
    assert [block.type for block in message.content] == ["tool_use"] and message.stop_reason == "tool_use"


# ---- /v1/responses


@given(TEXTS, st.lists(st.integers(0, 500), max_size=8), st.sampled_from(REASONS))
def test_a_response_is_the_same_streamed_and_whole(text: str, places: list[int], reason: FinishReason) -> None:
    deltas = deltas_of(cut(text, places), reason=reason, thought=OPEN)
    one = openai_reads(whole(responses_writer(facts_of()), deltas)).to_dict()
    other = openai_reads(streamed(responses_writer(facts_of()), deltas), is_stream=True).to_dict()
    assert one == other


def test_the_events_of_a_response() -> None:
    deltas = deltas_of([TEXT[:30], TEXT[30:60], TEXT[60:]], thought=OPEN)
    events = events_of(streamed(responses_writer(facts_of()), deltas))
    names = [name for name, _ in events]
    squeezed = [name for i, name in enumerate(names) if not name.endswith(".delta") or names[i - 1] != name]
    assert squeezed == [
        *("response.created", "response.in_progress"),
        *of_part("response.reasoning_text"),
        *of_part("response.output_text"),
        *of_item("response.function_call_arguments"),
        *of_item("response.function_call_arguments"),
        "response.completed",
    ]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(data["type"] == name for name, data in events)
    response = events[-1][1]["response"]
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert len({item["id"] for item in response["output"]}) == 4
    assert json.loads(response["output"][2]["arguments"]) == {"city": "Oslo"}
    assert response["output"][2]["call_id"] != response["output"][3]["call_id"]
    assert response["instructions"] == "be brief" and response["store"] is False
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    done = {data["item"]["id"]: data["item"] for name, data in events if name == "response.output_item.done"}
    assert list(done.values()) == response["output"]


def of_item(stem: str) -> list[str]:
    return ["response.output_item.added", f"{stem}.delta", f"{stem}.done", "response.output_item.done"]


def of_part(stem: str) -> list[str]:
    added, delta, done, ended = of_item(stem)
    return [added, "response.content_part.added", delta, done, "response.content_part.done", ended]


@pytest.mark.parametrize(
    ("text", "reason", "status", "item"),
    [
        ("x", FinishReason.STOP, "completed", "completed"),
        ("x", FinishReason.LENGTH, "incomplete", "incomplete"),
        (CALL, FinishReason.LENGTH, "incomplete", "completed"),
        (CALL[:-20], FinishReason.LENGTH, "incomplete", "incomplete"),
    ],
)
def test_how_a_response_ends(text: str, reason: FinishReason, status: str, item: str) -> None:
    response = openai_reads(whole(responses_writer(facts_of()), deltas_of([text], reason=reason)))
    assert response.status == status
    assert response.output[-1].status == item  # type: ignore[union-attr]
    cut_by = response.incomplete_details.reason if response.incomplete_details else None
    assert cut_by == ("max_output_tokens" if reason is FinishReason.LENGTH else None)


def test_a_response_that_fails_says_so_with_what_it_had() -> None:
    writer = responses_writer(facts_of())
    data = writer.opening() + writer.more({0: Delta(text="x")}) + writer.failed(Overloaded("too much"))
    name, event = events_of(data)[-1]
    assert name == "response.failed" and event["response"]["status"] == "failed"
    assert event["response"]["error"] == {"code": "rate_limit_exceeded", "message": "too much"}
    (item,) = event["response"]["output"]
    assert item["content"][0]["text"] == "x" and item["status"] == "incomplete"


def test_a_response_that_fails_before_any_token_was_created() -> None:
    data = responses_writer(facts_of()).failed(Overloaded("too much"))
    names = [name for name, _ in events_of(data)]
    assert names == ["response.created", "response.in_progress", "response.failed"]


# ---- both


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.format}: {case.text[:40]!r}")
def test_calls_of_each_format(case: Case) -> None:
    row = BY_NAME[case.format]
    facts = facts_of(AnswerForm(row, TOOLS, thought=framed(row.shape), request_id="r"))
    deltas = deltas_of([case.text], case.format, thought=framed(row.shape))
    message = anthropic_reads(whole(messages_writer(facts), deltas))
    used = [(block.name, block.input) for block in message.content if isinstance(block, anthropic.types.ToolUseBlock)]
    assert used == [(call.name, json.loads(call.arguments)) for call in case.calls]
    response = openai_reads(whole(responses_writer(facts), deltas))
    called = [(item.name, item.arguments) for item in response.output if item.type == "function_call"]
    assert called == [(call.name, call.arguments) for call in case.calls]


def test_short_ids_stay_short() -> None:
    """Mistral's templates refuse others."""
    (row,) = [row for row in BY_NAME.values() if row.ids is CallIds.SHORT][:1]
    case = next(case for case in CASES if case.format == row.name and case.calls)
    facts = facts_of(AnswerForm(row, TOOLS, request_id="r"))
    message = json.loads(whole(messages_writer(facts), deltas_of([case.text], row.name)))
    response = json.loads(whole(responses_writer(facts), deltas_of([case.text], row.name)))
    used = next(block for block in message["content"] if block["type"] == "tool_use")
    called = next(item for item in response["output"] if item["type"] == "function_call")
    assert used["id"] == called["call_id"] and len(used["id"]) == 9


def events_of(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    events = []
    for event in data.decode().split("\n\n")[:-1]:
        named, said = event.split("\n")
        events.append((named.removeprefix("event: "), json.loads(said.removeprefix("data: "))))
    return events
