"""Objects that name properties are closed in grammars, unless others add to them or the operator wants the letter."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.ask.structured import grammar_of
from router.api.fields.fields import GenerationFields, JsonSchemaFormat, ResponseFormat, StructuredOutputs
from router.text.chat.interface import VocabFacts
from router.tools.schemas.closed_objects import prepared
from tests.support.bodies.drawn_schemas import NAMES
from tests.support.oracles.grammar_oracle import COMPILER, VOCABULARY

FACTS = VocabFacts(256, (0,), frozenset({0}), 100)
A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}
SHUT = {"additionalProperties": False}


def takes(schema: dict[str, Any], *values: object, opens_objects: bool = False) -> list[bool]:
    """Return for each value whether a grammar of the schema, as made for requests, lets its JSON through."""
    fields = GenerationFields(guided_json=schema)
    grammar = grammar_of(fields, FACTS, opens_objects=opens_objects)
    return [follows(grammar, json.dumps(value)) for value in values]


def follows(grammar: str, text: str) -> bool:
    matcher = COMPILER.compile(grammar)
    return matcher.consume_tokens([VOCABULARY.tokens.index(c.encode()) for c in text]) and matcher.is_accepting()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", **A},
        {"type": "object", **A, "unevaluatedProperties": False},
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object", **A}}},
        {"anyOf": [{"type": "object", **A}, {"type": "string"}]},
        {"type": "object", "allOf": [A]},
        {"type": "object", **A, "anyOf": [{"required": ["a"]}, {"properties": {"a": {"const": 3}}}]},
    ],
    ids=str,
)
def test_an_object_with_properties_takes_no_others(schema: dict[str, Any]) -> None:
    assert takes(schema, {"a": 3}, {"a": 3, "z": 1}) == [True, False]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", **A, "additionalProperties": True},
        {"type": "object", **A, "additionalProperties": {"type": "integer"}},
        {"type": "object", **A, "required": ["b"]},
    ],
    ids=str,
)
def test_an_object_that_mentions_others_takes_them(schema: dict[str, Any]) -> None:
    assert takes(schema, {"a": 1, "b": 2}) == [True]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "allOf": [A, B]},
        {"type": "object", **A, "allOf": [B]},
        {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": A, "b": B}},
        {"allOf": [{"$ref": "#/$defs/a"}, B], "$defs": {"a": {"allOf": [{"$ref": "#/$defs/c"}]}, "c": A}},
        {"type": "object", **A, "anyOf": [B, {"required": ["a"]}]},
    ],
    ids=str,
)
def test_objects_that_add_to_each_other_stay_open(schema: dict[str, Any]) -> None:
    assert takes(schema, {"a": 1, "b": 2}) == [True]


def test_keys_that_fit_a_pattern_stay_allowed() -> None:
    schema = {"type": "object", **A, "patternProperties": {"^x-": {"type": "integer"}}, "required": ["x-1"]}
    assert takes(schema, {"a": 1, "x-1": 2}, {"a": 1, "x-1": 2, "b": 3}) == [True, False]


def test_the_letter_can_be_had() -> None:
    for schema in ({"type": "object", **A}, {"type": "object", "properties": {"x": {"type": "object", **A}}}):
        assert prepared(schema, opens_objects=True) == schema
    assert takes({"type": "object", **A}, {"a": 1, "z": 2}, opens_objects=True) == [True]


def test_every_way_to_ask_for_a_schema_closes_objects() -> None:
    schema = {"type": "object", **A}
    for fields in (
        GenerationFields(guided_json=schema),
        GenerationFields(json_schema=json.dumps(schema)),
        GenerationFields(
            response_format=ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=schema))
        ),
        GenerationFields(structured_outputs=StructuredOutputs(json=schema)),
    ):
        assert not follows(grammar_of(fields, FACTS), '{"a": 1, "z": 2}')
        assert follows(grammar_of(fields, FACTS, opens_objects=True), '{"a": 1, "z": 2}')


def test_an_object_with_an_empty_list_of_properties_is_closed() -> None:
    assert takes({"type": "object", "properties": {}}, {}, {"z": 1}) == [True, False]


def test_annotations_go_and_properties_with_their_names_stay() -> None:
    schema = {
        "title": "T",
        "description": "D",
        "properties": {"title": {"type": "string", "description": "D"}, "default": {"default": 1}},
        "if": {"properties": {"a": {}}},
        "not": {"properties": {"a": {}}},
    }
    assert prepared(schema) == {
        "properties": {"title": {"type": "string"}, "default": {}},
        "if": {"properties": {"a": {}}},
        "not": {"properties": {"a": {}}},
        **SHUT,
    }


@pytest.mark.parametrize("odd", [None, 1, [], "x", {"properties": 3}, {"allOf": 3, "properties": {}, "anyOf": [1]}])
def test_malformed_schemas_stay_malformed(odd: object) -> None:
    changed = prepared({"properties": {"a": odd}, "items": odd, "$ref": odd, "$defs": odd, "allOf": [odd]})
    assert changed["properties"]["a"] == odd or isinstance(odd, dict)


def test_a_reference_in_a_circle_ends() -> None:
    loop = {"$ref": "#/$defs/x", "properties": {"a": {}}, "$defs": {"x": {"allOf": [{"$ref": "#/$defs/x"}, B]}}}
    assert prepared(loop)["$defs"]["x"]["allOf"][1] == B


OBJECTS = st.deferred(
    lambda: st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from(NAMES), INNER, max_size=3)},
        optional={"allOf": st.lists(OBJECTS, max_size=2), "anyOf": st.lists(OBJECTS, min_size=1, max_size=2)},
    )
)
INNER = st.just({"type": "integer"}) | OBJECTS
VALUES = st.recursive(
    st.integers(0, 9), lambda inner: st.dictionaries(st.sampled_from(NAMES), inner, max_size=3), max_leaves=6
)


@given(OBJECTS, VALUES)
def test_closing_only_forbids(schema: dict[str, Any], value: object) -> None:
    """What fits the closed schema fits the client's; and a value whose properties are all named stays allowed."""
    before, after = (jsonschema.Draft202012Validator(one) for one in (schema, prepared(schema)))
    assert not after.is_valid(value) or before.is_valid(value)
    names = {name for name in schema["properties"]}
    if before.is_valid(value) and isinstance(value, dict) and not ({"allOf", "anyOf"} & schema.keys()):
        flat = {name: inner for name, inner in value.items() if isinstance(inner, int)}
        assert after.is_valid(flat) == (flat.keys() <= names)
