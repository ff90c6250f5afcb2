"""Make the grammar of Python arguments: the literals that a JSON schema allows.

The grammar enforces types, listed values and the schema of list items. It does not enforce lengths, patterns, ranges or
members of dicts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from router.tools.call_shape import MAX_CHOICES, literal, regex
from router.tools.schemas import MAX_STEPS, UNKNOWN, Schema, choices_of, kinds_of, resolved

IDENTIFIER = re.compile("[A-Za-z_][A-Za-z0-9_]{0,63}")
OF_KIND = {
    "string": "PY_STRING",
    "integer": "PY_INT",
    "number": "PY_NUMBER",
    "boolean": '"True" | "False"',
    "null": '"None"',
    "array": "py_list",
    "object": "py_dict",
}
_ESCAPE = r"""\\([\\'"nrt]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})"""
RULES = {
    "PY_STRING": regex(rf'"([^"\\\n\r]|{_ESCAPE})*"', "|", rf"'([^'\\\n\r]|{_ESCAPE})*'"),
    "PY_INT": "/-?(0|[1-9][0-9]{0,18})/",
    "PY_NUMBER": r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,19})?([eE][+-]?[0-9]{1,2})?/",
    "PY_KEY": regex(IDENTIFIER.pattern),
    "PY_COMMA": r"/,[ \n]{0,4}/",
    "PY_COLON": "/:[ ]{0,4}/",
    "py_any": 'PY_STRING | PY_NUMBER | "True" | "False" | "None" | py_list | py_dict',
    "py_list": '"[" (py_any (PY_COMMA py_any)*)? "]"',
    "py_dict": '"{" (py_pair (PY_COMMA py_pair)*)? "}"',
    "py_pair": "PY_STRING PY_COLON py_any",
}


def value_rule(schema: object, root: Schema, steps: int = MAX_STEPS) -> str:
    target = resolved(schema, root)
    if not isinstance(target, Mapping) or steps == 0:
        return "py_any"
    choices = choices_of(target)
    if choices is not None and len(choices) <= MAX_CHOICES:
        return " | ".join(map(_literal_rule, choices))
    for name in ("anyOf", "oneOf"):
        if isinstance(target.get(name), list) and target[name]:
            return " | ".join(f"({value_rule(item, root, steps - 1)})" for item in target[name])
    kinds = kinds_of(target, root)
    if kinds == UNKNOWN:
        return "py_any"
    if kinds == {"array"} and "items" in target:
        item = f"({value_rule(target['items'], root, steps - 1)})"
        return f'"[" ({item} (PY_COMMA {item})*)? "]"'
    return " | ".join(OF_KIND[kind] for kind in sorted(kinds))


def _literal_rule(value: object) -> str:
    match value:
        case str():
            spelled = literal(value)  # the same text in JSON and Python
            return (
                f"{literal(spelled)} | {literal(chr(39) + spelled[1:-1] + chr(39))}"
                if "'" not in value
                else literal(spelled)
            )
        case None | bool():
            return literal(str(value))
        case int() | float():
            return literal(repr(value))
        case _:
            return "py_any"
