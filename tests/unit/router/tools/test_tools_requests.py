"""Tools and choices of requests: what is taken, and what is refused by the name of its field."""

from __future__ import annotations

import re
from typing import Any

import pytest

from router.tools.calls.call_ids import call_id
from router.tools.calls.format_row import CallIds
from router.tools.schemas.choice import NO_TOOLS, ChoiceMode, ToolChoice, parse_tool_choice
from router.tools.schemas.declared import (
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    MAX_TOOLS,
    DeclaredTools,
    OtherTool,
    Tool,
    make_tool,
    parse_tools,
)
from shared.core.errors import InvalidRequest

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def function(name: object = "f", **members: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **members}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


def refused(value: object, param: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        parse_tools(value)
    assert caught.value.param == param
    return caught.value.message


def test_tools_of_chats_and_of_responses() -> None:
    chat = function("get_weather", description="Tells it.", parameters=SCHEMA, strict=True)
    tool = Tool("get_weather", "Tells it.", SCHEMA, True)
    assert parse_tools([chat]) == DeclaredTools((tool,))
    assert parse_tools([{"type": "function", **chat["function"]}]) == DeclaredTools((tool,))
    assert parse_tools([]) == parse_tools(None) == DeclaredTools()
    assert make_tool("f", None, SCHEMA, None, "tools[0]", "input_schema") == Tool("f", None, SCHEMA)


def test_other_tools_are_told_apart() -> None:
    declared = parse_tools([{"type": "web_search"}, function(), {"type": "custom", "custom": {}}])
    assert declared == DeclaredTools((Tool("f"),), (OtherTool(0, "web_search"), OtherTool(2, "custom")))


def test_templates_get_the_tool_as_openai_writes_it() -> None:
    assert Tool("f", "d", SCHEMA, True).for_template() == {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": SCHEMA},
    }
    assert Tool("f").for_template()["function"] == {"name": "f", "parameters": {"type": "object", "properties": {}}}


def test_arguments_are_always_an_object() -> None:
    assert Tool("f").schema["additionalProperties"] is False
    assert Tool("f", parameters={}).schema == {"type": "object"}
    assert Tool("f", parameters={"anyOf": []}).schema == {"type": "object", "anyOf": []}


@pytest.mark.parametrize(
    "value, param",
    [
        ("f", "tools"),
        ([1], "tools[0]"),
        ([{}], "tools[0].type"),
        ([{"type": 1}], "tools[0].type"),
        ([function(), {"type": "function", "function": []}], "tools[1].function"),
        ([{"type": "function"}], "tools[0].name"),
        ([function(None)], "tools[0].function.name"),
        ([function("")], "tools[0].function.name"),
        ([function("a b")], "tools[0].function.name"),
        ([function("a" * 129)], "tools[0].function.name"),
        ([function(description=1)], "tools[0].function.description"),
        ([function(strict="yes")], "tools[0].function.strict"),
        ([function(parameters=[])], "tools[0].function.parameters"),
        ([function(parameters={"type": "string"})], "tools[0].function.parameters.type"),
        ([function(parameters={"type": ["object"]})], "tools[0].function.parameters.type"),
        ([function(parameters=nested(MAX_SCHEMA_DEPTH + 1))], "tools[0].function.parameters"),
        ([function(parameters=nested(50_000))], "tools[0].function.parameters"),
        ([function(parameters={"const": "x" * MAX_SCHEMA_BYTES})], "tools"),
        ([function(), function()], "tools"),
        ([function(f"f{index}") for index in range(MAX_TOOLS + 1)], "tools"),
    ],
)
def test_wrong_tools_are_refused_by_name(value: object, param: str) -> None:
    refused(value, param)


def test_the_bounds_themselves_are_taken() -> None:
    parse_tools([function(f"f{index}") for index in range(MAX_TOOLS)])
    parse_tools([function("aZ0_.-" + "x" * 58, parameters=nested(MAX_SCHEMA_DEPTH))])


TOOLS = (Tool("f"), Tool("g"))
NAMES_G = {"type": "function", "function": {"name": "g"}}


@pytest.mark.parametrize(
    "value, expected",
    [
        (None, ToolChoice(ChoiceMode.AUTO, TOOLS)),
        ("auto", ToolChoice(ChoiceMode.AUTO, TOOLS)),
        ("required", ToolChoice(ChoiceMode.REQUIRED, TOOLS)),
        ("none", NO_TOOLS),
        (NAMES_G, ToolChoice(ChoiceMode.NAMED, TOOLS[1:])),
        ({"type": "function", "name": "g"}, ToolChoice(ChoiceMode.NAMED, TOOLS[1:])),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMES_G]}},
            ToolChoice(ChoiceMode.REQUIRED, TOOLS[1:]),
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            ToolChoice(ChoiceMode.AUTO, TOOLS[:1]),
        ),
    ],
)
def test_choices(value: object, expected: ToolChoice) -> None:
    assert parse_tool_choice(value, TOOLS) == expected


@pytest.mark.parametrize(
    "value, param",
    [
        ("any", "tool_choice"),
        (1, "tool_choice"),
        ({}, "tool_choice.type"),
        ({"type": "custom"}, "tool_choice.type"),
        ({"type": "function", "function": {"name": "h"}}, "tool_choice"),
        ({"type": "function", "function": "f"}, "tool_choice"),
        ({"type": "allowed_tools"}, "tool_choice"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [1]}}, "tool_choice"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": [], "tools": [NAMES_G]}}, "tool_choice"),
    ],
)
def test_wrong_choices_are_refused_by_name(value: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_tool_choice(value, TOOLS)
    assert caught.value.param == param


def test_call_ids_are_a_function_of_request_choice_and_call() -> None:
    ids = [
        call_id(request, call, choice=choice) for request in ("a", "b\udc00") for call in (0, 1) for choice in (0, 1)
    ]
    assert len(set(ids)) == len(ids)
    assert ids[0] == call_id("a", 0) == "call_" + ids[0][5:]
    assert all(re.fullmatch("call_[0-9a-f]{24}", one) for one in ids)
    assert re.fullmatch("[0-9a-f]{9}", call_id("a", 0, kind=CallIds.SHORT))
