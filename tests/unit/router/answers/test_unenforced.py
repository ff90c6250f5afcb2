"""What becomes of tools and JSON where no node follows grammars: nothing is refused that can be answered."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from router.api.answer.choice_text import Delta
from router.api.answer.generation_plan import Contexts, GenerationPlan
from router.api.anthropic.messages import Messages
from router.api.ask.generation_api import GenerationApi
from router.api.ask.resolve import Resolver
from router.api.ask.structured import MAKERS
from router.api.ask.unenforced import free_header
from router.api.fields.parse import BodyParser
from router.api.ollama.ollama import OllamaChat, OllamaGenerate
from router.api.openai.chat import Chat
from router.api.openai.completions import Completions
from router.api.openai.responses import Responses
from router.fleet.registry import Needs, Registry
from router.http.ignored import UNENFORCED
from router.policy.interface import Wanted
from router.policy.least_load import LeastLoad
from router.policy.placement import Placer
from router.text.hashlm import hash_text_model
from router.tools.calls.deltas import ContentText, ReasoningText
from router.tools.calls.formats import BY_NAME
from shared.config.settings.settings import LimitsConfig
from shared.core.errors import InvalidRequest, NoNodes
from shared.wire.fitting import NO_GRAMMAR, no_grammar_because
from shared.wire.messages import Fingerprint
from tests.support.worlds.router_rig import FINGERPRINT, hello

WHY = "nodes with --pp have none"
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
CHATS_TOOL = {"type": "function", "function": TOOL}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON_OBJECT = {"response_format": {"type": "json_object"}}
JSON_SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
STRICT = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}}
GIVEN = {name: SCHEMA for name in MAKERS} | {
    "guided_choice": ["a"],
    "guided_regex": "a",
    "guided_grammar": 'start: "a"',
    "regex": "a",
    "ebnf": 'root ::= "a"',
    "structured_outputs": {"regex": "a"},
}
APIS: dict[str, tuple[GenerationApi[Any], dict[str, Any]]] = {
    "chat": (Chat(), {"messages": [{"role": "user", "content": "hi"}]}),
    "completions": (Completions(), {"prompt": "hi"}),
    "messages": (Messages(), {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}),
    "responses": (Responses(), {"input": "hi"}),
    "ollama": (OllamaChat(), {"messages": [{"role": "user", "content": "hi"}]}),
    "generate": (OllamaGenerate(), {"prompt": "hi"}),
    "raw": (OllamaGenerate(), {"prompt": "hi", "raw": True}),
}


def plan_of(api: str, why: str = WHY, **fields: Any) -> GenerationPlan:
    made, body = APIS[api]
    resolver = Resolver("m", hash_text_model(), LimitsConfig(), calls=BY_NAME["hermes"], no_grammar=why)
    parsed = BodyParser(made.table).parse(json.dumps(body | fields).encode()).body
    return made.plan(parsed, resolver, Contexts(4096, 4096))


@pytest.mark.parametrize(
    ("api", "fields", "names"),
    [
        ("chat", JSON_OBJECT, ("json",)),
        ("chat", JSON_SCHEMA, ("json",)),
        ("chat", {"tools": [CHATS_TOOL]}, ("tools",)),
        ("chat", {"tools": [CHATS_TOOL], "tool_choice": "auto", **JSON_SCHEMA}, ("tools", "json")),
        ("chat", {"tools": [CHATS_TOOL], "tool_choice": "none"}, ()),
        ("chat", {"tools": [CHATS_TOOL], "tool_choice": "none", **JSON_OBJECT}, ("json",)),
        ("chat", {"response_format": {"type": "text"}}, ()),
        ("chat", {}, ()),
        ("completions", JSON_SCHEMA, ("json",)),
        ("completions", {}, ()),
        ("messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, ("json",)),
        ("messages", {"tools": [{"name": "f", "input_schema": TOOL["parameters"]}]}, ("tools",)),
        ("responses", {"text": {"format": {"type": "json_object"}}}, ("json",)),
        ("responses", {"tools": [{"type": "function", **TOOL}]}, ("tools",)),
        ("ollama", {"format": "json"}, ("json",)),
        ("ollama", {"format": SCHEMA}, ("json",)),
        ("ollama", {"tools": [CHATS_TOOL]}, ("tools",)),
        ("generate", {"format": "json"}, ("json",)),
        ("raw", {"format": "json"}, ("json",)),
    ],
)
def test_what_no_node_enforces_is_answered_and_named(api: str, fields: dict[str, Any], names: tuple[str, ...]) -> None:
    plan = plan_of(api, **fields)
    assert (plan.sampling.grammar, plan.unenforced) == ("", names)
    assert plan.headers == ({UNENFORCED: ", ".join(names).encode()} if names else {})
    assert [tool.name for tool in plan.show.form.tools] == (["f"] if "tools" in names else [])
    bound = plan_of(api, "", **fields)
    assert bool(bound.sampling.grammar) == bool(names) and not bound.unenforced and UNENFORCED not in bound.headers


@pytest.mark.parametrize(
    ("api", "fields", "param"),
    [
        ("chat", {"tools": [CHATS_TOOL], "tool_choice": "required"}, "tool_choice"),
        (
            "chat",
            {"tools": [CHATS_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
        ),
        ("chat", {"tools": [{"type": "function", "function": TOOL | {"strict": True}}]}, "tools"),
        ("chat", STRICT, "response_format"),
        ("completions", STRICT, "response_format"),
        *(("chat", {name: value}, name) for name, value in GIVEN.items()),
        ("completions", {"guided_choice": ["a"]}, "guided_choice"),
        ("responses", {"text": {"format": {"type": "json_schema", "schema": SCHEMA, "strict": True}}}, "text.format"),
        ("responses", {"tools": [{"type": "function", **TOOL, "strict": True}]}, "tools"),
        ("responses", {"tools": [{"type": "function", **TOOL}], "tool_choice": "required"}, "tool_choice"),
        ("messages", {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)
def test_what_a_client_relies_on_is_refused_with_the_reason(api: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan_of(api, **fields)
    message = caught.value.message
    assert caught.value.param == param and message.startswith(f"{param}: ") and f"grammars: {WHY}; " in message
    assert plan_of(api, "", **fields).sampling.grammar


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"a": 1}', True),
        ('\n {"a":\n\n 1} ', True),
        ("[1]", True),
        ("{}{}", False),
        ('{"a": 1', False),
        ("", False),
        ("Sure: {}", False),
        ("NaN", False),
        ('{"a": -Infinity}', False),
        ("[" * 100_000, False),
    ],
)
def test_a_whole_answer_s_header_says_whether_it_is_json(text: str, valid: bool) -> None:
    said = b"json;valid=yes" if valid else b"json;valid=no"

    def header(names: tuple[str, ...], *answers: Delta) -> bytes:
        return free_header(names, answers)[UNENFORCED]

    assert header(("json",), Delta(text=text)) == said
    parts = Delta(parts=[ReasoningText("let me {see"), ContentText(text[:1]), ContentText(text[1:])])
    assert header(("tools", "json"), parts) == b"tools, " + said
    assert header(("json",), Delta(text="{}"), Delta(text=text)) == said
    assert header(("tools", "json"), Delta(parts=[ContentText(text)], has_calls=True)) == b"tools, json;valid=yes"
    assert header(("tools",), Delta(text=text)) == b"tools"


# ---- which nodes


def without_grammars(why: str = WHY) -> Fingerprint:
    return msgspec.structs.replace(FINGERPRINT, grammar=no_grammar_because(why))


def test_the_registry_says_why_no_node_follows_grammars() -> None:
    registry = Registry(5.0)
    assert registry.why_no_grammar() == ""
    registry.hello("a@1", hello("decode", "a", fingerprint=without_grammars("one reason")), 0.0)
    registry.hello("b@1", hello("prefill", "b", fingerprint=without_grammars("another one")), 0.0)
    assert registry.why_no_grammar() == "one reason"
    registry.hello("c@1", hello("decode", "c"), 0.0)
    assert registry.why_no_grammar() == ""
    assert {node.node_id for node in registry.newly_silent(9.0)} == {"a", "b", "c"}
    assert registry.why_no_grammar() == ""


def test_an_older_node_says_no_reason() -> None:
    registry = Registry(5.0)
    older = msgspec.structs.replace(FINGERPRINT, grammar=NO_GRAMMAR)
    registry.hello("a@1", hello("decode", "a", fingerprint=older), 0.0)
    assert registry.why_no_grammar() == "its version does not say why"


def test_requests_with_a_grammar_go_to_nodes_that_follow_it() -> None:
    """The prefill nodes have stages: the decode node computes such prompts itself."""
    registry = Registry(5.0)
    registry.hello("p@1", hello("prefill", "p", fingerprint=without_grammars()), 0.0)
    registry.hello("d@1", hello("decode", "d"), 0.0)
    placer, bound = Placer(registry, LeastLoad(), 0), Needs(has_grammar=True)
    placed = placer.place(Wanted(50, 0.0), needs=bound)
    assert placed.prefill is None and placed.decode is registry.named("d")
    free = placer.place(Wanted(50, 0.0))
    assert free.prefill is registry.named("p") and free.decode is registry.named("d")
    registry.remove(registry.named("d"))  # type: ignore[arg-type]  # it is there
    with pytest.raises(NoNodes, match="follows grammars"):
        placer.place(Wanted(50, 0.0), needs=bound)
