"""Calls with JSON arguments, which are passed on unchanged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from router.tools.call_shape import (
    HEAD_SPACES,
    SPACES,
    CallRules,
    Markers,
    escaped,
    json_rule,
    regex,
)
from router.tools.declared import Tool
from router.tools.deltas import DeltaSink
from router.tools.reading import (
    MAX_NAME_CHARS,
    NAME_CHARS,
    NotACall,
    Reading,
    Source,
    copy_json,
    expect,
    found,
    nowhere,
    peek,
    skip_any_space,
    skip_space,
    take_name,
    take_run,
)

LEADING_MEMBER = ("type", "function")  # models may write this member first
ARGUMENTS = frozenset({"arguments", "parameters"})  # models write either name
CALL_ID_CHARS = r"[a-zA-Z0-9]{9}"


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Calls like `{"name": "f", "arguments": {...}}`. `arguments`: the model's name for the member `arguments`."""

    arguments: str
    markers: tuple[str, ...] = ()

    def rules(self, tool: Tool, prefix: str, markers: Markers) -> CallRules:
        colon, comma = f"{HEAD_SPACES}:{HEAD_SPACES}", f"{HEAD_SPACES},{HEAD_SPACES}"
        head = f'[{{]{HEAD_SPACES}("type"{colon}"function"{comma})?"name"{colon}"{escaped(tool.name)}"'
        arguments = regex(f'{SPACES},{SPACES}"{self.arguments}"{SPACES}:{SPACES}')
        rest = f"{arguments} {prefix}_json {regex(SPACES, '[}]')}"
        return CallRules(head, rest, {f"{prefix}_json": json_rule(tool.schema, is_strict=tool.is_strict)})

    def read(self, source: Source, tools: Mapping[str, Tool], sink: DeltaSink) -> Reading[None]:
        name = yield from self._name(source, tools)
        if name not in tools:
            raise NotACall
        source.commit()
        sink.begin_call(name)
        yield from self._members(source, sink)

    def _name(self, source: Source, tools: Collection[str]) -> Reading[str]:
        yield from expect(source, "{")
        while True:
            yield from skip_space(source)
            key = yield from _string_among(source, ("name", LEADING_MEMBER[0]))
            yield from skip_space(source)
            yield from expect(source, ":")
            yield from skip_space(source)
            value = yield from _string_among(source, tools if key == "name" else LEADING_MEMBER[1:])
            if key == "name":
                return value
            if (key, value) != LEADING_MEMBER:
                raise NotACall
            yield from skip_space(source)
            yield from expect(source, ",")

    def _members(self, source: Source, sink: DeltaSink) -> Reading[None]:
        has_arguments = False
        while True:
            yield from skip_any_space(source)
            if not (yield from found(source, ",")):
                if not has_arguments and (yield from peek(source)):
                    sink.arguments("{}")
                    sink.end_call()
                yield from found(source, "}")
                return
            yield from skip_any_space(source)
            key: list[str] = []
            yield from _value(source, key.append)
            yield from skip_any_space(source)
            yield from found(source, ":")
            yield from skip_any_space(source)
            is_object = (yield from peek(source)) == "{"
            if "".join(key).strip('"') in ARGUMENTS and is_object and not has_arguments:
                has_arguments = True
                if not (yield from copy_json(source, sink.arguments)):
                    return
                sink.end_call()
            else:
                yield from _value(source, nowhere)


@dataclass(frozen=True, slots=True)
class NamedJsonCalls:
    """Calls like `name[ARGS]{...}` or `name[CALL_ID]id[ARGS]{...}`. The marks in brackets may be special tokens."""

    arguments: str
    call_id: str

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.call_id, self.arguments)

    def rules(self, tool: Tool, prefix: str, markers: Markers) -> CallRules:
        ids = [f"({markers.rule(mark)} {regex(CALL_ID_CHARS)})?" for mark in markers.written_if_any([self.call_id])]
        rest = " ".join((*ids, markers.rule(self.arguments), f"{prefix}_json"))
        return CallRules(escaped(tool.name), rest, {f"{prefix}_json": json_rule(tool.schema, is_strict=tool.is_strict)})

    def read(self, source: Source, tools: Mapping[str, Tool], sink: DeltaSink) -> Reading[None]:
        name = yield from take_name(source, tools)
        if name not in tools:
            raise NotACall
        if (yield from found(source, self.call_id)):
            yield from take_run(source, NAME_CHARS, MAX_NAME_CHARS)
        yield from found(source, self.arguments)  # the text lacks this mark if it shows no special tokens
        yield from skip_space(source)
        if (yield from peek(source)) != "{":
            raise NotACall
        source.commit()
        sink.begin_call(name)
        if (yield from copy_json(source, sink.arguments)):
            sink.end_call()


def _string_among(source: Source, names: Collection[str]) -> Reading[str]:
    """Return a string that begins one of `names`. Raise NotACall for another value."""
    yield from expect(source, '"')
    text = yield from take_name(source, names)
    yield from expect(source, '"')
    return text


def _value(source: Source, show: Callable[[str], None]) -> Reading[None]:
    """Show the next JSON value. An invalid value ends at white space, a comma, a colon or a closing bracket."""
    while (char := (yield from peek(source))) and char not in ",:}]" + " \t\r\n":
        if char in "{[":
            yield from copy_json(source, show)
        elif char == '"':
            yield from _string(source, show)
        else:
            show(source.take_text(source.at + 1))


def _string(source: Source, show: Callable[[str], None]) -> Reading[None]:
    show(source.take_text(source.at + 1))
    while char := (yield from peek(source)):
        show(source.take_text(source.at + 1))
        if char == '"':
            return
        if char == "\\" and (yield from peek(source)):
            show(source.take_text(source.at + 1))
