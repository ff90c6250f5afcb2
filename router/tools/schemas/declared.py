"""Check a request's tools. An InvalidRequest names the invalid member.

Chats use OpenAI's {"type": "function", "function": {"name", "description", "parameters", "strict"}}. /v1/responses has
these members without the inner object.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from router.text.chat.call_arguments import is_deeper
from shared.core.errors import InvalidRequest

MAX_TOOLS = 512  # tools of all types; agents send more than OpenAI allows
MAX_SCHEMA_BYTES = 256 << 10  # schemas of all tools together
MAX_SCHEMA_DEPTH = 64  # levels of objects and lists
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Tool:
    """`parameters`: a JSON schema of an object, never changed."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # None: no arguments
    is_strict: bool = False

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema of the arguments, always of an object."""
        if self.parameters is None:
            return NO_PARAMETERS
        return {**ANY_OBJECT, **self.parameters}

    def for_template(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = {"type": "object", "properties": {}} if self.parameters is None else self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class OtherTool:
    """A tool that is not a function. Endpoints skip or refuse such a tool."""

    index: int
    type: str


@dataclass(frozen=True, slots=True)
class DeclaredTools:
    tools: tuple[Tool, ...] = ()
    others: tuple[OtherTool, ...] = ()


def parse_tools(value: object) -> DeclaredTools:
    """Raise InvalidRequest for an invalid tool."""
    if value is None:
        return DeclaredTools()
    if not isinstance(value, list | tuple):
        raise InvalidRequest("tools must be a list", param="tools")
    check_number(value)
    tools: list[Tool] = []
    others: list[OtherTool] = []
    for index, item in enumerate(value):
        path = f"tools[{index}]"
        kind = _type_of(item, path)
        if kind == "function":
            tools.append(_function(item, path))
        else:
            others.append(OtherTool(index, kind[:64]))
    check_together(tools)
    return DeclaredTools(tuple(tools), tuple(others))


def make_tool(
    name: object,
    description: object,
    parameters: object,
    strict: object,
    path: str,
    schema_name: str = "parameters",
) -> Tool:
    """`schema_name`: the endpoint's name for the schema, such as /v1/messages' `input_schema`."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"{path}.name must have 1 to 128 letters, digits, underscores, dots and dashes", param=f"{path}.name"
        )
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{path}.description must be a string", param=f"{path}.description")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{path}.strict must be true or false", param=f"{path}.strict")
    if parameters is not None:
        parameters = checked_schema(parameters, f"{path}.{schema_name}")
    return Tool(name, description, parameters, bool(strict))


def checked_schema(schema: object, path: str) -> Mapping[str, Any]:
    """Raise InvalidRequest for a wrong or deep schema."""
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{path} must be a JSON schema, an object", param=path)
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f'{path}.type must be "object"', param=f"{path}.type")
    if is_deeper(schema, MAX_SCHEMA_DEPTH):
        raise InvalidRequest(f"{path} nests deeper than {MAX_SCHEMA_DEPTH} levels", param=path)
    return schema


def skipped_tools(tools: Sequence[Mapping[str, Any]] | None, served: Collection[str | None]) -> list[str]:
    sent = (tools or ())[:MAX_TOOLS]
    return [f"tools[{index}]" for index, tool in enumerate(sent) if tool.get("type") not in served]


def check_number(tools: Sequence[object]) -> None:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} tools, and {MAX_TOOLS} is the most", param="tools")


def check_together(tools: Sequence[Tool]) -> None:
    """Raise InvalidRequest for duplicate names or too large schemas."""
    names: set[str] = set()
    num_bytes = 0
    for tool in tools:
        if tool.name in names:
            raise InvalidRequest(f"tools has two functions called {tool.name!r}", param="tools")
        names.add(tool.name)
        num_bytes += len(msgspec.json.encode(tool.parameters))
    if num_bytes > MAX_SCHEMA_BYTES:
        raise InvalidRequest(
            f"the schemas in tools have {num_bytes} bytes, above the limit of {MAX_SCHEMA_BYTES}", param="tools"
        )


def _function(item: Mapping[str, Any], path: str) -> Tool:
    if "function" in item:
        path = f"{path}.function"
        item = item["function"]
        if not isinstance(item, dict):
            raise InvalidRequest(f"{path} must be an object", param=path)
    return make_tool(item.get("name"), item.get("description"), item.get("parameters"), item.get("strict"), path)


def _type_of(item: object, path: str) -> str:
    if not isinstance(item, dict):
        raise InvalidRequest(f"{path} must be an object", param=path)
    kind = item.get("type")
    if not isinstance(kind, str):
        raise InvalidRequest(f"{path}.type is missing or of the wrong type", param=f"{path}.type")
    return kind
