"""Calls with JSON arguments, which are passed on unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from router.tools.calls.call_shape import (
    HEAD_SPACES,
    SPACES,
    CallRules,
    Markers,
    escaped,
    json_rule,
    regex,
)
from router.tools.calls.deltas import DeltaSink
from router.tools.calls.literals import json_string, read_json
from router.tools.calls.reading import (
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
from router.tools.schemas.declared import Tool

CALL_ID_CHARS = "[a-zA-Z0-9]{9}"
ARGUMENTS = frozenset({"arguments", "parameters", "args"})  # models write any of these names


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Calls like `{"name": "f", "arguments": {...}}`. `arguments`, `name`, `number`: the model's names of the members.

    `number`: a member with the call's number, which comes first; "": the model writes none."""

    arguments: str
    name: str = "name"
    number: str = ""
    markers: tuple[str, ...] = ()

    def rules(self, tool: Tool, prefix: str, markers: Markers) -> CallRules:
        colon, comma = f"{HEAD_SPACES}:{HEAD_SPACES}", f"{HEAD_SPACES},{HEAD_SPACES}"
        first = f'("type"{colon}"function"{comma})?'
        if self.number:
            first = f'"{self.number}"{colon}"[0-9]{{1,3}}"{comma}'
        head = f'[{{]{HEAD_SPACES}{first}"{self.name}"{colon}"{escaped(tool.name)}"'
        arguments = regex(f'{SPACES},{SPACES}"{self.arguments}"{SPACES}:{SPACES}')
        rest = f"{arguments} {prefix}_json {regex(SPACES, '[}]')}"
        return CallRules(head, rest, {f"{prefix}_json": json_rule(tool.schema, is_strict=tool.is_strict)})

    def read(self, source: Source, tools: Mapping[str, Tool], sink: DeltaSink) -> Reading[None]:
        name = yield from self.read_name(source, tools)
        source.commit()
        sink.begin_call(name)
        yield from _members(source, sink)

    def read_name(self, source: Source, tools: Collection[str]) -> Reading[str]:
        """Read up to a declared tool's name. Raise NotACall for another text."""
        yield from expect(source, "{")
        while True:
            yield from skip_space(source)
            key = yield from _string_among(source, tuple(filter(None, (self.name, self.number, "type"))))
            yield from skip_space(source)
            yield from expect(source, ":")
            yield from skip_space(source)
            if key == self.name:
                return (yield from _string_among(source, tools))
            if key == "type":
                yield from _string_among(source, ("function",))
            else:
                yield from _short_value(source)
            yield from skip_space(source)
            yield from expect(source, ",")


@dataclass(frozen=True, slots=True)
class NamedJsonCalls:
    """Calls like `name[ARGS]{...}`: a name and JSON between marks. White space around marks does not count.

    `before`: marks before the name; an id stands between the first and the second one, if there are two. `between`: the
    mark between name and JSON; readers also take calls without it. `after`: the mark behind the JSON. `id_mark`: an id
    of nine letters and digits may follow this mark behind the name. `number`: the call's number may, behind this text.
    """

    between: str
    before: tuple[str, ...] = ()
    after: str = ""
    id_mark: str = ""
    number: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (*self.before, self.id_mark, self.between, self.after)))

    def rules(self, tool: Tool, prefix: str, markers: Markers) -> CallRules:
        lead = [markers.rule(mark, spaced=True) for mark in self.before]
        lead[1:1] = [regex("[a-zA-Z0-9_-]{1,64}")] * (len(lead) > 1)
        ids = self.id_mark and markers.written_if_any([self.id_mark])
        id_rule = f"({markers.rule(self.id_mark)} {regex(CALL_ID_CHARS)})?" if ids else ""
        if self.number:
            id_rule = f"({regex(escaped(self.number), '[0-9]{1,4}')})?"
        after = markers.rule(self.after, spaced=True) if self.after else ""
        rules = {f"{prefix}_json": json_rule(tool.schema, is_strict=tool.is_strict)}
        if not lead and not id_rule:  # a bare name begins many texts, so the mark behind it belongs to the head
            return CallRules(escaped(tool.name + self.between), f"{prefix}_json {after}".rstrip(), rules)
        rest = " ".join(filter(None, (id_rule, markers.rule(self.between), f"{prefix}_json", after)))
        return CallRules(escaped(tool.name), rest, rules, " ".join(lead))

    def read(self, source: Source, tools: Mapping[str, Tool], sink: DeltaSink) -> Reading[None]:
        for index, mark in enumerate(self.before):
            if index:
                yield from take_run(source, NAME_CHARS, MAX_NAME_CHARS)
            yield from skip_space(source)
            yield from expect(source, mark.strip())
        yield from skip_space(source)
        name = yield from take_name(source, tools)
        for mark in filter(None, (self.id_mark, self.number)):
            if (yield from found(source, mark)):
                yield from take_run(source, NAME_CHARS, MAX_NAME_CHARS)
        yield from skip_space(source)
        yield from found(source, self.between.strip())
        yield from skip_space(source)
        if (yield from peek(source)) != "{":
            raise NotACall
        source.commit()
        sink.begin_call(name)
        if (yield from copy_json(source, sink.arguments)):
            sink.end_call()
            if self.after:
                yield from _skip_if_there(source, self.after.strip())


def _skip_if_there(source: Source, mark: str) -> Reading[None]:
    source.mark()
    yield from skip_any_space(source)
    if (yield from found(source, mark)):
        source.commit()
    else:
        source.rewind()


def _members(source: Source, sink: DeltaSink) -> Reading[None]:
    """Read the members behind a call's name, up to the object's end."""
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
        first = yield from peek(source)
        if "".join(key).strip('"') not in ARGUMENTS or has_arguments:
            yield from _value(source, nowhere)
            continue
        has_arguments = True
        if first == "{":
            if not (yield from copy_json(source, sink.arguments)):
                return
        else:
            value: list[str] = []
            yield from _value(source, value.append)
            if not (yield from peek(source)):
                return  # it may be cut off
            sink.arguments(_object_in("".join(value)))
        sink.end_call()


def _object_in(value: str) -> str:
    """Return the object in a JSON string, as OpenAI's API writes arguments. Keep any other value under a name."""
    try:
        given = read_json(value)
    except ValueError:
        value, given = json_string(value), value
    if isinstance(given, str):
        with contextlib.suppress(ValueError):
            if isinstance(read_json(given), dict):
                return given
    is_nothing = given is None or (isinstance(given, str) and given.strip('" ') in ("", "null"))
    return "{}" if is_nothing else f'{{"arguments": {value}}}'


def _string_among(source: Source, names: Collection[str]) -> Reading[str]:
    """Return the one of `names` that stands here as a string. Raise NotACall for another value."""
    yield from expect(source, '"')
    text = yield from take_name(source, names)
    yield from expect(source, '"')
    return text


def _short_value(source: Source) -> Reading[None]:
    """Skip an id or a number. Raise NotACall for anything else."""
    is_text = yield from found(source, '"')
    yield from take_run(source, NAME_CHARS, MAX_NAME_CHARS)
    if is_text:
        yield from expect(source, '"')


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
