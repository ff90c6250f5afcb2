"""What each field of /v1/responses does."""

from __future__ import annotations

from typing import Any

from router.api.openai.responses import RESPONSES
from tests.support.bodies.field_rows import (
    Check,
    calls,
    grammar_with,
    harmless,
    prompt_is,
    sampling,
)
from tests.support.bodies.field_rows import Row as AnyRow
from tests.support.bodies.nested_fields import SCHEMA

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": True}
OTHER_TOOL = {"type": "function", "name": "g", "parameters": None}
HOSTED = {"type": "web_search"}
CALL = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
CALLED = '{"name": "f", "arguments": {}}'
LEFT_OUT = "[input_file left out: this model reads text only]"
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "4 C"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def Row(
    field: str,
    good: tuple[tuple[Any, Check], ...] = (),
    bad: tuple[Any, ...] = (),
    extra: tuple[tuple[str, Any], ...] = (),
) -> AnyRow:
    return AnyRow(field, good, bad, extra, kinds=(RESPONSES,))


def said(role: str, *texts: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


OWN = said("assistant", "a", kind="output_text")
BAD_INPUTS = (
    None,
    1,
    [],
    [{"role": "god", "content": "x"}],
    [{"content": "x"}],
    [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
    [{"role": "user", "content": [{"type": "input_text"}]}],
    [{"type": "item_reference", "id": "x"}],
    [{"type": "web_search_call", "id": "x"}],
    [{"type": "function_call", "name": "f", "arguments": "{}"}],
    [{"type": "function_call", "call_id": "x"}],
    [{"type": "function_call_output", "output": "x"}],
)
STRUCTURED = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
RESPONSES_ROWS = [
    Row(
        "input",
        (
            ("hi", prompt_is("user: hi assistant: ")),
            ([{"role": "user", "content": "hi"}], prompt_is("user: hi assistant: ")),
            ([said("user", "a", "b")], prompt_is("user: ab assistant: ")),
            ([said("developer", "d"), said("user", "u")], prompt_is("system: d user: u assistant: ")),
            (
                [said("user", "u"), THOUGHT, OWN, CALL, RESULT, said("user", "v")],
                prompt_is(f"user: u assistant: a {CALLED} tool: 4 C user: v assistant: "),
            ),
            (
                [said("user", "u"), CALL, {**RESULT, "output": [{"type": "input_file"}]}],
                prompt_is(f"user: u assistant:  {CALLED} tool: {LEFT_OUT} assistant: "),
            ),
            (
                [said("user", "u"), CALL, CALL, RESULT],
                prompt_is(f"user: u assistant:  {CALLED} {CALLED} tool: 4 C assistant: "),
            ),
            ([said("user", "u"), OWN, OWN, said("user", "v")], prompt_is("user: u assistant: aa user: v assistant: ")),
        ),
        BAD_INPUTS,
    ),
    Row(
        "instructions",
        (("be brief", prompt_is("system: be brief user: hi assistant: ")), ("", prompt_is("user: hi assistant: "))),
        (1, ["x"]),
    ),
    Row(
        "max_output_tokens",
        (
            (3, sampling("max_tokens", 3)),
            (32_000, sampling("max_tokens", 1000 - len("user: hi assistant: "))),
            (None, sampling("max_tokens", 1000 - len("user: hi assistant: "))),
        ),
        (0, -2, 1.5, "x"),
    ),
    Row(
        "tools",
        (([TOOL, OTHER_TOOL], calls("f", "g")), ([HOSTED, TOOL], calls("f")), ([HOSTED], calls()), ([], calls())),
        ("x", [1], [{}], [{"type": "function", "name": "two words"}], [TOOL, TOOL]),
    ),
    Row(
        "tool_choice",
        (
            ("auto", calls("f", "g")),
            ("required", calls("f", "g")),
            ("none", calls()),
            ({"type": "function", "name": "g"}, calls("g")),
            ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}, calls("g")),
        ),
        ("maybe", {"type": "function", "name": "h"}, {"type": "web_search"}, 1),
        (("tools", [TOOL, OTHER_TOOL]),),
    ),
    Row("parallel_tool_calls", harmless(True, False, None), ("x",), (("tools", [TOOL]),)),
    Row(
        "text",
        (
            ({"format": STRUCTURED}, grammar_with("maxLength")),
            ({"format": {"type": "json_object"}}, grammar_with("object")),
            ({"format": {"type": "text"}}, sampling("grammar", "")),
            *harmless({}, None),
        ),
        (
            "x",
            {"format": {"type": "x"}},
            {"format": {"type": "json_schema"}},
            {"format": {**STRUCTURED, "schema": {"not": {}}}},
        ),
    ),
    Row("reasoning", harmless({"effort": "high"}, {"effort": "none"}, {}, None), ("x", {"effort": 1})),
    Row("include", harmless(["reasoning.encrypted_content"], [], None), ("x", ["message.output_text.logprobs"])),
    Row("metadata", harmless({"a": "b"}, {}, None), ("x", {"a": 1})),
    Row("background", harmless(False, None), (True,)),
    Row("context_management", harmless([], None), ([{"type": "compaction"}],)),
    Row("conversation", harmless(None), ("conv_1", {"id": "x"})),
    Row("image", harmless(None), ({"context_compression": "auto"},)),
    Row("moderation", harmless(None), ({"model": "x"},)),
    Row("previous_response_id", harmless(None), ("resp_1",)),
    Row("prompt", harmless(None), ({"id": "x"},)),
    Row("top_logprobs", harmless(0, None), (1,)),
    Row("truncation", harmless("disabled", None), ("auto",)),
]
