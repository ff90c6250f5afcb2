"""Make the rules of values in formats that write none in JSON: the literals that a JSON schema allows.

A dialect says how it writes each kind of value. It enforces types, listed values and the schema of list items. Lengths
and patterns are not enforced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from router.tools.calls.call_shape import MAX_CHOICES
from router.tools.schemas.schemas import MAX_STEPS, Schema, choices_of, kinds_of, resolved

INTEGER = "/-?(0|[1-9][0-9]{0,18})/"
NUMBER = r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,19})?([eE][+-]?[0-9]{1,2})?/"


def nothing_more(target: Schema, kinds: frozenset[str], steps: int) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Dialect:
    """Right sides of rules. `anything`: any value. `of_kind`: of each JSON type. `choice`: of one listed value.

    `more`: the rule of a schema that the dialect follows beyond its type; "" for any other schema."""

    anything: str
    of_kind: Mapping[str, str]
    comma: str
    choice: Callable[[object], str]
    more: Callable[[Schema, frozenset[str], int], str] = nothing_more


def value_rule(schema: object, root: Schema, dialect: Dialect, steps: int = MAX_STEPS) -> str:
    """`steps`: how many nested schemas are followed."""
    target = resolved(schema, root)
    if not isinstance(target, Mapping) or steps <= 0:
        return dialect.anything
    choices = choices_of(target)
    if choices is not None and len(choices) <= MAX_CHOICES:
        return " | ".join(map(dialect.choice, choices))
    for name in ("anyOf", "oneOf"):
        if isinstance(target.get(name), list) and target[name]:
            return " | ".join(f"({value_rule(item, root, dialect, steps - 1)})" for item in target[name])
    kinds = kinds_of(target, root)
    if kinds == {"array"} and "items" in target:
        item = f"({value_rule(target['items'], root, dialect, steps - 1)})"
        return f'"[" ({item} ({dialect.comma} {item})*)? "]"'
    if more := dialect.more(target, kinds, steps):
        return more
    return " | ".join(dialect.of_kind[kind] for kind in sorted(kinds)) or dialect.anything
