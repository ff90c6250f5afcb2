"""What each field of /api/chat, /api/generate and /api/show does. Without messages and without a prompt, a request asks
for the model to be loaded, so most rows bring both."""

from __future__ import annotations

from typing import Any

from router.api.answer.generation_plan import GenerationPlan
from router.api.ollama.ollama import OLLAMA_CHAT, OLLAMA_GENERATE
from router.api.ollama.ollama_models import SHOW
from tests.support.bodies.field_rows import (
    Check,
    Row,
    Table,
    always,
    calls,
    grammar_with,
    harmless,
    prompt_is,
    sampling,
    show,
)
from tests.support.bodies.nested_fields import SCHEMA

BIG = 10**30
CHAT, ONE, BOTH = (OLLAMA_CHAT,), (OLLAMA_GENERATE,), (OLLAMA_CHAT, OLLAMA_GENERATE)
USER = {"role": "user", "content": "hi"}
SAID = {OLLAMA_CHAT: ("messages", [USER]), OLLAMA_GENERATE: ("prompt", "hi")}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
RAW = (("prompt", "hi"), ("raw", True))
STREAMED = show("stream", True)
CALL = {"function": {"name": "f", "arguments": {"a": 1}, "index": 0}, "id": "c"}


def both(field: str, good: Any = (), bad: Any = (), *extra: tuple[str, Any]) -> list[Row]:
    return [Row(field, good, bad, (SAID[table], *extra), kinds=(table,)) for table in BOTH]


def options(name: str, good: Any = (), bad: Any = ()) -> list[Row]:
    """The rows of one option. An error names it."""
    right = tuple(({name: value}, check) for value, check in good)
    wrong = tuple({name: value} for value in bad)
    return [Row("options", right, wrong, (SAID[table],), kinds=(table,), param=f"options.{name}") for table in BOTH]


def hides(is_hidden: bool) -> Check:
    return lambda plan: plan.show.hides_answer is is_hidden and not (is_hidden and plan.show.stream)


def follows_schema(plan: GenerationPlan) -> bool:
    return "maxLength" in plan.sampling.grammar


def seeded(seed: int) -> Check:
    return lambda plan: plan.jobs[0].seed == seed


def turns(*messages: Any) -> list[Any]:
    return [USER, *messages]


BAD_MESSAGES = (
    "hi",
    [{"role": "god", "content": "x"}],
    [{"content": "x"}],
    [{"role": "user", "content": 3}],
    [{"role": "user", "content": "é"}],
    [{"role": "user", "content": "x" * 1000}],
    [{"role": "user", "content": "x", "images": ["aGk="]}],
    turns({"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}),
    turns({"role": "assistant", "tool_calls": [{"name": "f"}]}),
)
OLLAMA_ROWS: list[Row] = [
    *both("model", harmless("hashlm", "hashlm:latest", None), ("gpt-4", "", 3, "hashlm:7b", "gpt-4:latest")),
    *both("stream", ((True, STREAMED), (None, STREAMED), (False, show("stream", False))), ("x",)),
    *both("options", ((None, always), ({}, always)), ("x", [1])),
    *options("temperature", ((0, sampling("temperature", 0.0)), (None, always)), (-0.1, 2.1, "x")),
    *options("top_p", ((0.5, sampling("top_p", 0.5)),), (1.1, "x")),
    *options("top_k", ((5, sampling("top_k", 5)), (0, sampling("top_k", 0))), (-2, "x")),
    *options("min_p", ((0.1, sampling("min_p", 0.1)),), (1.1, "x")),
    *options("repeat_penalty", ((1.2, sampling("repetition_penalty", 1.2)),), (0, "x")),
    *options("presence_penalty", ((1, sampling("presence_penalty", 1.0)),), (2.1, "x")),
    *options("frequency_penalty", ((1, sampling("frequency_penalty", 1.0)),), (2.1, "x")),
    *options("seed", ((5, seeded(5)), (0, seeded(0)), (-1, always), (-BIG, always)), (BIG, 1.5, "x")),
    *options("num_predict", ((7, sampling("max_tokens", 7)),), (1.5, "x")),
    *options("stop", (("a", show("stops", ("a",))), (["a", "b"], show("stops", ("a", "b"))), ([], always)), ([1], 5)),
    Row("options", tuple(({"num_predict": wanted}, sampling("max_tokens", 980)) for wanted in (0, -1, -2, BIG)),
        (), (SAID[OLLAMA_CHAT],), kinds=CHAT),
    Row("options", (({"num_predict": -1}, sampling("max_tokens", 998)),), (), RAW, kinds=ONE),
    Row("options", (({"num_predict": 3}, sampling("max_tokens", 3)),), (), RAW, kinds=ONE),
    *both(
        "format",
        (
            (None, sampling("grammar", "")),
            ("", sampling("grammar", "")),
            ("json", grammar_with('"object"')),
            (SCHEMA, follows_schema),
            ({}, grammar_with("{")),
        ),
        ("xml", 3, {"type": "foo"}, {"pattern": "a(?=b)"}),
    ),
    Row("format", (("json", grammar_with('"object"')),), ({"type": "foo"},), RAW, kinds=ONE),
    *both("think", harmless(None, True, False, "low", "medium", "high", "max"), (1, "lots", [])),
    *both("keep_alive", harmless(None, 0, "5m", -1, 300.5, "0"), ([], {})),
    *both("logprobs", ((True, show("num_logprobs", 0)), (False, show("num_logprobs", -1))), (3, "x")),
    *both("top_logprobs", ((3, show("num_logprobs", 3)),), (21, -1, "x"), ("logprobs", True)),
    *both("top_logprobs", ((3, show("num_logprobs", -1)),)),
    *both("cache_salt", (("a", lambda plan: plan.cache_salt > 0),), ("", 1)),
    *both("request_id", harmless("mine", None), (1, "x" * 513)),
    *both("template", harmless(None, ""), ("{{ .Prompt }}",)),
    *both("_debug_render_only", harmless(None, False), (True,)),
    Row(
        "messages",
        (
            ([USER], prompt_is("user: hi assistant: ")),
            ([{**USER, "images": []}], prompt_is("user: hi assistant: ")),
            ([{"role": "system", "content": "s"}, USER], prompt_is("system: s user: hi assistant: ")),
            (turns({"role": "assistant", "content": "a", "thinking": "t", "tool_calls": [CALL]},
                   {"role": "tool", "tool_name": "f", "tool_call_id": "c", "content": "4"}),
             lambda plan: plan.jobs[0].ids),
            (turns({"role": "assistant", "tool_calls": [{**CALL, "type": "function"}]}, USER), always),
            ([USER], hides(is_hidden=False)),
            ([], hides(is_hidden=True)),
            (None, hides(is_hidden=True)),
        ),
        BAD_MESSAGES,
        kinds=CHAT,
    ),
    Row(
        "tools",
        ((None, calls()), ([], calls()), ([TOOL], calls("f")), ([TOOL, {"type": "web"}], calls("f"))),
        ("x", [3], [{"type": "function"}], [{**TOOL, "function": {}}]),
        (SAID[OLLAMA_CHAT],),
        kinds=CHAT,
    ),
    Row(
        "prompt",
        (
            ("hi", prompt_is("user: hi assistant: ")),
            ("hi", hides(is_hidden=False)),
            ("", hides(is_hidden=True)),
            (None, hides(is_hidden=True)),
        ),
        (3, ["hi"], "é", "x" * 1000),
        kinds=ONE,
    ),
    Row("system", (("s", prompt_is("system: s user: hi assistant: ")), ("", always)), (3,), RAW[:1], kinds=ONE),
    Row("system", harmless("", None), ("s",), RAW, kinds=ONE),
    Row("raw", ((True, prompt_is("hi")), (False, prompt_is("user: hi assistant: "))), ("x",), RAW[:1], kinds=ONE),
    Row("prompt", ((" x", prompt_is(" x")),), ("é", "x" * 1000), (("raw", True),), kinds=ONE),
    Row("context", harmless(None, []), ([1, 2],), kinds=ONE),
    Row("images", harmless(None, []), (["aGk="],), kinds=ONE),
    Row("suffix", harmless(None, ""), ("x",), kinds=ONE),
    *(Row(name, harmless(None, 0), (512,), kinds=ONE) for name in ("width", "height", "steps")),
    Row("model", harmless("hashlm", "hashlm:latest", None), ("gpt-4", 3), kinds=(SHOW,)),
    Row("name", harmless("hashlm", None), ("gpt-4", 3), (("model", None),), kinds=(SHOW,)),
    Row("system", harmless(None, ""), ("x",), kinds=(SHOW,)),
    Row("template", harmless(None, ""), ("x",), kinds=(SHOW,)),
]  # fmt: skip
CARDS = [{"id": "hashlm", "created": 1, "context_length": 1000}]
OLLAMA_BASES: dict[Table, dict[str, Any]] = {table: {"model": "hashlm"} for table in (*BOTH, SHOW)}
