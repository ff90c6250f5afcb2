"""Calls written as Python: `f(a=1, b="x")`. Arguments become JSON. Strings are streamed; other values arrive whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from router.tools.calls.call_shape import CallRules, Markers, escaped, in_order, literal
from router.tools.calls.deltas import DeltaSink
from router.tools.calls.literals import HEX_ESCAPES, escaped_char, from_argument, json_inside, json_string
from router.tools.calls.python_values import IDENTIFIER, PYTHON, RULES
from router.tools.calls.reading import (
    MAX_NAME_CHARS,
    NAME_CHARS,
    Reading,
    Source,
    expect,
    found,
    nowhere,
    peek,
    skip_any_space,
    take_name,
    take_run,
)
from router.tools.calls.value_rules import value_rule
from router.tools.schemas.declared import Tool
from router.tools.schemas.schemas import kinds_of_property, properties_of, required_of, takes_others
from shared.core.errors import InvalidRequest

KEY_CHARS = NAME_CHARS - {"-", "."}
HEX_CHARS = frozenset("0123456789abcdefABCDEF")
CLOSERS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """The grammar allows only keyword arguments. The reader skips other arguments."""

    markers: tuple[str, ...] = ()

    def rules(self, tool: Tool, prefix: str, markers: Markers) -> CallRules:
        schema = tool.schema
        rules = dict(RULES)
        keys = list(properties_of(schema))
        for index, key in enumerate(keys):
            if IDENTIFIER.fullmatch(key) is None:
                raise InvalidRequest(
                    f"{tool.name}: this model can't write a parameter called {key[:64]!r}", param="tools"
                )
            value = value_rule(properties_of(schema)[key], schema, PYTHON)
            rules[f"{prefix}_p{index}"] = f"{literal(key + '=')} ({value})"
        if takes_others(schema):
            one = 'PY_KEY "=" py_any'
            return CallRules(f"{escaped(tool.name)}\\(", f'({one} (PY_COMMA {one})*)? ")"', rules)
        arguments = in_order([key in required_of(schema) for key in keys], prefix, "PY_COMMA", rules)
        return CallRules(f"{escaped(tool.name)}\\(", f'{arguments} ")"', rules)

    def read(self, source: Source, tools: Mapping[str, Tool], sink: DeltaSink) -> Reading[None]:
        name = yield from take_name(source, tools)
        yield from expect(source, "(")
        source.commit()
        sink.begin_call(name)
        separator = "{"
        while True:
            yield from skip_any_space(source)
            key = yield from take_run(source, KEY_CHARS, MAX_NAME_CHARS)
            yield from skip_any_space(source)
            if key and (yield from found(source, "=")):
                yield from skip_any_space(source)
                before = f"{separator}{json_string(key)}: "
                yield from _read_value(source, kinds_of_property(key, tools[name].schema), before, sink)
                separator = ", "
            yield from _copy_value(source, nowhere)  # skip anything but a keyword argument
            if (yield from found(source, ")")):
                sink.arguments("{}" if separator == "{" else "}")
                sink.end_call()
                return
            if not (yield from found(source, ",")):
                return


def _read_value(source: Source, kinds: frozenset[str], before: str, sink: DeltaSink) -> Reading[None]:
    char = yield from peek(source)
    if char and char in "\"'":
        is_long = yield from found(source, char * 3)
        source.at += 0 if is_long else 1
        sink.arguments(f'{before}"')
        if (yield from _copy_string(source, char * 3 if is_long else char, sink)):
            sink.arguments('"')
        return
    value: list[str] = []
    yield from _copy_value(source, value.append)
    if (yield from peek(source)):
        sink.arguments(before + from_argument("".join(value), kinds))


def _copy_string(source: Source, quote: str, sink: DeltaSink) -> Reading[bool]:
    """Show the inside of a Python string as the inside of a JSON string. Return whether the string is complete."""
    while char := (yield from peek(source)):
        if (yield from found(source, quote)):
            return True
        source.at += 1
        if char != "\\":
            sink.arguments(json_inside(char))
        elif kind := (yield from peek(source)):
            source.at += 1
            size = HEX_ESCAPES.get(kind, 0)
            digits = yield from take_run(source, HEX_CHARS, size)
            if len(digits) < size and not (yield from peek(source)):
                return False
            sink.arguments(escaped_char(kind, digits))
    return False


def _copy_value(source: Source, show: Callable[[str], None]) -> Reading[None]:
    """Show an argument's text up to its end. Nested brackets and strings belong to the argument."""
    open_brackets: list[str] = []
    quote = ""
    while char := (yield from peek(source)):
        if quote:
            if char == "\\":
                show(source.take_text(source.at + 1))
                char = yield from peek(source)
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in CLOSERS:
            open_brackets.append(CLOSERS[char])
        elif open_brackets and char == open_brackets[-1]:
            open_brackets.pop()
        elif not open_brackets and char in ",)":
            return
        show(source.take_text(source.at + len(char)))
