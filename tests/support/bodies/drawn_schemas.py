"""Bounded JSON schemas and regular expressions, drawn by seed, and who else says whether a text fits one.

Schemas are made of those keywords of the public JSON Schema test suite (draft 2020-12) that grammars follow. Each is
bounded, so that an answer that is drawn at random comes to its end.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import regex

from router.text import grammars
from shared.core.errors import InvalidRequest

Schema = dict[str, Any]
MAX_DEPTH = 3
NAMES = ("a", "b", "name", "city", "is ok", "naïve", "x-1", "数")
VALUES: tuple[Any, ...] = (None, True, False, 0, -7, 2.5, "", "a", "yes", 'say "no"', "ü\n", [], [1, "a"], {"k": None})
PATTERNS = (r"^[a-f]{1,4}$", r"^(ab|cd)+x{0,2}$", r"^\d{2,4}-\w{1,3}$", r"^[^b-z\s]{0,5}$", r"^é?你?$")
FORMATS = ("date", "uuid", "ipv4")


def draw_schema(rng: random.Random, depth: int = 0) -> Schema:
    makers = [scalar, scalar, string, number, choice]
    if depth < MAX_DEPTH:
        makers += [array, array, object_of, object_of, object_of, any_of, by_reference]
    return rng.choice(makers)(rng, depth)


def scalar(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def string(rng: random.Random, depth: int) -> Schema:
    kind = rng.random()
    if kind < 0.25:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind < 0.35:
        return {"type": "string", "format": rng.choice(FORMATS)}
    least = rng.choice([0, 0, 1, 3])
    return {"type": "string", "minLength": least, "maxLength": least + rng.choice([0, 1, 5, 12])}


def number(rng: random.Random, depth: int) -> Schema:
    low = rng.choice([-1000, -9, 0, 5])
    bounds = {"minimum": low, "maximum": low + rng.choice([0, 7, 99, 12345])}
    if rng.random() < 0.3:
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": low + rng.choice([2, 50])}
    more = {"multipleOf": rng.choice([1, 2])} if rng.random() < 0.2 else {}
    return {"type": "integer", **bounds, **more} if more or rng.random() < 0.7 else {"type": "number", **bounds}


def choice(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.4:
        return {"const": rng.choice(VALUES)}
    return {"enum": rng.sample(VALUES, rng.randint(1, 6))}


def array(rng: random.Random, depth: int) -> Schema:
    least = rng.choice([0, 0, 1, 2])
    schema: Schema = {"type": "array", "minItems": least, "maxItems": least + rng.choice([0, 1, 3])}
    first = [draw_schema(rng, depth + 1) for _ in range(rng.choice([0, 0, 1, 2]))]
    if first:
        schema["prefixItems"] = first
    return {**schema, "items": draw_schema(rng, depth + 1)}


def object_of(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: draw_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [draw_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def by_reference(rng: random.Random, depth: int) -> Schema:
    """Definitions stand at the root alone."""
    if depth:
        return object_of(rng, depth)
    inner = draw_schema(rng, depth + 1)
    more = {"other": {"$ref": "#/$defs/one"}} if rng.random() < 0.5 else {}
    return {
        "$defs": {"one": inner},
        "type": "object",
        "properties": {"one": {"$ref": "#/$defs/one"}, **more},
        "required": ["one"],
        "additionalProperties": False,
    }


def draw_possible(rng: random.Random) -> tuple[Schema, str]:
    """Return a schema and its grammar. Some drawn schemas fit nothing; the router refuses these."""
    while True:
        schema = draw_schema(rng)
        try:
            return schema, grammars.of_schema(schema)
        except InvalidRequest as error:
            assert "nsatisfiable" in error.message, f"{schema}: {error}"


def fits_schema(text: str, schema: Schema) -> bool:
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    return validator.is_valid(json.loads(text))


# ---- regular expressions


ATOMS = (r"[a-c]", r"\d", "x", r"[^a-y\s]", "é", "(yes|no)", r"\w", "你", r'"', r"\.", " ")


def draw_regex(rng: random.Random, depth: int = 0) -> str:
    """Bounded, with the counts and groups that both engines know."""
    parts = []
    for _ in range(rng.randint(1, 4)):
        inner = rng.choice(ATOMS) if depth > 1 or rng.random() < 0.7 else f"({draw_regex(rng, depth + 1)})"
        parts.append(inner + rng.choice(["", "", "?", "{0,3}", "{2}", "{1,4}"]))
    text = "".join(parts)
    return f"({text}|{rng.choice(ATOMS)})" if rng.random() < 0.2 else text


def fits_regex(text: str, pattern: str, *, is_whole: bool) -> bool:
    """`is_whole`: else the text may be a beginning of what fits."""
    return regex.fullmatch(pattern, text, partial=not is_whole) is not None
