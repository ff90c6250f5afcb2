"""Rows that say what a field of a request does: values that are taken, with what must hold of the plan, and values that
are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from router.api.answer.generation_plan import GenerationPlan, UsageShown
from router.api.anthropic.messages import COUNT_TOKENS, MESSAGES
from router.api.fields.fields import REFUSED_GENERATION, FieldTable
from router.api.openai.chat import CHAT
from router.api.openai.completions import COMPLETIONS
from router.api.openai.responses import RESPONSES
from router.http.ignored import LOWERED
from shared.core.sampling_params import MAX_GRAMMAR_CHARS
from tests.support.bodies.nested_fields import SCHEMA

Table = FieldTable[Any]
CONTEXT = 1000
GENERATIONS = (CHAT, COMPLETIONS)
ALL_GENERATIONS = (*GENERATIONS, MESSAGES, RESPONSES)
Check = Callable[[GenerationPlan], object]


@dataclass(frozen=True)
class Row:
    """`good`: (value, what must hold of the plan). `bad`: refused, naming the field. `extra`: fields sent along."""

    field: str
    good: tuple[tuple[Any, Check], ...] = ()
    bad: tuple[Any, ...] = ()
    extra: tuple[tuple[str, Any], ...] = ()
    kinds: tuple[Table, ...] = GENERATIONS
    param: str = ""


def keeps(seconds: float) -> Check:
    return lambda plan: plan.keep_s == seconds


def marked(ttl: object) -> list[dict[str, Any]]:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": ttl}}
    return [{"role": "user", "content": [part]}]


CACHE_ROWS = (
    Row(
        "prompt_cache_key",
        (("app", lambda plan: plan.session == "app"), (None, lambda plan: not plan.session)),
        (1, "x" * 513),
        kinds=(*GENERATIONS, RESPONSES),
    ),
    Row(
        "prompt_cache_retention",
        (("24h", keeps(86400.0)), ("in_memory", keeps(0.0)), ("in-memory", keeps(0.0)), (None, keeps(0.0))),
        ("1h", "", 24, {"ttl": "24h"}),
        kinds=(*GENERATIONS, RESPONSES),
    ),
    Row("messages", ((marked("5m"), keeps(300.0)), (marked("1h"), keeps(3600.0))), (marked("2h"),), kinds=(CHAT,)),
)


def fills_the_context(plan: GenerationPlan) -> bool:
    return len(plan.jobs[0].ids) + plan.sampling.max_tokens == CONTEXT


def lowered(field: str, value: int) -> Check:
    """The header names the old and the new value."""
    return lambda plan: (
        plan.headers == {LOWERED: f"{field};from={value};to={plan.sampling.max_tokens}".encode()}
        and fills_the_context(plan)
    )


def always(plan: GenerationPlan) -> bool:
    return True


def sampling(name: str, value: Any) -> Check:
    return lambda plan: getattr(plan.sampling, name) == value


def show(name: str, value: Any) -> Check:
    return lambda plan: getattr(plan.show, name) == value


def num_prompt(count: int) -> Check:
    return lambda plan: len(plan.jobs[0].ids) == count


def harmless(*values: Any) -> tuple[tuple[Any, Check], ...]:
    return tuple((value, always) for value in values)


def grammar_with(part: str) -> Check:
    return lambda plan: part in plan.sampling.grammar


def grammar_without(part: str) -> Check:
    return lambda plan: bool(plan.sampling.grammar) and part not in plan.sampling.grammar


def calls(*names: str) -> Check:
    """Which tools the answer may call."""
    return lambda plan: (
        tuple(tool.name for tool in plan.show.form.tools) == names and bool(names) == bool(plan.sampling.grammar)
    )


def prompt_is(text: str) -> Check:
    """HashLM's ids are characters."""
    return lambda plan: prompt_of(plan) == text


def prompt_of(plan: GenerationPlan) -> str:
    return "".join(chr(32 + i) for i in plan.jobs[0].ids)


def follows_schema(plan: GenerationPlan) -> bool:
    return "maxLength" in plan.sampling.grammar


BAD_SCHEMAS = ({"not": {}}, {"type": "foo"}, {"uniqueItems": True}, {"pattern": "a(?=b)"}, {"$ref": "http://x/y"})
TWO = {"regex": "a", "choice": ["a"]}
BIG = 10**30
SHARED = [
    Row("model", harmless("hashlm", None), ("gpt-4", "", 3, []), kinds=(*ALL_GENERATIONS, COUNT_TOKENS)),
    Row("stream", ((True, show("stream", True)), (None, show("stream", False))), ("yes", 1, {}), kinds=ALL_GENERATIONS),
    Row(
        "stream_options",
        (
            ({"include_usage": True}, show("usage", UsageShown.LAST)),
            ({"include_usage": True, "continuous_usage_stats": True}, show("usage", UsageShown.ALWAYS)),
            ({}, show("usage", UsageShown.NEVER)),
        ),
        (True, "x", []),
        (("stream", True),),
    ),
    Row("stream_options", harmless({}, {"include_usage": False}), ({"include_usage": True},)),
    Row(
        "n",
        ((3, lambda plan: plan.num_sequences == 3), (None, lambda plan: plan.num_sequences == 1)),
        (0, -1, 9, BIG, 1.5, "two", True),
    ),
    Row("max_tokens", ((7, sampling("max_tokens", 7)),), (-2, 2.5, "x")),
    *(
        Row("max_tokens", ((value, fills_the_context), (value, lowered("max_tokens", value))), kinds=GENERATIONS)
        for value in (CONTEXT, 32_000)
    ),
    Row("max_tokens", ((BIG, fills_the_context),)),
    Row("max_tokens", (), (0,), kinds=(CHAT,)),
    Row("max_tokens", ((0, show("hides_answer", True)),), kinds=(COMPLETIONS,)),
    Row(
        "temperature",
        ((0, sampling("temperature", 0.0)), (None, sampling("temperature", 1.0)), (2, sampling("temperature", 2.0))),
        (-0.1, 2.1, "x", [], True),
        kinds=ALL_GENERATIONS,
    ),
    Row(
        "top_p",
        ((0.5, sampling("top_p", 0.5)), (None, sampling("top_p", 1.0))),
        (-0.1, 1.1, -1, "x"),
        kinds=ALL_GENERATIONS,
    ),
    Row(
        "top_k",
        ((5, sampling("top_k", 5)), (-1, sampling("top_k", 0)), (BIG, sampling("top_k", 96))),
        (-2, 1.5, "x"),
        kinds=(*GENERATIONS, MESSAGES),
    ),
    Row("min_p", ((0.1, sampling("min_p", 0.1)),), (-0.1, 1.1, "x")),
    Row("presence_penalty", ((-2, sampling("presence_penalty", -2.0)),), (-2.1, 2.1, "x")),
    Row("frequency_penalty", ((2, sampling("frequency_penalty", 2.0)),), (-2.1, 2.1, "x")),
    Row("repetition_penalty", ((1.2, sampling("repetition_penalty", 1.2)),), (0, -1, 11, "x")),
    Row(
        "logit_bias",
        (({"3": -5, "1": 2}, sampling("logit_bias", ((1, 2.0), (3, -5.0)))),),
        (
            *({token: 1} for token in ("x", "-1", "96", "²", "1" * 30)),
            *({"1": 101}, {"1": "x"}, [1], "x", {str(i): 1 for i in range(301)}),
        ),
    ),
    Row(
        "seed",
        ((5, lambda plan: plan.jobs[0].seed == 5), (-1, lambda plan: plan.jobs[0].seed == 2**64 - 1)),
        (BIG, -BIG, 1.5, "x"),
        kinds=ALL_GENERATIONS,
    ),
    Row(
        "stop",
        (("a", show("stops", ("a",))), (["a", "b", "a"], show("stops", ("a", "b"))), ([], show("stops", ()))),
        (["a" * 257], [str(n) for n in range(17)], [1], 5, {}),
    ),
    Row("stop_token_ids", (([3], sampling("stop_token_ids", (95, 3))),), ([96], [-1], list(range(70)), ["a"], 3)),
    Row("ignore_eos", ((True, sampling("stop_token_ids", ())), (False, sampling("stop_token_ids", (95,)))), ("x", 1)),
    Row("min_tokens", ((4, sampling("min_tokens", 4)),), (9, -1, "x", 1.5), (("max_tokens", 8),)),
    Row("return_token_ids", ((True, show("return_token_ids", True)),), ("x", 1)),
    Row("include_stop_str_in_output", ((True, show("keeps_stop", True)), (None, show("keeps_stop", False))), ("x", 1)),
    Row("skip_special_tokens", ((False, show("shows_special", True)), (None, show("shows_special", False))), ("x", 0)),
    Row("return_tokens_as_token_ids", ((True, show("names_tokens_by_id", True)),), ("x", 1)),
    Row("allowed_token_ids", (([3, 1, 3], sampling("allowed_token_ids", (1, 3))),), ([], [96], [-1], "x", ["a"], 3)),
    Row("allowed_token_ids", (([95, 3], always),), ([95],), (("min_tokens", 1), ("max_tokens", 8))),
    Row("allowed_token_ids", (([72, 73], always),), ([72],), (("bad_words", ["h"]),)),
    Row("allowed_token_ids", ((None, always),), ([72],), (("guided_regex", "h+"),)),
    Row(
        "bad_words",
        ((["hi", " hi"], sampling("bad_words", ((72, 73), (0, 72, 73)))), ([], sampling("bad_words", ()))),
        ("x", [""], ["x", " "], [1], ["é"], ["x" * 32], [f"x{i}" for i in range(65)]),
    ),
    Row(
        "cache_salt",
        (("a", lambda plan: 0 < plan.cache_salt < 2**64), (None, lambda plan: plan.cache_salt == 0)),
        ("", 1, "x" * 513),
        kinds=ALL_GENERATIONS,
    ),
    *CACHE_ROWS,
    Row("request_id", harmless("mine", None), (1, "x" * 513), kinds=ALL_GENERATIONS),
    Row("certificate", ((True, lambda plan: plan.is_certified), (None, lambda plan: not plan.is_certified)), ("x", 1)),
    Row(
        "priority",
        ((-3, lambda plan: plan.rank == -3), (None, lambda plan: plan.rank == 0)),
        ("high", 1.5, True, 1 << 31, -(1 << 31) - 1),
        kinds=ALL_GENERATIONS,
    ),
    *(Row(name, (), (7, "x", {"a": 1})) for name in sorted(REFUSED_GENERATION.keys() - {"length_penalty"})),
    Row("prompt_logprobs", ((3, sampling("prompt_logprobs", 3)), (0, show("prompt_logprobs", 0))), (-1, 21, "x", True)),
    Row("prompt_logprobs", (), (3,), (("stream", True),)),
    Row("length_penalty", harmless(1, 1.0, None), (2, 0.5)),
    Row(
        "response_format",
        (
            (None, sampling("grammar", "")),
            ({"type": "text"}, sampling("grammar", "")),
            ({"type": "json_object"}, grammar_with('"object"')),
            ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}, follows_schema),
        ),
        ("json", {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "x"}}),
    ),
    Row("response_format", (), ({"type": "json_object"},), (("ignore_eos", True),), param="ignore_eos"),
    Row("response_format", (), ({"type": "json_object"},), (("structured_outputs", {"regex": "a"}),)),
    Row(
        "structured_outputs",
        (
            ({"json": SCHEMA}, follows_schema),
            ({"json": json.dumps(SCHEMA)}, follows_schema),
            ({"json_object": True}, grammar_with('"object"')),
            ({"regex": "[0-9]+"}, grammar_with("[0-9]+")),
            ({"choice": ["yes", "no"]}, grammar_with("yes")),
            ({"grammar": 'start: "x"'}, grammar_with("start:")),
            ({}, sampling("grammar", "")),
        ),
        ("x", {"json": 3}, {"regex": "("}, {"choice": []}, {"choice": [""]}, {"grammar": "start: ["}, TWO),
    ),
    *(
        Row(name, ((SCHEMA, follows_schema), (json.dumps(SCHEMA), follows_schema)), (3, "x", *BAD_SCHEMAS))
        for name in ("guided_json", "json_schema")
    ),
    *(
        Row(name, (("[a-f]{3}", grammar_with("[a-f]{3}")),), ("", "(", "a(?=b)", 3, "x" * (MAX_GRAMMAR_CHARS + 1)))
        for name in ("guided_regex", "regex")
    ),
    Row("guided_choice", ((["a b", "é"], grammar_with("a b")),), ([], [""], "x", [1], ["x"] * 1025)),
    *(
        Row(name, (('root ::= "x" | "y"', grammar_with("start")), ('start: "x"', always)), ("", "start: (", "x y", 3))
        for name in ("guided_grammar", "ebnf")
    ),
]
