"""Read the grammar in OpenAI's response_format, vLLM's structured_outputs and guided_*, or SGLang's fields.

A request may set only one of these fields.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from router.api.fields.fields import GenerationFields, ResponseFormat, StructuredOutputs
from router.text import grammars
from router.text.chat.interface import VocabFacts
from router.tools.schemas.closed_objects import prepared
from shared.core.errors import InvalidRequest

Asked = tuple[str, Callable[[], str]]  # field name, maker of its grammar
Maker = Callable[[Any], str]
MAKERS: Mapping[str, Maker] = {
    "guided_json": grammars.of_schema,
    "guided_regex": grammars.of_regex,
    "guided_choice": grammars.of_choices,
    "guided_grammar": grammars.of_grammar,
    "json_schema": grammars.of_schema,
    "regex": grammars.of_regex,
    "ebnf": grammars.of_grammar,
}
FIELDS = ("response_format", "structured_outputs", "tools", "text", "output_config", "output_format", "format", *MAKERS)


def asks_for_grammar(body: object) -> bool:
    """Whether the request may need a grammar, whose check may take seconds."""
    return any(getattr(body, field, None) is not None for field in FIELDS)


def grammar_of(body: GenerationFields, facts: VocabFacts, *, opens_objects: bool = False) -> str:
    """Return "" if the request has no grammar. `opens_objects`: see `prepared`."""
    of_schema = partial(grammars.of_schema, prepare=partial(prepared, opens_objects=opens_objects))
    asked = [
        *_shared(body, of_schema),
        *_of_format(body.response_format, of_schema),
        *_of_outputs(body.structured_outputs, of_schema),
    ]
    if not asked:
        return ""
    field, make = asked[0]
    if len(asked) > 1:
        raise InvalidRequest(f"{field} and {asked[1][0]} both say what the answer follows; send one", param=field)
    if facts.start_ids:
        raise InvalidRequest(f"{field}: a model with an encoder follows no grammar", param=field)
    if not facts.eos_ids:
        raise InvalidRequest(f"{field}: this model has no token that ends an answer", param=field)
    if body.ignore_eos:
        raise InvalidRequest(f"{field} decides where the answer ends: ignore_eos can't be true", param="ignore_eos")
    with blamed_on(field):
        return make()


@contextlib.contextmanager
def blamed_on(field: str) -> Iterator[None]:
    """Name this field in each InvalidRequest of the `with` block."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"{field}: {error.message}", param=field) from error


def _shared(body: GenerationFields, of_schema: Maker) -> Iterator[Asked]:
    for field, maker in MAKERS.items():
        make = of_schema if maker is grammars.of_schema else maker
        if (value := getattr(body, field)) is not None:
            yield field, lambda make=make, value=value: make(value)  # type: ignore[misc]  # bound here, not later


def _of_format(wanted: ResponseFormat | None, of_schema: Maker) -> Iterator[Asked]:
    if wanted is None or wanted.type == "text":
        return
    if wanted.type == "json_object":
        yield "response_format", lambda: of_schema(grammars.ANY_OBJECT)
        return
    described = wanted.json_schema
    schema = described.schema if described is not None else None
    if schema is None:
        raise InvalidRequest("response_format: json_schema needs a schema", param="response_format")
    yield "response_format", lambda: of_schema(schema)


def _of_outputs(wanted: StructuredOutputs | None, of_schema: Maker) -> Iterator[Asked]:
    if wanted is None:
        return
    if wanted.json is not None:
        schema = wanted.json
        yield "structured_outputs", lambda: of_schema(schema)
    if wanted.json_object:
        yield "structured_outputs", lambda: of_schema(grammars.ANY_OBJECT)
    if wanted.regex is not None:
        pattern = wanted.regex
        yield "structured_outputs", lambda: grammars.of_regex(pattern)
    if wanted.choice is not None:
        choices = wanted.choice
        yield "structured_outputs", lambda: grammars.of_choices(choices)
    if wanted.grammar is not None:
        text = wanted.grammar
        yield "structured_outputs", lambda: grammars.of_grammar(text)
