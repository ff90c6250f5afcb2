"""/openapi.json: valid by the standard's rules, and true: it says what the field tables and the routes say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from jsonschema import Draft202012Validator
from starlette.routing import Route

from router.api.endpoint import EndpointRules
from router.api.openai.chat import CHAT
from router.api.site.openapi import document, encoded
from router.api.site.routes import build_routes
from router.api.site.tables import ALL_TABLES, APIS
from router.tenants.book import Tenants
from tests.support.bodies.field_rows import SHARED, Row, Table
from tests.support.bodies.messages_rows import MESSAGES_ROWS
from tests.support.bodies.ollama_rows import OLLAMA_ROWS
from tests.support.bodies.responses_rows import RESPONSES_ROWS

Json = dict[str, Any]
COMPONENT = re.compile(r"[a-zA-Z0-9._-]+")  # what the standard allows as a name
NOT_LISTED = {"/", "/status", "/*", "/api/{rest:path}"}  # pages, the server as a whole, and refusals


def parts_of(value: Any) -> Iterator[Any]:
    yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts_of(item)


def operations() -> list[Json]:
    return [operation for path in document()["paths"].values() for operation in path.values()]


def schema_of(table: Table) -> Json:
    content = document()["paths"][table.path]["post"]["requestBody"]["content"]
    return dict(content["application/json"]["schema"])


def component(reference: str) -> Json:
    found: Any = document()
    for name in reference.removeprefix("#/").split("/"):
        found = found[name]
    return dict(found)


def validator(table: Table) -> Draft202012Validator:
    return Draft202012Validator(schema_of(table) | {"components": document()["components"]})


def test_it_is_an_openapi_document() -> None:
    made = document()
    assert made["openapi"].startswith("3.1.") and {"title", "version"} <= set(made["info"])
    assert json.loads(encoded()) == made
    for operation in operations():
        assert operation["responses"] and all(one["description"] for one in operation["responses"].values())
        assert operation["summary"]
    names = [operation["operationId"] for operation in operations()]
    assert len(set(names)) == len(names)
    security = set(made["components"]["securitySchemes"])
    assert all(set(one) <= security for part in (made, *operations()) for one in part.get("security", []))


def test_every_path_parameter_is_declared() -> None:
    for path, item in document()["paths"].items():
        for operation in item.values():
            declared = {one["name"] for one in operation.get("parameters", []) if one["in"] == "path"}
            assert declared == set(re.findall(r"{(\w+)}", path))


def test_all_schemas_are_valid_and_all_references_lead_somewhere() -> None:
    made = document()
    for name, schema in made["components"]["schemas"].items():
        assert COMPONENT.fullmatch(name) and "router" not in name
        Draft202012Validator.check_schema(schema)
    references = {part["$ref"] for part in parts_of(made) if isinstance(part, dict) and "$ref" in part}
    assert references and all(component(reference) for reference in references)


def test_generated_clients_may_leave_fields_out() -> None:
    """Some generators demand a field with a default value."""
    fields = [
        field for schema in document()["components"]["schemas"].values() for field in schema["properties"].values()
    ]
    assert fields and not any("default" in field for field in fields)
    assert component(schema_of(CHAT)["$ref"])["required"] == ["messages"]


def test_it_has_the_paths_that_are_served() -> None:
    rules = EndpointRules(Mock(), Mock(), Tenants(), 1, 1.0)
    router = build_routes(rules, Mock(generation=Mock(by_path=dict)), Tenants())
    served = {one.path: one.app._methods for one in router.routes if isinstance(one, Route)}  # type: ignore[attr-defined]
    listed = {path.replace("{model}", "{model:path}"): next(iter(item)) for path, item in document()["paths"].items()}
    generating = {api.table.path for api in APIS}
    clients = {path for path in served if not path.startswith("/admin/")} - NOT_LISTED
    assert clients | generating == set(listed)
    assert all(listed[path].upper() in served[path] for path in listed if path in served)


def test_what_needs_no_key_says_so() -> None:
    rules = EndpointRules(Mock(), Mock(), Tenants(), 1, 1.0)
    router = build_routes(rules, Mock(generation=Mock(by_path=dict)), Tenants())
    is_open = {one.path: not one.app._needs_key for one in router.routes if isinstance(one, Route)}  # type: ignore[attr-defined]
    for path, item in document()["paths"].items():
        without_key = next(iter(item.values())).get("security") == []
        assert without_key == (is_open.get(path, False) and path != "/metrics"), path  # its handler asks for the key


@pytest.mark.parametrize("table", ALL_TABLES, ids=lambda table: table.path)
def test_each_field_is_described_as_in_the_table(table: Table) -> None:
    fields = component(schema_of(table)["$ref"])["properties"]
    assert {name: fields[name]["description"] for name in table.about} == table.about
    assert set(fields) == {*table.about, *(name for name in table.ignored if "." not in name)}


GOOD = [
    pytest.param(table, row, value, id=f"{table.path}-{row.field}-{place}")
    for row in (*SHARED, *MESSAGES_ROWS, *RESPONSES_ROWS, *OLLAMA_ROWS)
    for table in row.kinds
    if row.field in table.about
    for place, (value, _) in enumerate(row.good)
]


@pytest.mark.parametrize(("table", "row", "value"), GOOD)
def test_values_that_the_parser_takes_are_valid(table: Table, row: Row, value: Any) -> None:
    """Null is absent, so the document need not allow it."""
    if value is None:
        return
    schema = component(schema_of(table)["$ref"])["properties"][row.field]
    Draft202012Validator(schema | {"components": document()["components"]}).validate(value)


@pytest.mark.parametrize("table", ALL_TABLES, ids=lambda table: table.path)
def test_fields_of_a_wrong_type_are_not_valid(table: Table) -> None:
    assert not validator(table).is_valid({"model": 3})
    assert not validator(table).is_valid([])
