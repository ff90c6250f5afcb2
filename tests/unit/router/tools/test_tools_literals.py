"""Values that are not JSON become JSON, by the kinds that their schema allows."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.tools.calls.literals import from_argument, from_python, from_tagged
from router.tools.schemas.schemas import KINDS, UNKNOWN, kinds_of, standing_alone

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
KIND_SETS = st.frozensets(st.sampled_from(sorted(KINDS)))


@given(JSON_VALUES)
def test_python_literals_become_the_same_value(value: object) -> None:
    text = from_python(repr(value))
    assert text is not None and json.loads(text) == value
    assert from_python(json.dumps(value)) == json.dumps(value)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("(1, 2,)", "[1, 2]"),
        ("{1: 'a'}", '{"1": "a"}'),
        ("1_000", "1000"),
        (".5", "0.5"),
        (r"'\ud83d\x41\q\101'", r'"\ud83dA\\q\\101"'),
        ("[True, None, false]", "[true, null, false]"),
        ("'a", None),
        ("[1", None),
        ("1 2", None),
        ("f(x)", None),
        ("1e999", "1e999"),
        ("NaN", None),
        ("", None),
        ("[" * 100_000, None),
        ("9" * 5_000, None),
    ],
)
def test_python_literals(text: str, expected: str | None) -> None:
    assert from_python(text) == expected


@given(st.text() | JSON_VALUES.map(repr), KIND_SETS)
def test_whatever_comes_is_json(text: str, kinds: frozenset[str]) -> None:
    json.loads(from_tagged(text, kinds))
    json.loads(from_argument(text, kinds))


@pytest.mark.parametrize(
    "text, kinds, expected",
    [
        ("5", {"string"}, '"5"'),
        ("5", {"integer"}, "5"),
        ("5.5", {"integer"}, '"5.5"'),
        ("True", {"boolean"}, "true"),
        ("None", {"string", "null"}, "null"),
        ("Nonesuch", {"string", "null"}, '"Nonesuch"'),
        ("7", {"string", "integer"}, "7"),
        ('"a"', {"string", "null"}, '"\\"a\\""'),
        ('"a"', set(), '"a"'),
        ("plain text", set(), '"plain text"'),
        ("{'a': 1}", {"object"}, '{"a": 1}'),
    ],
)
def test_tagged_values_follow_the_schema(text: str, kinds: set[str], expected: str) -> None:
    assert from_tagged(text, frozenset(kinds)) == expected


ROOT = {
    "$defs": {"name": {"type": "string"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "null"}]}, "a/b": {}},
    "properties": {"x": {"type": "integer"}},
}


@pytest.mark.parametrize(
    "schema, kinds",
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null", 1]}, {"string", "null"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"const": 1.5}, {"number"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {}]}, UNKNOWN),
        ({"allOf": [{"minLength": 1}, {"type": "string"}]}, {"string"}),
        ({"$ref": "#/$defs/name"}, {"string"}),
        ({"$ref": "#/properties/x"}, {"integer"}),
        ({"$ref": "#/$defs/loop"}, UNKNOWN),
        ({"$ref": "#/$defs/a~1b"}, UNKNOWN),
        ({"$ref": "#/no/such"}, UNKNOWN),
        ({"$ref": "http://example.com"}, UNKNOWN),
        ({"type": "no-such"}, UNKNOWN),
        (True, UNKNOWN),
        (None, UNKNOWN),
    ],
)
def test_kinds_of_schemas(schema: object, kinds: set[str]) -> None:
    assert kinds_of(schema, ROOT) == kinds


def test_a_schema_stands_alone_with_its_definitions() -> None:
    assert standing_alone({"$ref": "#/$defs/name"}, ROOT)["$defs"] is ROOT["$defs"]
    assert standing_alone({"items": [{"$ref": "#/properties/x"}]}, ROOT) == {}
    assert standing_alone(True, ROOT) == {}
