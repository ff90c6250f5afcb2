"""Values as Python writes them. Their grammar enforces neither ranges nor members of dicts."""

from __future__ import annotations

import re

from router.tools.calls.call_shape import literal, regex
from router.tools.calls.value_rules import INTEGER, NUMBER, Dialect

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
    "PY_INT": INTEGER,
    "PY_NUMBER": NUMBER,
    "PY_KEY": regex(IDENTIFIER.pattern),
    "PY_COMMA": r"/,[ \n]{0,4}/",
    "PY_COLON": "/:[ ]{0,4}/",
    "py_any": 'PY_STRING | PY_NUMBER | "True" | "False" | "None" | py_list | py_dict',
    "py_list": '"[" (py_any (PY_COMMA py_any)*)? "]"',
    "py_dict": '"{" (py_pair (PY_COMMA py_pair)*)? "}"',
    "py_pair": "PY_STRING PY_COLON py_any",
}


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


PYTHON = Dialect("py_any", OF_KIND, "PY_COMMA", _literal_rule)
