"""Where a JSON schema holds other schemas. All functions accept malformed schemas, and change none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
SINGLES = frozenset(
    {"items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"}
    | {"unevaluatedItems", "unevaluatedProperties"}
)
Path = tuple[str | int, ...]


def inner_schemas(keyword: str, value: object) -> Iterator[tuple[Path, object]]:
    """Yield (path below the keyword, schema) of each schema in a keyword's value."""
    if keyword in MAPS and isinstance(value, Mapping):
        for name, schema in value.items():
            yield (name,), schema
    elif isinstance(value, list) and (keyword in LISTS or keyword == "items"):
        for index, schema in enumerate(value):
            yield (index,), schema
    elif keyword in SINGLES and not isinstance(value, list):
        yield (), value


def holds_schemas(keyword: str, value: object) -> bool:
    return next(inner_schemas(keyword, value), None) is not None


def with_inner(keyword: str, value: Any, change: Callable[[Path, object], object]) -> Any:
    """Return the keyword's value, each schema in it replaced by `change(path below the keyword, schema)`."""
    changed = {path: change(path, schema) for path, schema in inner_schemas(keyword, value)}
    if () in changed:
        return changed[()]
    if isinstance(value, list):
        return list(changed.values())
    return {path[0]: schema for path, schema in changed.items()}


def all_nodes(schema: object) -> Iterator[Mapping[str, Any]]:
    """Yield every schema that is an object, parents first."""
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, Mapping):
            yield node
            left += [inner for keyword, value in node.items() for _, inner in inner_schemas(keyword, value)]


def spelled(path: Path) -> str:
    """Return a path as in `properties.to.anyOf[0].pattern`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")
