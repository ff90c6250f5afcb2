"""Find the JSON types that a schema allows, for call formats other than JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]
KINDS = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
UNKNOWN: frozenset[str] = frozenset()  # any JSON type
DEFINITIONS = ("$defs", "definitions")
MAX_STEPS = 8  # limit on nested references and alternatives


def kind_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case dict():
            return "object"
        case _:
            return "array"


def kinds_of(schema: object, root: Schema, steps: int = MAX_STEPS) -> frozenset[str]:
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or steps == 0:
        return UNKNOWN
    declared = schema.get("type")
    if isinstance(declared, str):
        return KINDS & {declared}
    if isinstance(declared, Sequence):
        return KINDS & {item for item in declared if isinstance(item, str)}
    if "const" in schema:
        return frozenset({kind_of(schema["const"])})
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return frozenset(map(kind_of, schema["enum"]))
    for name in ("anyOf", "oneOf"):
        if name in schema:
            each = [kinds_of(item, root, steps - 1) for item in _list(schema[name])]
            return frozenset().union(*each) if all(each) else UNKNOWN
    for item in _list(schema.get("allOf")):
        if kinds := kinds_of(item, root, steps - 1):
            return kinds
    return UNKNOWN


def kinds_of_property(name: str, root: Schema) -> frozenset[str]:
    return kinds_of(properties_of(root).get(name), root)


def resolved(schema: object, root: Schema) -> object:
    """Follow references into the same root."""
    for _ in range(MAX_STEPS):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema
        schema = _target(schema["$ref"], root)
    return None


def choices_of(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) and schema["enum"] else None


def properties_of(schema: Schema) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def required_of(schema: Schema) -> frozenset[str]:
    return frozenset(name for name in _list(schema.get("required")) if isinstance(name, str))


def takes_others(schema: Schema) -> bool:
    return not properties_of(schema) and schema.get("additionalProperties") is not False


def standing_alone(schema: object, root: Schema) -> Schema:
    """Return the schema with the root's definitions. If the schema refers to anything else, return {} (any value)."""
    if not isinstance(schema, Mapping) or not _refers_only_to_definitions(schema):
        return {}
    return dict(schema) | {name: root[name] for name in DEFINITIONS if name in root}


def _refers_only_to_definitions(value: object) -> bool:
    if isinstance(value, Mapping):
        target = value.get("$ref")
        if isinstance(target, str) and not target.startswith(tuple(f"#/{name}/" for name in DEFINITIONS)):
            return False
        return all(map(_refers_only_to_definitions, value.values()))
    return not isinstance(value, list) or all(map(_refers_only_to_definitions, value))


def _target(reference: str, root: Schema) -> object:
    """Follow a JSON pointer such as "#/$defs/Place". Return None if it leads nowhere."""
    if not reference.startswith("#/"):
        return None
    value: object = root
    for step in reference[2:].split("/"):
        value = value.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(value, Mapping) else None
    return value


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
