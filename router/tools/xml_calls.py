"""Calls with tags: `<function=f><parameter=a>value</parameter></function>`.

The schema decides a value's JSON type. Strings are streamed. Other values arrive whole, because their type is certain
only at their end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.tools.call_shape import (
    MAX_CHOICES,
    SPACES,
    CallRules,
    Markers,
    escaped,
    json_rule,
    literal,
    regex,
)
from router.tools.declared import Tool
from router.tools.deltas import DeltaSink
from router.tools.literals import from_tagged, json_inside, json_string
from router.tools.reading import (
    NotACall,
    Reading,
    Source,
    copy_json,
    copy_until,
    expect,
    found,
    peek,
    skip_any_space,
    take_name,
)
from router.tools.schemas import (
    UNKNOWN,
    choices_of,
    kinds_of,
    kinds_of_property,
    properties_of,
    required_of,
    resolved,
    standing_alone,
    takes_others,
)
from shared.core.errors import InvalidRequest

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
ANY_KEY = r"[^>\n\r]{1,64}"
TEXT_RULE = {"xml_text[lazy]": f"/(?s:.*)/ {literal(PARAMETER_END)}"}  # the reader also ends text at PARAMETER_END
ONLY_TEXT = frozenset({"string"})


@dataclass(frozen=True, slots=True)
class XmlCalls:
    """`padding`: text before and after each value. `ends`: text that always ends a call."""

    padding: str
    ends: str
    markers: tuple[str, ...] = ()

    def rules(self, tool: Tool, prefix: str, markers: Markers) -> CallRules:
        schema = tool.schema
        rules = dict(TEXT_RULE)
        parts: list[str] = []
        for index, (key, value) in enumerate(properties_of(schema).items()):
            if not key or any(char in ">\r\n" for char in key):
                raise InvalidRequest(
                    f"{tool.name}: this model can't write a parameter called {key[:64]!r}", param="tools"
                )
            name = f"{prefix}_p{index}"
            opened = regex(SPACES, escaped(f"{PARAMETER}{key}>{self.padding}"))
            rules[name] = f"{opened} {self._value_rule(f'{name}_json', value, tool, rules)}"
            parts.append(name if key in required_of(schema) else f"{name}?")
        if takes_others(schema):
            opened = regex(SPACES, PARAMETER, ANY_KEY, ">", escaped(self.padding))
            parts.append(f"({opened} xml_text)*")
        rest = " ".join((*parts, regex(SPACES, FUNCTION_END)))
        return CallRules(f"{FUNCTION}{escaped(tool.name)}>", rest, rules)

    def _value_rule(self, name: str, schema: object, tool: Tool, rules: dict[str, str]) -> str:
        end = literal(self.padding + PARAMETER_END)
        kinds = kinds_of(schema, tool.schema)
        if kinds == ONLY_TEXT:
            choices = _texts_of(resolved(schema, tool.schema))
            if choices:
                return f"({' | '.join(map(literal, choices))}) {end}"
        if kinds == UNKNOWN or "string" in kinds:
            return "xml_text"
        rules[name] = json_rule(standing_alone(schema, tool.schema), is_strict=tool.is_strict)
        return f"{name} {end}"

    def read(self, source: Source, tools: Mapping[str, Tool], sink: DeltaSink) -> Reading[None]:
        yield from expect(source, FUNCTION)
        name = yield from take_name(source, tools)
        yield from expect(source, ">")
        if name not in tools:
            raise NotACall
        source.commit()
        sink.begin_call(name)
        separator = "{"
        while True:
            yield from skip_any_space(source)
            if (yield from found(source, PARAMETER)):
                key: list[str] = []
                yield from copy_until(source, (">",), key.append)
                before = f"{separator}{json_string(''.join(key))}: "
                yield from self._read_value(source, kinds_of_property("".join(key), tools[name].schema), before, sink)
                separator = ", "
            elif (yield from found(source, FUNCTION_END)) or (yield from self._is_left(source)):
                sink.arguments("{}" if separator == "{" else "}")
                sink.end_call()
                return
            elif (yield from peek(source)):
                source.at += 1  # skip other text between parameters
            else:
                return

    def _is_left(self, source: Source) -> Reading[bool]:
        """Whether the call ends here without FUNCTION_END. The position does not change."""
        is_there = yield from found(source, self.ends)
        source.at -= len(self.ends) * is_there
        return is_there

    def _read_value(self, source: Source, kinds: frozenset[str], before: str, sink: DeltaSink) -> Reading[None]:
        ends = (self.padding + PARAMETER_END, PARAMETER_END)
        if not (yield from peek(source)):
            return
        yield from found(source, self.padding)
        if kinds == ONLY_TEXT:
            sink.arguments(f'{before}"')
            yield from _copy_text(source, ends, sink)
            return
        value: list[str] = []
        # a value that may be text ends at the first mark
        is_json = kinds != UNKNOWN and "string" not in kinds
        is_whole = is_json and (yield from _copy_list_or_object(source, value))
        if is_whole or (yield from copy_until(source, ends, value.append)):
            sink.arguments(before + from_tagged("".join(value), kinds))


def _copy_list_or_object(source: Source, value: list[str]) -> Reading[bool]:
    """Copy a list or object, and move past PARAMETER_END. Change nothing if other text follows."""
    source.mark()
    yield from skip_any_space(source)
    if (yield from peek(source)) in ("[", "{") and (yield from copy_json(source, value.append)):
        yield from skip_any_space(source)
        if (yield from found(source, PARAMETER_END)):
            source.commit()
            return True
    source.rewind()
    value.clear()
    return False


def _texts_of(schema: object) -> list[str]:
    choices = (choices_of(schema) if isinstance(schema, Mapping) else None) or []
    texts = [choice for choice in choices if isinstance(choice, str) and PARAMETER_END not in choice]
    return texts if len(texts) <= MAX_CHOICES else []


def _copy_text(source: Source, ends: Sequence[str], sink: DeltaSink) -> Reading[None]:
    """Show text as the inside of a JSON string. Hold back text that may begin an end mark."""

    def show(text: str) -> None:
        sink.arguments(json_inside(text))

    if (yield from copy_until(source, ends, show, shows_half_mark=False)):
        sink.arguments('"')
