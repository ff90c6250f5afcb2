"""A tool whose schema no grammar can follow loses the least that helps; a strict one is refused by name and path."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import pytest

from router.api.answer.generation_plan import AnswerForm
from router.api.ask.answer_form import AnswerGrammar, grammar_of_answer
from router.api.fields.fields import GenerationFields
from router.text.chat.interface import VocabFacts
from router.tools.calls.formats import BY_NAME
from router.tools.schemas import loosened as module
from router.tools.schemas.choice import ChoiceMode, ToolChoice
from router.tools.schemas.declared import Tool
from shared.core.errors import InvalidRequest
from tests.support.oracles.grammar_oracle import COMPILER, VOCABULARY

FACTS = VocabFacts(256, (0,), frozenset({0}), 100)
EMAIL = r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z.]+$"  # as zod writes it
BAD = {"type": "string", "pattern": EMAIL}
DOMAIN = r"^(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z0-9][a-z0-9-]{0,61}[a-z0-9]$"  # too much with lengths
GOOD = {"type": "string", "pattern": "^[a-f]{2}$"}


def grammar(tools: Sequence[Tool], name: str = "hermes") -> AnswerGrammar:
    choice = ToolChoice(ChoiceMode.REQUIRED, tuple(tools))
    form = AnswerForm(row=BY_NAME[name], tools=choice.tools)
    return grammar_of_answer(GenerationFields(), FACTS, form, choice, allows_parallel=True)


def tool(name: str, strict: bool = False, **properties: Any) -> Tool:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return Tool(name, None, schema, strict)


def calls(made: AnswerGrammar, name: str, **arguments: object) -> bool:
    text = f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'
    matcher = COMPILER.compile(made.text)
    return matcher.consume_tokens([VOCABULARY.tokens.index(c.encode()) for c in text]) and matcher.is_accepting()


def test_one_bad_pattern_blocks_no_other_tool_and_no_other_part() -> None:
    made = grammar([tool("code", a=GOOD), tool("mail", to=BAD, kind={"enum": ["x", "y"]}, hex=GOOD)])
    assert made.loosened == ("mail.properties.to.pattern",)
    assert calls(made, "mail", to="anything", kind="x", hex="ab")
    assert not calls(made, "mail", to=1, kind="x", hex="ab"), "the type still holds"
    assert not calls(made, "mail", to="a", kind="z", hex="ab")
    assert not calls(made, "mail", to="a", kind="x", hex="zz"), "and other patterns"
    assert calls(made, "code", a="ab") and not calls(made, "code", a="xx"), "and those of other tools"


@pytest.mark.parametrize(
    "schema, dropped",
    [
        ({"pattern": "(a)\\1"}, "pattern"),
        ({"type": "string", "pattern": 5}, "pattern"),
        ({"type": "any"}, "type"),
        ({"type": None, "maxLength": 3}, "type"),
        ({"type": "number", "minimum": "0", "maximum": 3}, "minimum"),
        ({"enum": None}, "enum"),
        ({"$ref": "#/$defs/none"}, "$ref"),
        ({"$schema": "https://example.com/draft"}, "$schema"),
        ({"multipleOf": 0}, "multipleOf"),
        ({"type": "object", "properties": None}, "properties"),
        ({"type": "object", "properties": {"b": 1}}, "properties.b"),
        ({"anyOf": [{"type": "string", "pattern": EMAIL}, {"type": "null"}]}, "anyOf[0].pattern"),
        ({"type": "string", "minLength": 1, "maxLength": 253, "pattern": DOMAIN}, "pattern"),
        ({"type": "array", "items": {"type": "object", "properties": {"b": BAD}}}, "items.properties.b.pattern"),
        ({"type": "object", "patternProperties": {EMAIL: {"type": "string"}}}, f"patternProperties.{EMAIL}"),
        ({"type": "object", "additionalProperties": BAD}, "additionalProperties.pattern"),
        ({"oneOf": [{"type": "string", "const": "a"}, {"type": "whatever"}]}, "oneOf[1].type"),
    ],
    ids=str,
)
def test_the_least_part_is_dropped(schema: dict[str, Any], dropped: str) -> None:
    given = tool("f", a=schema, b=GOOD)
    before = copy.deepcopy(given)
    made = grammar([given])
    assert made.loosened == (f"f.properties.a.{dropped}",)
    assert given == before, "the template shows the client's schema"
    with pytest.raises(InvalidRequest) as caught:
        grammar([tool("ok", a=GOOD), tool("f", strict=True, a=schema, b=GOOD)])
    assert (
        caught.value.message == (f"tools: f is strict, but no grammar can enforce its properties.a.{dropped}")
        and caught.value.param == "tools"
    )


def test_a_dropped_key_pattern_forbids_no_key() -> None:
    schema = {"type": "object", "patternProperties": {EMAIL: {"type": "string"}}, "additionalProperties": False}
    assert calls(grammar([tool("f", a=schema)]), "f", a={"me@home": "x"})


def test_definitions_are_mended_where_they_stand() -> None:
    schema = {
        "type": "object",
        "$defs": {"one": {"type": "object", "properties": {"to": BAD, "next": {"$ref": "#/$defs/one"}}}},
        "properties": {"x": {"$ref": "#/$defs/one"}, "y": {"$ref": "#/properties/x"}},
    }
    made = grammar([Tool("f", None, schema)])
    assert made.loosened == ("f.$defs.one.properties.to.pattern",)
    assert calls(made, "f", x={"to": "a", "next": {"to": "b"}}) and not calls(made, "f", x={"to": 3})


def test_several_parts_of_several_tools() -> None:
    made = grammar([tool("f", **{f"p{i}": BAD for i in range(30)}), tool("g", a={"type": "any"}, b={"enum": 3})])
    assert made.loosened == (
        *(f"f.properties.p{i}.pattern" for i in range(30)),
        "g.properties.a.type",
        "g.properties.b.enum",
    )


def test_a_schema_with_too_many_faults_goes_as_a_whole() -> None:
    made = grammar([tool("f", **{f"p{i}": {"type": f"t{i}"} for i in range(40)}), tool("g", a=GOOD)])
    assert made.loosened == ("f",)
    assert calls(made, "f", whatever=1) and not calls(made, "g", a="zz")


def test_schemas_that_are_together_too_large_lose_the_largest() -> None:
    wide = {f"p{i}": {"type": "string", "maxLength": 100} for i in range(30)}
    made = grammar([tool("small", a=GOOD), *(tool(f"f{i}", **wide) for i in range(200))])
    assert made.loosened and all(name.startswith("f") for name in made.loosened)
    assert not calls(made, "small", a="zz")
    with pytest.raises(InvalidRequest, match="tools: all schemas together are too large"):
        grammar([tool(f"f{i}", strict=True, **wide) for i in range(200)])


def test_a_search_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    costly = {f"p{i}": {"type": "string", "enum": [f"v{j}" for j in range(200)]} for i in range(60)}
    num = 0
    made = module._Search.made

    def counted(self: Any, tools: Sequence[Tool]) -> str | None:
        nonlocal num
        num += 1
        return made(self, tools)

    monkeypatch.setattr(module._Search, "made", counted)
    assert grammar([tool("f", **costly, **{f"x{i}": {"enum": i} for i in range(9)})]).loosened == ("f",)
    assert num < module.MAX_COST / 5


@pytest.mark.parametrize(("name", "key"), [("pythonic", "a-b"), ("qwen3_coder", "a>b")])
def test_a_parameter_that_a_format_can_not_write_blocks_no_tool(name: str, key: str) -> None:
    made = grammar([tool("f", **{key: GOOD}, b={"type": "integer"}), tool("g")], name)
    assert made.loosened == (f"f.properties.{key}",)
    with pytest.raises(InvalidRequest, match="f is strict"):
        grammar([tool("f", strict=True, **{key: GOOD})], name)


def test_a_part_that_failed_for_want_of_others_stays() -> None:
    """Without the constants, the alternatives of a strict tool overlap, which no grammar can follow."""
    kinds = {"oneOf": [{"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in "ab"]}
    for other, path in (({"type": "number", "minimum": "1"}, "minimum"), ({"not": {}}, "not")):
        with pytest.raises(InvalidRequest, match=rf"no grammar can enforce its properties\.y\.{path}$"):
            grammar([tool("f", strict=True, x=kinds, y=other)])
