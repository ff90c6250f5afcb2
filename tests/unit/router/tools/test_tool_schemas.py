"""The tools of real MCP servers make grammars, alone and many at a time.

tests/data/tool_schemas.json.gz has them as each server lists them, without titles, descriptions and examples, on which
no grammar depends; each package with its registry, version and licence.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from router.api.answer.generation_plan import AnswerForm
from router.api.ask.answer_form import AnswerGrammar, grammar_of_answer
from router.api.fields.fields import GenerationFields
from router.text.chat.interface import VocabFacts
from router.tools.calls.format_row import ToolFormat
from router.tools.calls.formats import BY_NAME
from router.tools.schemas.choice import ChoiceMode, ToolChoice
from router.tools.schemas.closed_objects import prepared
from router.tools.schemas.declared import parse_tools

FACTS = VocabFacts(256, (0,), frozenset({0}), 100)
FILE = Path(__file__).parents[3] / "data" / "tool_schemas.json.gz"
TOOLS = [tool for package in json.loads(gzip.decompress(FILE.read_bytes())) for tool in package["tools"]]
LOOSENED = {  # all that these formats can't follow
    "firecrawl_search.properties.excludeDomains.items.pattern",
    "firecrawl_search.properties.includeDomains.items.pattern",
}
AT_A_TIME = 40
SHAPES = ("hermes", "mistral_args", "pythonic", "qwen3_coder")  # other formats write calls as one of these


def declared(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": tool["name"], "parameters": tool["inputSchema"]}} for tool in tools
    ]


def grammar(tools: Sequence[dict[str, Any]], row: ToolFormat) -> AnswerGrammar:
    choice = ToolChoice(ChoiceMode.AUTO, parse_tools(declared(tools)).tools)
    form = AnswerForm(row=row, tools=choice.tools)
    return grammar_of_answer(GenerationFields(), FACTS, form, choice, allows_parallel=True)


@pytest.mark.parametrize("row", [BY_NAME[name] for name in SHAPES], ids=SHAPES)
def test_each_makes_a_grammar(row: ToolFormat) -> None:
    dropped = {name for tool in TOOLS for name in grammar([tool], row).loosened}
    assert dropped <= LOOSENED


@pytest.mark.parametrize("row", [BY_NAME[name] for name in SHAPES], ids=SHAPES)
def test_forty_at_a_time_make_a_grammar(row: ToolFormat) -> None:
    named = list({tool["name"]: tool for tool in TOOLS}.values())
    batches = [named[start : start + AT_A_TIME] for start in range(0, len(named), AT_A_TIME)]
    dropped = {name for batch in batches for name in grammar(batch, row).loosened}
    assert dropped <= LOOSENED and len(batches) > 10


def test_closing_forbids_no_property_that_a_schema_names() -> None:
    for tool in TOOLS:
        schema = tool["inputSchema"]
        closed = jsonschema.Draft202012Validator(prepared(schema))
        for name in schema.get("properties", {}):
            errors = [error.validator for error in closed.iter_errors({name: None}) if not error.path]
            assert "additionalProperties" not in errors, json.dumps(schema)
