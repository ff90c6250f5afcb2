"""Turn clients' schemas, patterns, choices and grammars into checked text that nodes compile.

Each function returns llguidance's JSON, or raises InvalidRequest with llguidance's message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, grammar_from

from router.text.schema_numbers import check_numbers
from shared.core.errors import InvalidRequest
from shared.core.sampling_params import MAX_GRAMMAR_CHARS
from shared.grammar.compiler import check_grammar

ANY_OBJECT = {"type": "object"}
# White space between parts of JSON. The bound keeps models from writing white space for ever.
WHITESPACE = r" |\n[ \t]{0,40}"
MAX_CHOICES = 1024
MAX_REFS = 500  # references in a schema; llguidance follows references by recursion
MAX_DEPTH = 64  # levels of objects and lists in a schema
MAX_LINES = 500  # lines of a grammar; llguidance follows rules by recursion
MAX_GRAMMAR_TEXT = 16 << 10  # characters of a grammar; llguidance translates 16 Ki of GBNF in a second


def of_schema(schema: Mapping[str, Any] | str, prepare: Callable[[Any], Any] = lambda schema: schema) -> str:
    """`prepare`: changes the schema, whose size was checked."""
    try:
        given = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(given, Mapping):
            raise ValueError("it is another JSON value")
        json.dumps(given)
        check_size(given)
        text = json.dumps(prepare(given))
        return checked(LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": WHITESPACE}))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the schema is not a JSON object: {str(error)[:500]}") from None


def check_size(schema: object) -> None:
    """Raise InvalidRequest for too many levels or references, without recursion."""
    level, num_refs = [schema], 0
    for _ in range(MAX_DEPTH):
        dicts = [value for value in level if isinstance(value, dict)]
        num_refs += sum("$ref" in value for value in dicts)
        lists = [value for value in level if isinstance(value, list)]
        level = [item for value in dicts for item in value.values()] + [item for value in lists for item in value]
        if not level:
            break
    if level or num_refs > MAX_REFS:
        raise InvalidRequest(f"the schema has more than {MAX_REFS} references, or more than {MAX_DEPTH} levels")


def of_regex(pattern: str) -> str:
    """Return a grammar whose answers match the pattern from beginning to end."""
    try:
        return checked(LLMatcher.grammar_from_regex(pattern))
    except ValueError as error:
        raise InvalidRequest(f"the pattern can't be used: {error}") from None


def of_choices(choices: Sequence[str]) -> str:
    if not choices or not all(choices):
        raise InvalidRequest("there must be at least one choice, and no choice may be empty")
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"more than {MAX_CHOICES} texts to choose from")
    return checked(of_lark(grammar_from("choice", json.dumps(list(choices)))))


def of_grammar(text: str) -> str:
    """Check a grammar in Lark's form or in llama.cpp's GBNF."""
    text = "\n".join(filter(None, map(str.strip, text.split("\n"))))
    if len(text) > MAX_GRAMMAR_TEXT or text.count("\n") > MAX_LINES:
        raise InvalidRequest(f"the grammar has more than {MAX_GRAMMAR_TEXT} characters or {MAX_LINES} lines")
    try:
        return checked(of_lark(grammar_from("grammar", text)))
    except ValueError as error:
        raise InvalidRequest(f"the grammar can't be used: {str(error)[:500]}") from None


def of_lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]}, ensure_ascii=False)


def checked(grammar: str) -> str:
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"more than {MAX_GRAMMAR_CHARS} characters")
    check_numbers(grammar)
    check_grammar(grammar)
    return grammar
