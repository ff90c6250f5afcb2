"""Calls with tags around each argument: `<function=f><parameter=a>value</parameter></function>`.

The schema decides a value's JSON type, or an attribute of its tag does. Strings are streamed. Other values arrive
whole, because their type is certain only at their end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.tools.calls.call_shape import (
    MAX_CHOICES,
    CallRules,
    Markers,
    escaped,
    json_rule,
    literal,
    regex,
)
from router.tools.calls.deltas import DeltaSink
from router.tools.calls.literals import from_tagged, json_inside, json_string
from router.tools.calls.nested_tags import ITEM, NestedTags
from router.tools.calls.reading import (
    MAX_NAME_CHARS,
    SPACE,
    NotACall,
    Reading,
    Source,
    copy_json,
    copy_until,
    expect,
    found,
    nowhere,
    peek,
    skip_any_space,
    stands_here,
    take_name,
)
from router.tools.schemas.declared import Tool
from router.tools.schemas.schemas import (
    KINDS,
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

KEY = "{key}"  # stands for the argument's name in a mark
ONLY_TEXT = frozenset({"string"})
NO_TEXT = KINDS - ONLY_TEXT
MAX_NESTED = 4  # levels of members that a grammar enforces
CDATA, CDATA_END = "<![CDATA[", "]]>"


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """A call: `opens` NAME `named` (`key` KEY `keyed` VALUE `value_ends`)... `ends`.

    `named` and `keyed` are marks in their order, each behind optional white space. Between the marks of `keyed`, or of
    `named`, attributes may stand: `type_texts` has the texts that grammars write for each JSON kind of a value ("": any
    other kind), `call_attribute` is a regular expression. `padding`: text before and after each value. `left_at`: marks
    outside the call, before which a call ends without `ends`. `nests`: whether objects and lists are written as tags,
    too, with `key` and `value_ends` for each member. `value_ends` may hold {key}. `has_cdata`: whether a value may
    stand in CDATA.
    """

    key: str
    keyed: tuple[str, ...]
    value_ends: str
    opens: str = ""
    named: tuple[str, ...] = ()
    ends: str = ""
    padding: str = ""
    left_at: tuple[str, ...] = ()
    type_texts: Mapping[str, str] = field(default_factory=dict)
    call_attribute: str = ""
    nests: bool = False
    has_cdata: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.opens, *self.named, self.key, *self.keyed, self.value_ends, self.ends)))

    # ---- grammar

    def rules(self, tool: Tool, prefix: str, markers: Markers) -> CallRules:
        schema = tool.schema
        rules: dict[str, str] = {}
        parts = [*self._named_rules(markers)]
        for index, (key, value) in enumerate(properties_of(schema).items()):
            if not key or any(char in '<>"\r\n' for char in key):
                raise InvalidRequest(
                    f"{tool.name}: this model can't write a parameter called {key[:64]!r}", param="tools"
                )
            name = f"{prefix}_p{index}"
            rules[name] = self._argument(key, literal(key), value, name, tool, rules, markers)
            parts.append(name if key in required_of(schema) else f"{name}?")
        if takes_others(schema) and KEY not in self.value_ends:
            other = f"{prefix}_other"
            rules[other] = self._argument("", regex(r'[^<>"\n\r]{1,64}'), {}, other, tool, rules, markers)
            parts.append(f"{other}*")
        if self.ends:
            parts.append(markers.rule(self.ends, spaced=True))
        lead = markers.rule(self.opens, spaced=True) if self.opens else ""
        return CallRules(escaped(tool.name), " ".join(parts) or '""', rules, lead)

    def _named_rules(self, markers: Markers) -> Iterator[str]:
        for index, mark in enumerate(self.named):
            if index and self.call_attribute:
                yield regex(self.call_attribute)
            yield markers.rule(mark)

    def _argument(
        self, key: str, key_rule: str, schema: object, name: str, tool: Tool, rules: dict[str, str], markers: Markers
    ) -> str:
        kinds = kinds_of(schema, tool.schema)
        begin = f"{markers.rule(self.key, spaced=True)} {key_rule} {markers.rule(self.keyed[0])}"
        padding = [literal(self.padding)] if self.padding else []
        end = " ".join([*(markers.rule(mark, spaced=True) for mark in self.keyed[1:]), *padding])
        if self.type_texts and (kinds == UNKNOWN or ("string" in kinds and kinds != ONLY_TEXT)):
            text_rule = self._text_rule(f"{name}_text", key, rules, markers)
            as_text = f"{literal(self._type_text('string'))} {end} {text_rule}"
            rules[f"{name}_any"] = json_rule({"type": sorted((kinds or KINDS) - ONLY_TEXT)}, is_strict=False)
            value_end = markers.rule(self._value_end(key))
            others = dict.fromkeys(self._type_text(kind) for kind in sorted((kinds or KINDS) - ONLY_TEXT))
            as_json = f"({' | '.join(map(literal, others))}) {end} {name}_any {value_end}"
            return f"{begin} ({as_text} | {as_json})"
        texts = dict.fromkeys(self._type_text(kind) for kind in sorted(kinds)) if self.type_texts else ()
        if texts:
            begin += f" ({' | '.join(map(literal, texts))})"
        return f"{begin} {end} {self._value_rule(f'{name}_value', key, schema, tool, rules, markers)}"

    def _type_text(self, kind: str) -> str:
        return self.type_texts.get(kind, self.type_texts.get("", ""))

    def _value_end(self, key: str) -> str:
        return self.padding + self.value_ends.replace(KEY, key)

    def _text_rule(self, name: str, key: str, rules: dict[str, str], markers: Markers) -> str:
        """Text up to the end mark. The reader also ends text at a mark without padding."""
        markers.up_to(name, self.value_ends.replace(KEY, key), rules)
        return name

    def _value_rule(
        self, name: str, key: str, schema: object, tool: Tool, rules: dict[str, str], markers: Markers
    ) -> str:
        kinds = kinds_of(schema, tool.schema)
        if kinds == ONLY_TEXT:
            choices = _texts_of(resolved(schema, tool.schema), self.value_ends.replace(KEY, key))
            if choices:
                return f"({' | '.join(map(literal, choices))}) {markers.rule(self._value_end(key))}"
        if (
            self.nests
            and kinds in ({"array"}, {"object"})
            and (nested := self._members_rule(name, kinds, schema, tool, rules, markers))
        ):
            return f"{nested} {markers.rule(self._value_end(key), spaced=True)}"
        is_nested = self.nests and not kinds.isdisjoint({"array", "object"})
        if kinds == UNKNOWN or "string" in kinds or is_nested:
            return self._text_rule(f"{name}_text", key, rules, markers)
        rules[name] = json_rule(standing_alone(schema, tool.schema), is_strict=tool.is_strict)
        return f"{name} {markers.rule(self._value_end(key))}"

    def _members_rule(
        self, name: str, kinds: frozenset[str], schema: object, tool: Tool, rules: dict[str, str], markers: Markers
    ) -> str:
        """Return the rule for the members of a list or object; "" if the schema lacks them, or nests deep."""
        target = resolved(schema, tool.schema)
        assert isinstance(target, Mapping)
        is_list = kinds == {"array"}
        members = {ITEM: target.get("items")} if is_list else properties_of(target)
        if name.count("_m") >= MAX_NESTED or not all(members.values()):
            return ""
        parts = []
        for index, (key, inner) in enumerate(members.items()):
            member = f"{name}_m{index}"
            rules[member] = self._argument(key, literal(key), inner, member, tool, rules, markers)
            parts.append(member + ("*" if is_list else "" if key in required_of(target) else "?"))
        return " ".join(parts)

    # ---- reader

    def read(self, source: Source, tools: Mapping[str, Tool], sink: DeltaSink) -> Reading[None]:
        yield from expect(source, self.opens)
        name = yield from take_name(source, tools)
        for index, mark in enumerate(self.named):
            if index:
                if not (yield from copy_until(source, (mark,), nowhere)):
                    source.met_end = True
                    raise NotACall
            else:
                yield from expect(source, mark)
        if not self.named and not (yield from self._follows(source)):
            raise NotACall
        source.commit()
        sink.begin_call(name)
        yield from self._arguments(source, tools[name], sink)

    def _follows(self, source: Source) -> Reading[bool]:
        """Whether an argument or the call's end follows. The position does not change."""
        skipped = 0  # positions change while a reader waits for text, so no position is kept
        while (char := (yield from peek(source))) and char in SPACE:
            skipped += 1
            source.at += 1
        is_there = yield from stands_here(source, (self.key, *self.left_at))
        source.at -= skipped
        return is_there

    def _arguments(self, source: Source, tool: Tool, sink: DeltaSink) -> Reading[None]:
        separator = "{"
        while True:
            yield from skip_any_space(source)
            if self.ends and (yield from found(source, self.ends)):
                break
            if (yield from stands_here(source, self.left_at)):  # the call ends without its end
                break
            if (yield from found(source, self.key)):
                if (yield from self._argument_read(source, tool, separator, sink)):
                    separator = ", "
            elif (yield from peek(source)):
                source.at += 1  # skip other text between arguments
            else:
                return
        sink.arguments("{}" if separator == "{" else "}")
        sink.end_call()

    def _argument_read(self, source: Source, tool: Tool, separator: str, sink: DeltaSink) -> Reading[bool]:
        """Return whether the key was complete."""
        key: list[str] = []
        attributes: list[str] = []
        found_mark = yield from copy_until(source, (self.keyed[0],), key.append)
        for mark in self.keyed[1:]:
            found_mark = found_mark and (yield from copy_until(source, (mark,), attributes.append))
        name = "".join(key).strip()
        if not found_mark or len(name) > MAX_NAME_CHARS * 8:
            return False
        kinds = self._kinds(name, "".join(attributes), tool)
        yield from self._read_value(source, name, kinds, tool, f"{separator}{json_string(name)}: ", sink)
        return True

    def _kinds(self, key: str, attributes: str, tool: Tool) -> frozenset[str]:
        if self.type_texts and attributes.strip():
            text = self._type_text("string").strip()
            return ONLY_TEXT if text in attributes else kinds_of_property(key, tool.schema) - ONLY_TEXT or NO_TEXT
        return kinds_of_property(key, tool.schema)

    def _read_value(
        self, source: Source, key: str, kinds: frozenset[str], tool: Tool, before: str, sink: DeltaSink
    ) -> Reading[None]:
        end = self.value_ends.replace(KEY, key)
        ends = (self.padding + end, end) if self.padding else (end,)
        if not (yield from peek(source)):
            return
        yield from found(source, self.padding)
        if self.has_cdata and (yield from found(source, CDATA)):
            sink.arguments(f'{before}"')
            yield from copy_text(source, (CDATA_END,), sink)
            yield from copy_until(source, ends, nowhere)
            return
        if self.has_cdata and source.has_ended and CDATA.startswith(source.text[source.at :]):
            return
        if kinds == ONLY_TEXT:
            sink.arguments(f'{before}"')
            yield from copy_text(source, ends, sink)
            return
        value: list[str] = []
        # a value that may be text ends at the first mark
        is_json = kinds != UNKNOWN and "string" not in kinds
        if is_json and (yield from _copy_list_or_object(source, value, end)):
            sink.arguments(before + from_tagged("".join(value), kinds))
        elif self.nests:
            yield from self._read_nested(source, key, tool, before, sink)
        elif (yield from copy_until(source, ends, value.append)):
            sink.arguments(before + from_tagged("".join(value), kinds))

    def _read_nested(self, source: Source, key: str, tool: Tool, before: str, sink: DeltaSink) -> Reading[None]:
        """Read a value that may hold members, also with its own name."""
        nested = NestedTags(self.key, self.keyed[-1], self.value_ends)
        end = nested.end_of(key)
        value: list[str] = []
        num_open = 1
        while True:
            inside: list[str] = []
            if not (yield from copy_until(source, (end,), inside.append)):
                return
            value += inside
            num_open += nested.num_begun("".join(inside), key) - 1
            if num_open == 0:
                break
            value.append(end)
        sink.arguments(before + nested.as_json("".join(value), properties_of(tool.schema).get(key), tool.schema))


def invoke_calls(mark: str, left_at: str, *, opens: str = "", ends: str = "", **more: Any) -> TaggedCalls:
    """Return the shape of `<invoke name="f"><parameter name="a">value</parameter></invoke>`.

    `mark`: what begins the name of each tag. `opens`, `ends`: text before and behind the call."""
    return TaggedCalls(
        opens=f'{opens}<{mark}invoke name="',
        named=('"', ">"),
        key=f'<{mark}parameter name="',
        keyed=('"', ">"),
        value_ends=f"</{mark}parameter>",
        ends=f"</{mark}invoke>{ends}",
        left_at=(left_at,),
        **more,
    )


def _copy_list_or_object(source: Source, value: list[str], end: str) -> Reading[bool]:
    """Copy a list or object, and move past the end mark. Change nothing if other text follows."""
    source.mark()
    yield from skip_any_space(source)
    if (yield from peek(source)) in ("[", "{") and (yield from copy_json(source, value.append)):
        yield from skip_any_space(source)
        if (yield from found(source, end)):
            source.commit()
            return True
    source.rewind()
    value.clear()
    return False


def _texts_of(schema: object, end: str) -> list[str]:
    choices = (choices_of(schema) if isinstance(schema, Mapping) else None) or []
    texts = [choice for choice in choices if isinstance(choice, str) and end not in choice]
    return texts if len(texts) <= MAX_CHOICES else []


def copy_text(source: Source, ends: Sequence[str], sink: DeltaSink) -> Reading[None]:
    """Show text as the inside of a JSON string. Hold back text that may begin an end mark."""

    def show(text: str) -> None:
        sink.arguments(json_inside(text))

    if (yield from copy_until(source, ends, show, shows_half_mark=False)):
        sink.arguments('"')
