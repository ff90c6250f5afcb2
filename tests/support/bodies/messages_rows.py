"""What each field of /v1/messages and /v1/messages/count_tokens does."""

from __future__ import annotations

from typing import Any

from router.api.anthropic.messages import COUNT_TOKENS, MESSAGES
from tests.support.bodies.field_rows import Row, calls, grammar_with, harmless, keeps, prompt_is, sampling, show
from tests.support.bodies.nested_fields import SCHEMA

BOTH, ONE = (MESSAGES, COUNT_TOKENS), (MESSAGES,)
USER = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
OTHER_TOOL = {"name": "g", "description": "d"}
HOSTED = {"type": "web_search_20260209", "name": "web_search"}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "4"}, {"text": "C"}]}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
PLACEHOLDER = "[image left out: this model reads text only]"
FORMAT = {"type": "json_schema", "schema": SCHEMA}
ALL_FORMATS = {"format": FORMAT, "effort": "low"}


def user(*blocks: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


def assistant(*blocks: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": list(blocks)}, {"role": "user", "content": "go on"}]


def marked(ttl: object) -> dict[str, Any]:
    return {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": ttl}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}


BAD_MESSAGES = (
    [],
    "x",
    None,
    [{"role": "god", "content": "x"}],
    [{"role": "user"}],
    user(IMAGE),
    user({"type": "document", "source": {}}),
    user({"type": "text"}),
    assistant({"type": "tool_use", "id": "x"}),
    [USER, {"role": "assistant", "content": [CALL]}],
)
MESSAGES_ROWS = [
    Row(
        "messages",
        (
            ([USER], prompt_is("user: hi assistant: ")),
            (user(text("a"), text("b")), prompt_is("user: ab assistant: ")),
            ([{"role": "system", "content": "s"}, USER], prompt_is("system: s user: hi assistant: ")),
            (user(RESULT, text("so?")), prompt_is("tool: 4C user: so? assistant: ")),
            (user(text("a"), RESULT), prompt_is("tool: 4C user: a assistant: ")),
            (user({**RESULT, "content": [IMAGE]}), prompt_is(f"tool: {PLACEHOLDER} assistant: ")),
            (user(), prompt_is("user:  assistant: ")),
            (
                assistant({"type": "thinking", "thinking": "hm", "signature": "s"}, text("a"), text("b"), CALL),
                prompt_is('user: hi assistant: ab {"name": "f", "arguments": {"a": 1}} user: go on assistant: '),
            ),
            (
                assistant({"type": "redacted_thinking", "data": "x"}, text("a")),
                prompt_is("user: hi assistant: a user: go on assistant: "),
            ),
            ([USER, {"role": "assistant", "content": "Once"}], prompt_is("user: hi assistant: Once")),
        ),
        BAD_MESSAGES,
        kinds=BOTH,
    ),
    Row(
        "messages", ((user(text("a"), marked("1h")), keeps(3600.0)),), (user(marked("2h")), user(marked(5))), kinds=ONE
    ),
    Row("system", (([marked("1h")], keeps(3600.0)), ([text("a")], keeps(300.0))), ([marked("1d")],), kinds=ONE),
    Row("tools", (([{**TOOL, "cache_control": {"ttl": "1h"}}], keeps(3600.0)),), (), kinds=ONE),
    Row(
        "system",
        (
            ("be brief", prompt_is("system: be brief user: hi assistant: ")),
            ([text("a"), text("b")], prompt_is("system: ab user: hi assistant: ")),
            ("", prompt_is("user: hi assistant: ")),
        ),
        (1, [IMAGE], [1]),
        kinds=BOTH,
    ),
    Row(
        "tools",
        (
            ([TOOL, OTHER_TOOL], calls("f", "g")),
            ([{**TOOL, "type": "custom"}], calls("f")),
            ([HOSTED, TOOL], calls("f")),
            ([HOSTED], calls()),
            ([], calls()),
        ),
        (
            "x",
            [1],
            [{"name": "two words"}],
            [TOOL, TOOL],
            [{"name": "f", "input_schema": 1}],
            [{"name": "f", "input_schema": {"type": "array"}}],
            [{"name": "f", "description": 1}],
            [{"name": f"f{i}"} for i in range(513)],
        ),
        kinds=BOTH,
    ),
    Row(
        "tool_choice",
        (
            ({"type": "auto"}, calls("f", "g")),
            ({"type": "any"}, calls("f", "g")),
            ({"type": "none"}, calls()),
            ({"type": "tool", "name": "g"}, calls("g")),
            ({"type": "auto", "disable_parallel_tool_use": True}, calls("f", "g")),
        ),
        ("auto", {"type": "x"}, {"type": "tool", "name": "h"}, {"type": "tool"}),
        (("tools", [TOOL, OTHER_TOOL]),),
        kinds=ONE,
    ),
    Row("tool_choice", harmless({"type": "auto"}, None), ("auto", {"type": "x"}), kinds=(COUNT_TOKENS,)),
    Row(
        "thinking",
        harmless({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}, None),
        ("x", {}),
        kinds=BOTH,
    ),
    Row(
        "output_config",
        ((ALL_FORMATS, grammar_with("maxLength")), ({"effort": "high"}, sampling("grammar", "")), *harmless({}, None)),
        ("x", {"format": {"type": "json_schema"}}, {"format": {"type": "json_schema", "schema": {"not": {}}}}),
        kinds=ONE,
    ),
    Row("output_format", ((FORMAT, grammar_with("maxLength")),), ("x", {"type": "json_object"}), kinds=ONE),
    Row("output_config", harmless({"effort": "high"}, ALL_FORMATS), ("x",), kinds=(COUNT_TOKENS,)),
    Row("output_format", harmless(FORMAT, None), ("x",), kinds=(COUNT_TOKENS,)),
    Row(
        "max_tokens",
        (
            (3, sampling("max_tokens", 3)),
            (0, show("hides_answer", True)),
            (32_000, sampling("max_tokens", 1000 - len("user: hi assistant: "))),
        ),
        (-2, 1.5, "x", None),
        kinds=ONE,
    ),
    Row(
        "stop_sequences",
        ((["x", "y"], show("stops", ("x", "y"))), ([], show("stops", ()))),
        ("x", [1], [str(n) for n in range(17)]),
        kinds=ONE,
    ),
    Row(
        "cache_control",
        (
            ({"type": "ephemeral"}, keeps(300.0)),
            ({"type": "ephemeral", "ttl": "1h"}, keeps(3600.0)),
            (None, keeps(0.0)),
        ),
        ({"type": "ephemeral", "ttl": "2h"}, {"type": "ephemeral", "ttl": 300}, {"type": "forever"}),
        kinds=ONE,
    ),
    Row("mcp_servers", harmless([], None), ([{"url": "x"}],), kinds=BOTH),
    Row("container", harmless(None), ("x", {"id": "x"}), kinds=BOTH),
    Row("thread", harmless(None), ({"id": "x"},), kinds=BOTH),
    Row("compaction", harmless(None), ({"type": "auto"},), kinds=ONE),
]
