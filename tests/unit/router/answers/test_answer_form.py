"""Thoughts, calls and grammars of a request, by the model's template: what nodes are asked, how answers are read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.api.answer.choice_text import ChoiceText, Delta
from router.api.answer.generation_plan import Contexts, GenerationPlan
from router.api.ask.resolve import Resolver
from router.api.ask.structured import MAKERS
from router.api.fields.parse import BodyParser
from router.api.openai.chat import CHAT, Chat, ChatShape
from router.http.ignored import LOOSENED
from router.text.chat.chat_template import JinjaTemplate
from router.text.chat.interface import TextModel
from router.text.hashlm import hash_text_model
from router.tools.calls.deltas import CallArguments, WholeAnswer, whole_answer
from router.tools.calls.formats import BY_NAME
from shared.config.settings.settings import LimitsConfig
from shared.core.errors import InvalidRequest
from shared.core.states import FinishReason
from tests.support.oracles.grammar_oracle import COMPILER, VOCABULARY

TEMPLATES = Path(__file__).parents[3] / "data" / "templates"
OPENS = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}


def model_with(source: str) -> TextModel:
    return replace(hash_text_model(), template=JinjaTemplate({"default": source}, {}, {}))


MODELS = {
    "qwen3": model_with((TEMPLATES / "Qwen-Qwen3-0.6B.jinja").read_text().replace("\\n", " ")),
    "opens": model_with(OPENS),
    "plain": hash_text_model(),
}


def plan_of(name: str, **fields: Any) -> GenerationPlan:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    resolver = Resolver("m", MODELS[name], LimitsConfig(), calls=BY_NAME["hermes"])
    return Chat().plan(BodyParser(CHAT).parse(json.dumps(body).encode()).body, resolver, Contexts(4096, 4096))


def read(plan: GenerationPlan, text: str, reason: FinishReason = FinishReason.STOP) -> tuple[Delta, ChoiceText]:
    choice, total = ChoiceText(hash_text_model().tokenizer, plan.sampling, plan.show), Delta()
    for char in text:
        total.add(choice.feed([ord(char) - 32], []))
    if choice.finish_reason is None:
        total.add(choice.finish(reason))
    return total, choice


def follows(grammar: str, text: str) -> bool:
    """Whether a text is a whole answer under a grammar."""
    matcher = COMPILER.compile(grammar)
    return matcher.consume_tokens([VOCABULARY.tokens.index(c.encode()) for c in text]) and matcher.is_accepting()


def test_the_prompt_may_have_opened_the_thought() -> None:
    delta, choice = read(plan_of("opens"), "let me see</think>Oslo")
    assert whole_answer(delta.parts) == WholeAnswer("Oslo", "let me see", ()) and choice.num_reasoning >= 10


def test_a_model_that_does_not_think_shows_tags_as_they_are() -> None:
    for plan in (plan_of("plain"), plan_of("qwen3", enable_thinking=False)):
        delta, choice = read(plan, "<think>x</think>y")
        assert (delta.text, delta.parts, choice.num_reasoning) == ("<think>x</think>y", [], 0)


def test_a_forced_call_ignores_the_response_format() -> None:
    """instructor and others send both."""
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        grammar = plan_of("plain", tools=[TOOL], tool_choice=choice, **JSON).sampling.grammar
        assert follows(grammar, '<tool_call> {"name": "f", "arguments": {}} </tool_call>')
        assert not follows(grammar, '{"a": 1}')
        with pytest.raises(InvalidRequest, match="another grammar"):
            plan_of("plain", tools=[TOOL], tool_choice=choice, guided_regex="a")


def test_an_answer_is_a_call_or_follows_the_schema() -> None:
    """Agents with tools and a typed answer send both; text of another kind is neither."""
    plan = plan_of("qwen3", tools=[TOOL], tool_choice="auto", **JSON)
    call = '<tool_call> {"name": "f", "arguments": {}} </tool_call>'
    for said in (call, call + call, '{"a": 1}'):
        assert follows(plan.sampling.grammar, said), said
    for said in ("so: " + call, "text", '{"a": 1}' + call, '{"a": "x"}', call + '{"a": 1}', ""):
        assert not follows(plan.sampling.grammar, said), said
    assert follows(plan.sampling.grammar, '<think>hm</think> {"a": 1}')
    assert follows(plan.sampling.grammar, "<think>hm</think>" + call)
    delta, _ = read(plan, call)
    assert [one.name for one in whole_answer(delta.parts).calls] == ["f"] and delta.has_calls
    delta, _ = read(plan, '{"a": 1}')
    assert whole_answer(delta.parts).content == '{"a": 1}' and not delta.has_calls


YES = {  # ways to ask for the answer "yes"
    "guided_json": {"const": "yes"},
    "guided_regex": "yes",
    "guided_choice": ["yes", "no"],
    "guided_grammar": 'start: "yes"',
    "json_schema": '{"const": "yes"}',
    "regex": "yes",
    "ebnf": 'root ::= "y" "es"',
}
WAYS_TO_ASK = [
    *({name: asked} for name, asked in YES.items()),
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"structured_outputs": {"grammar": 'start: "yes"'}},
]


@pytest.mark.parametrize("fields", WAYS_TO_ASK, ids=str)
def test_each_kind_of_grammar_follows_thoughts_and_calls(fields: dict[str, Any]) -> None:
    yes = '"yes"' if "json" in str(fields) else "yes"
    call = '<tool_call> {"name": "f", "arguments": {}} </tool_call>'
    alone = plan_of("plain", **fields).sampling.grammar
    assert follows(alone, yes) and alone.startswith("{")  # JSON, which another grammar can hold
    thinks = plan_of("qwen3", **fields).sampling.grammar
    assert follows(thinks, f"<think>hm</think> {yes}") and follows(thinks, yes) and not follows(thinks, "maybe")
    for template in ("plain", "qwen3"):
        calls = plan_of(template, tools=[TOOL], **fields).sampling.grammar
        assert follows(calls, call) and follows(calls, yes) and not follows(calls, "maybe")


def test_the_table_has_each_field_of_a_grammar() -> None:
    assert YES.keys() == MAKERS.keys()


def test_a_chunk_has_each_call_once() -> None:
    """A client may merge only entries of different chunks."""
    plan = plan_of("plain", tools=[TOOL])
    say = '<tool_call> {"name": "f", "arguments": {"a": 1}} </tool_call>'
    delta, _ = read(plan, say + say)
    shape = ChatShape(hash_text_model().tokenizer, plan.show)
    chunk = json.loads(msgspec.json.encode(shape.chunk(0, delta)))
    ids = [plan.show.form.call_id(call, "f", choice=0) for call in (0, 1)]
    assert chunk["delta"]["tool_calls"] == [
        {"index": i, "id": ids[i], "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        for i in (0, 1)
    ]
    (later,) = shape.chunk(0, Delta(parts=[CallArguments(1, '{"a"'), CallArguments(1, ": 1}")])).delta.tool_calls
    assert json.loads(msgspec.json.encode(later)) == {"index": 1, "function": {"arguments": '{"a": 1}'}}


def test_a_schema_that_goes_too_deep_is_refused() -> None:
    deep: dict[str, Any] = {"type": "object", "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(600)}}
    function = {"name": "f", "parameters": deep}
    with pytest.raises(InvalidRequest, match="f is strict, but no grammar can enforce its schema"):
        plan_of("plain", tools=[{"type": "function", "function": function | {"strict": True}}])
    assert plan_of("plain", tools=[{"type": "function", "function": function}]).headers == {LOOSENED: b"f"}
