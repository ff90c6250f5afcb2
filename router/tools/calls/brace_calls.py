"""Calls in braces, with bare keys and strings between marks: `call:f{city:<|"|>Rome<|"|>,days:2}`.

Strings of the first level are streamed. Other values arrive whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from router.tools.calls.call_shape import CallRules, Markers, escaped, in_order, json_rule, literal, regex
from router.tools.calls.deltas import DeltaSink
from router.tools.calls.literals import from_tagged, json_string
from router.tools.calls.reading import (
    Reading,
    Source,
    copy_until,
    expect,
    found,
    peek,
    skip_any_space,
    take_name,
)
from router.tools.calls.tagged_calls import copy_text
from router.tools.calls.value_rules import INTEGER, NUMBER, Dialect, value_rule
from router.tools.schemas.declared import Tool
from router.tools.schemas.schemas import (
    MAX_STEPS,
    UNKNOWN,
    Schema,
    kinds_of_property,
    properties_of,
    required_of,
    standing_alone,
    takes_others,
)
from shared.core.errors import InvalidRequest

BARE_KEY = re.compile(r"[^:,{}\[\]<>\"\s|]{1,128}")
CLOSERS = {"{": "}", "[": "]"}
MAX_DEPTH = 64
_BARE = re.compile(r"[^,}\]]*")


@dataclass(frozen=True, slots=True)
class BraceCalls:
    """`opens`: text before the name. `quote`: the mark around strings."""

    opens: str
    quote: str

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opens, self.quote)

    def rules(self, tool: Tool, prefix: str, markers: Markers) -> CallRules:
        grammar = _Values(prefix, self.quote, markers, tool)
        members = grammar.members(tool.schema)
        head = f"{escaped(self.opens)}{escaped(tool.name)}"
        return CallRules(head, f'"{{" {members} "}}"', grammar.rules)

    def read(self, source: Source, tools: Mapping[str, Tool], sink: DeltaSink) -> Reading[None]:
        yield from expect(source, self.opens)
        name = yield from take_name(source, tools)
        yield from expect(source, "{")
        source.commit()
        sink.begin_call(name)
        separator = "{"
        while True:
            yield from skip_any_space(source)
            if (yield from found(source, "}")):
                break
            if (yield from found(source, ",")):
                continue
            key: list[str] = []
            if not (yield from copy_until(source, (":",), key.append)):
                return
            spelled = "".join(key).replace(self.quote, "").strip().strip('"')
            before = f"{separator}{json_string(spelled)}: "
            yield from self._read_value(source, kinds_of_property(spelled, tools[name].schema), before, sink)
            separator = ", "
        sink.arguments("{}" if separator == "{" else "}")
        sink.end_call()

    def _read_value(self, source: Source, kinds: frozenset[str], before: str, sink: DeltaSink) -> Reading[None]:
        yield from skip_any_space(source)
        if (yield from found(source, self.quote)):
            sink.arguments(f'{before}"')
            yield from copy_text(source, (self.quote,), sink)
            return
        value = yield from self._copy_value(source)
        if (yield from peek(source)):
            sink.arguments(before + from_braces(value, self.quote, kinds))

    def _copy_value(self, source: Source) -> Reading[str]:
        """Return the text up to the value's end. Strings and nested brackets belong to the value."""
        brackets: list[str] = []
        value = ""
        while char := (yield from peek(source)):
            quote = self.quote if (yield from found(source, self.quote)) else ""
            if not quote and char == '"':
                source.at += 1
                quote = char
            if quote:
                inside: list[str] = []
                closing = yield from copy_until(source, (quote,), inside.append)
                value += quote + "".join(inside) + closing
                continue
            if char in CLOSERS:
                brackets.append(CLOSERS[char])
            elif brackets and char == brackets[-1]:
                brackets.pop()
            elif not brackets and char in ",}":
                return value
            value += source.take_text(source.at + 1)
        return value


def from_braces(text: str, quote: str, kinds: frozenset[str]) -> str:
    """Return a value as JSON; a text that can't be read becomes a string."""
    try:
        reader = _Braces(text, quote)
        value = reader.value(MAX_DEPTH, kinds)
        if reader.is_at_end():
            return value
    except ValueError:
        pass
    return json_string(text.strip().replace(quote, ""))


class _Braces:
    def __init__(self, text: str, quote: str) -> None:
        self._text = text.strip()
        self._quotes = (quote, '"')
        self._at = 0

    def is_at_end(self) -> bool:
        return not self._text[self._at :].strip()

    def value(self, depth: int, kinds: frozenset[str] = UNKNOWN) -> str:
        if depth == 0:
            raise ValueError("it nests too deep")
        if self._follows("["):
            return self._list(depth)
        if self._follows("{"):
            return self._dict(depth)
        for quote in self._quotes:
            if self._follows(quote):
                return json_string(self._up_to(quote))
        found = _BARE.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        return from_tagged(found[0].strip(), kinds)

    def _list(self, depth: int) -> str:
        items: list[str] = []
        while not self._follows("]"):
            if items and not self._follows(","):
                raise ValueError("a comma is missing")
            items.append(self.value(depth - 1))
        return f"[{', '.join(items)}]"

    def _dict(self, depth: int) -> str:
        pairs: list[str] = []
        while not self._follows("}"):
            if pairs and not self._follows(","):
                raise ValueError("a comma is missing")
            key = self._key()
            pairs.append(f"{json_string(key)}: {self.value(depth - 1)}")
        return f"{{{', '.join(pairs)}}}"

    def _key(self) -> str:
        for quote in self._quotes:
            if self._follows(quote):
                key = self._up_to(quote)
                self._up_to(":")
                return key
        return self._up_to(":").strip()

    def _up_to(self, mark: str) -> str:
        end = self._text.find(mark, self._at)
        if end < 0:
            raise ValueError(f"{mark} is missing")
        inside, self._at = self._text[self._at : end], end + len(mark)
        return inside

    def _follows(self, mark: str) -> bool:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        is_there = self._text.startswith(mark, self._at)
        self._at += len(mark) * is_there
        return is_there


class _Values:
    """Makes the rules of values: types, listed values, ranges, known members. Lengths and patterns are not enforced."""

    def __init__(self, prefix: str, quote: str, markers: Markers, tool: Tool) -> None:
        self._prefix = prefix
        self._markers = markers
        self._quote = markers.rule(quote)
        self._tool = tool
        self._num_objects = 0
        string = f"{self._quote} brace_text"
        self.rules = {
            "KEYWORD": regex(BARE_KEY.pattern),
            "brace_any": f'{string} | {NUMBER} | "true" | "false" | "null" | brace_list | brace_dict',
            "brace_list": '"[" (brace_any ("," brace_any)*)? "]"',
            "brace_dict": '"{" (brace_pair ("," brace_pair)*)? "}"',
            "brace_pair": 'KEYWORD ":" brace_any',
        }
        markers.up_to("brace_text", quote, self.rules)
        of_kind = {
            "string": string,
            "integer": INTEGER,
            "number": NUMBER,
            "boolean": '"true" | "false"',
            "null": '"null"',
            "array": "brace_list",
            "object": "brace_dict",
        }
        self._dialect = Dialect("brace_any", of_kind, '","', self._choice, self._more)

    def members(self, schema: Schema, steps: int = MAX_STEPS) -> str:
        properties = properties_of(schema)
        if takes_others(schema):
            return '(brace_pair ("," brace_pair)*)?'
        self._num_objects += 1
        prefix = f"{self._prefix}_o{self._num_objects}"
        for index, (key, value) in enumerate(properties.items()):
            if BARE_KEY.fullmatch(key) is None:
                raise InvalidRequest(
                    f"{self._tool.name}: this model can't write a parameter called {key[:64]!r}", param="tools"
                )
            own = value_rule(value, self._tool.schema, self._dialect, steps - 1)
            self.rules[f"{prefix}_p{index}"] = f"{literal(key + ':')} ({own})"
        return in_order([key in required_of(schema) for key in properties], prefix, '","', self.rules)

    def _more(self, target: Schema, kinds: frozenset[str], steps: int) -> str:
        """Numbers are JSON, so their ranges count. Objects have their members."""
        if kinds and kinds <= {"integer", "number"}:
            name = f"{self._prefix}_{len(self.rules)}_number"
            self.rules[name] = json_rule(standing_alone(target, self._tool.schema), is_strict=self._tool.is_strict)
            return name
        if kinds == {"object"} and not takes_others(target):
            return f'"{{" {self.members(target, steps - 1)} "}}"'
        return ""

    def _choice(self, value: object) -> str:
        if isinstance(value, str):
            return f"{self._quote} {literal(value)} {self._quote}" if value else f"{self._quote} {self._quote}"
        return literal(json.dumps(value)) if not isinstance(value, dict | list) else "brace_any"
