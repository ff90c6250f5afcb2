"""Numbers in schemas are followed exactly, or refused by name. The oracle is arithmetic."""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from router.api.answer.generation_plan import AnswerForm
from router.api.ask.answer_form import AnswerGrammar, grammar_of_answer
from router.api.fields.fields import GenerationFields
from router.text import grammars
from router.text.chat.interface import VocabFacts
from router.text.schema_numbers import LAST_EXACT, MOST_INT64, MOST_MULTIPLE, MOST_UNREAD
from router.tools.calls.formats import BY_NAME
from router.tools.schemas.choice import ChoiceMode, ToolChoice
from router.tools.schemas.declared import Tool
from shared.core.errors import InvalidRequest
from tests.support.oracles.grammar_oracle import COMPILER, VOCABULARY, mask_bits

FACTS = VocabFacts(256, (0,), frozenset({0}), 100)
RULES: dict[str, Callable[[int, int], bool]] = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
    "const": operator.eq,
    "enum": operator.contains,
}
POWERS = (0, 10, *(10**k for k in (9, *range(15, 21))), *(1 << k for k in (31, 32, 52, 53, 54, 60, 62, 63, 64)))
PLACES = sorted({sign * (power + step) for power in POWERS for step in (-1, 0, 1) for sign in (1, -1)})
KILLERS = (-(1 << 63), 1 - (1 << 63), -(1 << 64), -(10**30))  # as a constant each of them ended the process


def fits(schema: dict[str, Any], number: int) -> bool:
    return all(
        number in value if name == "enum" else rule(number, value)
        for name, rule in RULES.items()
        if (value := schema.get(name)) is not None
    )


def grammar_of(schema: dict[str, Any]) -> str:
    return grammars.of_schema({"type": "object", "properties": {"a": schema}, "required": ["a"]})


def takes(matcher: LLMatcher, number: int) -> bool:
    own = matcher.deep_copy()
    ids = [VOCABULARY.tokens.index(char.encode()) for char in f'{{"a":{number}}}']
    return bool(own.try_consume_tokens(ids) == len(ids) and own.is_accepting())


def probes(*bounds: int) -> set[int]:
    near = {bound + step for bound in bounds for step in (*range(-3, 4), -1024, 1024, -2049, 2049)}
    return near | {-bound for bound in bounds} | {bound * 10 for bound in bounds} | {0, 1, -1, MOST_INT64, 1 << 64}


def is_exact(schema: dict[str, Any], *bounds: int) -> bool:
    """Whether there is a grammar. Fail if it takes or refuses a wrong number, or if a refusal names nothing."""
    try:
        matcher = COMPILER.compile(grammar_of(schema))
    except InvalidRequest as error:
        names = [f"properties.a.{name}: no grammar can follow " for name in schema]
        assert any(name in error.message for name in names) or "Failed to generate regex" in error.message
        return False
    wrong = [number for number in probes(*bounds) if takes(matcher, number) is not fits(schema, number)]
    assert not wrong, (schema, wrong)
    return True


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("name", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
def test_a_bound_is_exact_or_refused_by_name(name: str, kind: str) -> None:
    exact = {bound for bound in PLACES if is_exact({"type": kind, name: bound}, bound)}
    assert {bound for bound in PLACES if abs(bound) < LAST_EXACT} <= exact
    if not name.startswith("exclusive"):
        assert {LAST_EXACT, -LAST_EXACT, 10**17 * (-1 if name == "maximum" else 1)} <= exact
    assert not exact & {LAST_EXACT + 1, -LAST_EXACT - 1, 1 << 63, -(1 << 63)}


def test_a_constant_is_exact_or_refused_by_name() -> None:
    for number in PLACES:
        is_const, is_enum = is_exact({"const": number}, number), is_exact({"enum": [7, number]}, number)
        assert is_const is is_enum and (is_const or abs(number) > LAST_EXACT)
    assert is_exact({"const": 10**17}, 10**17) and not is_exact({"const": 123456789012345678}, 123456789012345678)


def test_two_bounds_are_exact_or_refused() -> None:
    """Numbers that are drawn along the masks stay between the bounds."""
    rng, num_exact = random.Random(7), 0
    for _ in range(200):
        low = rng.choice(PLACES)
        high = low + rng.choice((0, 1, 2, 9, 1000, 10**6))
        schema = {"type": "integer", "minimum": low, "maximum": high}
        if is_exact(schema, low, high):
            num_exact += 1
            assert low <= drawn(grammar_of(schema), rng) <= high
    assert num_exact > 40


def drawn(grammar: str, rng: random.Random) -> int:
    matcher, text = COMPILER.compile(grammar), ""
    while not matcher.is_accepting():
        token = rng.choice([i for i in np.flatnonzero(mask_bits(matcher)).tolist() if i not in VOCABULARY.eos_ids])
        assert matcher.consume_token(token)
        text += VOCABULARY.tokens[token].decode()
    number = json.loads(text)["a"]
    assert isinstance(number, int)
    return number


def test_positive_64_bit_integers_have_their_range() -> None:
    matcher = COMPILER.compile(grammar_of({"type": "integer", "minimum": 0, "maximum": MOST_INT64}))
    assert all(takes(matcher, number) for number in (0, LAST_EXACT + 1, MOST_INT64))
    assert not takes(matcher, -1) and not takes(matcher, MOST_INT64 + 1)


@pytest.mark.parametrize("number", KILLERS)
def test_no_number_ends_the_process(number: int) -> None:
    schemas: list[dict[str, Any]] = [
        {"const": number},
        {"enum": [number]},
        {"const": [{"b": number}]},
        {"type": "integer", "minimum": number, "maximum": number},
        {"allOf": [{"minimum": number}, {"maximum": number}], "type": "integer"},
        {"type": "object", "properties": {"const": {"const": number}}},
        {"$ref": "#/$defs/x", "$defs": {"x": {"const": number}}},
        {"const": float(number)},
    ]
    for schema in schemas:
        with pytest.raises(InvalidRequest, match="no grammar can follow"):
            grammar_of(schema)
    text = json.dumps({"const": number})
    for lark in (
        f"start: %json {text}",
        f"start: x\nx: %json\n {text}",
        f"start: %lark {{ start: %json{text} }}",
        f'start: "%json {{" %json {text}',
        f"start: %json {text}".replace("const", "con\\u0073t"),
    ):
        with pytest.raises(InvalidRequest, match="no grammar can follow"):
            grammars.of_grammar(lark)


def test_a_number_that_no_reader_takes_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="can't be read"):
        grammars.of_grammar('start: %json {"const": ' + "1" * 5000 + "}")


def test_a_text_that_only_shows_a_schema_is_left_alone() -> None:
    assert grammars.of_grammar('start: "%json {" "x"')
    assert grammars.of_grammar('start: "x" // %json {')
    assert grammars.of_grammar('start: "x" // %json {}%json {')
    with pytest.raises(InvalidRequest, match="look like schemas"):
        grammars.of_grammar('start: "x" //' + "%json {" * MOST_UNREAD)


def test_a_schema_behind_one_that_is_shown_is_found() -> None:
    with pytest.raises(InvalidRequest, match="const: no grammar can follow"):
        grammars.of_grammar('start: "%json {" %json {"const": -9223372036854775808}')


def test_multiples_are_bounded() -> None:
    """A multiple needs as many states as it is large, and numbers that apply together multiply."""
    for schema, is_taken in (
        ({"multipleOf": MOST_MULTIPLE}, True),
        ({"multipleOf": 0.01}, True),
        ({"multipleOf": MOST_MULTIPLE + 1}, False),
        ({"multipleOf": (1 << 32) - 1}, False),  # wrong beyond a 32-bit product
        ({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}, False),
        ({"anyOf": [{"multipleOf": 0.01}, {"multipleOf": 1000}]}, True),
        ({"anyOf": [{"multipleOf": 0.001}, {"multipleOf": 1000}]}, False),
    ):
        if is_taken:
            assert grammar_of({"type": "number", **schema})
        else:
            with pytest.raises(InvalidRequest, match="multipleOf: no grammar can follow"):
                grammar_of({"type": "integer", **schema})


def test_multiples_in_a_client_s_grammar_are_bounded() -> None:
    with pytest.raises(InvalidRequest, match="multipleOf: no grammar can follow"):
        grammars.of_grammar(f'start: %json {{"type": "integer", "multipleOf": {MOST_MULTIPLE + 1}}}')


def called(tool: Tool, name: str = "hermes") -> AnswerGrammar:
    choice = ToolChoice(ChoiceMode.REQUIRED, (tool,))
    form = AnswerForm(row=BY_NAME[name], tools=choice.tools)
    return grammar_of_answer(GenerationFields(), FACTS, form, choice, allows_parallel=True)


def test_a_tool_loses_the_numbers_by_name() -> None:
    properties = {
        "id": {"type": "integer", "enum": [123456789012345678]},
        "n": {"type": "integer", "minimum": 1, "maximum": LAST_EXACT + 1},
        "deep": {"type": "array", "items": {"type": "object", "properties": {"x": {"const": -(1 << 63)}}}},
        "m": {"type": "integer", "minimum": 1, "maximum": 5},
    }
    tool = Tool("f", None, {"type": "object", "properties": properties, "required": ["id", "n", "m"]})
    made = called(tool)
    assert set(made.loosened) == {
        "f.properties.id.enum",
        "f.properties.n.maximum",
        "f.properties.deep.items.properties.x.const",
    }
    for arguments, is_taken in (
        ('{"id": 123456789012345678, "n": 7, "m": 5}', True),
        ('{"id": 123456789012345678, "n": 0, "m": 5}', False),
        ('{"id": 123456789012345678, "n": 7, "m": 6}', False),
        ('{"id": "x", "n": 7, "m": 5}', False),
    ):
        text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
        matcher = COMPILER.compile(made.text)
        ids = [VOCABULARY.tokens.index(char.encode()) for char in text]
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is is_taken, arguments
