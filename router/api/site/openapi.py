"""Make /openapi.json, an OpenAPI 3.1 document, from the field tables.

The document has all paths of a client's API: not those for operators (/admin), and not the page at `/`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from router.api.answer.answers import ChatChoice, CompletionChoice, Usage
from router.api.fields.fields import FieldTable
from router.api.site.tables import ALL_TABLES, APIS
from router.http.connection import Connection
from router.http.errors import MESSAGES_PATH, OLLAMA_PATHS, ErrorAnswer

Json = dict[str, Any]
# What stands before a name that two modules have: `router.api.answer.` of `router.api.answer.answers.ToolCall`.
ROOMS = re.compile(rb"\brouter\.api\.(?:\w+\.)*(?=\w+\.\w+\")")
REF = "#/components/schemas/{name}"
JSON, SSE, NDJSON, TEXT = "application/json", "text/event-stream", "application/x-ndjson", "text/plain"
ABOUT = (
    "Text from a language model, by the APIs of OpenAI, Anthropic and Ollama. Fields that are null count as absent. "
    "Fields that are not listed are ignored or refused: see docs/http-api.md."
)
LICENSE = {"name": "Apache 2.0", "identifier": "Apache-2.0"}  # of the server
ANY_OBJECT: Json = {"type": "object"}
CHOICES: Mapping[str, type] = {"/v1/chat/completions": ChatChoice, "/v1/completions": CompletionChoice}
STRUCTS = (*(table.served for table in ALL_TABLES), *CHOICES.values(), Usage, ErrorAnswer)


@dataclass(frozen=True, slots=True)
class Read:
    """A path that is only read. `kind`: the answer's media type."""

    path: str
    summary: str
    needs_key: bool = True
    kind: str = JSON


READS = (
    Read("/v1/models", "List the served model and its adapters"),
    Read("/v1/models/{model}", "Show one model"),
    Read("/tokenizer_info", "Show the tokenizer's configuration"),
    Read("/api/tags", "List the models, in Ollama's form"),
    Read("/api/ps", "List the models that can answer now, in Ollama's form"),
    Read("/api/version", "Show the version of Ollama's API that is served", needs_key=False),
    Read("/health", "Tell whether the router lives", needs_key=False),
    Read("/ready", "Tell whether requests can be answered", needs_key=False),
    Read("/metrics", "Show the metrics, in the form of Prometheus", kind=TEXT),
    Read("/openapi.json", "Show this document", needs_key=False),
)
SUMMARIES: Mapping[str, str] = {
    "/v1/chat/completions": "Answer a conversation (OpenAI)",
    "/v1/completions": "Continue a text (OpenAI)",
    "/v1/messages": "Answer a conversation (Anthropic)",
    "/v1/responses": "Answer a conversation (OpenAI's responses)",
    "/v1/messages/count_tokens": "Count a conversation's tokens (Anthropic)",
    "/tokenize": "Turn a text into tokens",
    "/detokenize": "Turn tokens into a text",
    "/api/chat": "Answer a conversation (Ollama)",
    "/api/generate": "Answer a prompt (Ollama)",
    "/api/show": "Show one model (Ollama)",
}


class OpenApi:
    async def document(self, connection: Connection) -> None:
        await connection.answer(200, encoded())


@functools.cache
def encoded() -> bytes:
    return msgspec.json.encode(document())


def document() -> Json:
    posts = {table.path: {"post": posted(table)} for table in ALL_TABLES}
    gets = {read.path: {"get": got(read)} for read in READS}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": "1", "description": ABOUT, "license": LICENSE},
        "servers": [{"url": "/"}],
        "paths": posts | gets,
        "components": {
            "schemas": schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],  # without --api-key-file no key is needed
    }


def posted(table: FieldTable[Any]) -> Json:
    return {
        "operationId": operation_id(table.path),
        "summary": SUMMARIES[table.path],
        "requestBody": {"required": True, "content": {JSON: {"schema": reference(table.served)}}},
        "responses": {"200": {"description": "The answer", "content": dict(answers(table))}} | failures(table.path),
    }


def answers(table: FieldTable[Any]) -> Iterator[tuple[str, Json]]:
    choice = CHOICES.get(table.path)
    yield JSON, {"schema": ANY_OBJECT if choice is None else answer_with(choice)}
    if table in [api.table for api in APIS]:
        is_ollama = table.path.startswith(OLLAMA_PATHS)
        yield NDJSON if is_ollama else SSE, {"schema": {"type": "string"}}


def answer_with(choice: type) -> Json:
    texts = {name: {"type": "string"} for name in ("id", "object", "model")}
    choices = {"type": "array", "items": reference(choice)}
    properties = texts | {"created": {"type": "integer"}, "choices": choices, "usage": reference(Usage)}
    return {"type": "object", "properties": properties, "required": list(properties)}


def got(read: Read) -> Json:
    schema = ANY_OBJECT if read.kind == JSON else {"type": "string"}
    answer = {"200": {"description": "The answer", "content": {read.kind: {"schema": schema}}}}
    made: Json = {"operationId": operation_id(read.path), "summary": read.summary}
    made["responses"] = answer | failures(read.path)
    if "{model}" in read.path:
        made["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    if not read.needs_key:
        made["security"] = []
    return made


def failures(path: str) -> Json:
    """The paths of Anthropic and Ollama have their own forms of errors."""
    is_other = path.startswith((MESSAGES_PATH, OLLAMA_PATHS))
    schema = ANY_OBJECT if is_other else reference(ErrorAnswer)
    return {"default": {"description": "An error", "content": {JSON: {"schema": schema}}}}


def operation_id(path: str) -> str:
    return re.sub(r"\W+", "_", path).strip("_")


# ---- schemas


def reference(struct: type) -> Json:
    found: Json = component_schemas()[0][STRUCTS.index(struct)]
    return dict(found)


@functools.cache
def component_schemas() -> tuple[tuple[Json, ...], dict[str, Json]]:
    """Return references to STRUCTS, and the schemas by name."""
    made = msgspec.json.encode(msgspec.json.schema_components(STRUCTS, ref_template=REF))
    references, components = msgspec.json.decode(ROOMS.sub(b"", made))
    return tuple(references), components


def schemas() -> Json:
    components = {name: as_served(schema) for name, schema in component_schemas()[1].items()}
    for table in ALL_TABLES:
        name = reference(table.served)["$ref"].rpartition("/")[2]
        components[name] = described(components[name], table)
    return components


def as_served(schema: Json) -> Json:
    """Allow unknown fields, as the parser does. Leave out defaults: some generators demand each field that has one."""
    kept = {name: value for name, value in schema.items() if name != "additionalProperties" or value is not False}
    properties = {
        name: {key: value for key, value in field.items() if key != "default"}
        for name, field in schema.get("properties", {}).items()
    }
    return kept | {"properties": properties}


def described(schema: Json, table: FieldTable[Any]) -> Json:
    """Add the tables' texts, and the fields without effect. Fields inside of objects are left out."""
    served = {name: field | {"description": table.about[name]} for name, field in schema["properties"].items()}
    ignored = {name: {"description": f"ignored: {why}"} for name, why in table.ignored.items() if "." not in name}
    return schema | {"properties": served | ignored}
