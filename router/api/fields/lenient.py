"""Read the values of a body as clients send them, led by the types of its fields.

    null, unknown members         left out; the unknown ones are named
    8.0 where integers are meant  8
    "0.7" where numbers are       0.7, unless the server is strict: OpenAI's API refuses it, vLLM and SGLang take it
    half a surrogate pair         U+FFFD

Knows no field by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import inspect

MAX_SHOWN = 200
MAX_PRUNED = 1000  # beyond this number of unknown fields, inner ones are not recorded
MOST_DIGITS = 64  # characters of a number as text
LEAST_INEXACT = 1 << 53  # from here on a float may stand for several integers
NUMBERS, TEXTS = {inspect.IntType, inspect.FloatType}, {inspect.StrType, inspect.LiteralType}
HALF = re.compile(rb"\\u[dD][89a-fA-F]")
# A pair, half a pair, or any other escape. Other escapes are matched so that the text `\\ud800` is left alone.
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)


def with_whole_characters(raw: bytes) -> bytes:
    """Return the JSON text with U+FFFD for each escaped half of a surrogate pair. Its length stays the same."""
    if HALF.search(raw) is None:
        return raw
    # a Python function for each escape lets other threads run
    return _ESCAPE.sub(lambda found: rb"\ufffd" if found[1] else found[0], raw)


@dataclass(slots=True, eq=False)
class FieldShape:
    """What a value may be; None or False for what it can't be. A field without such a shape is never changed."""

    members: Mapping[str, FieldShape | None] | None = None
    items: FieldShape | None = None
    values: FieldShape | None = None  # of an object whose members have any names
    is_whole: bool = False  # of numbers it takes integers only
    is_number: bool = False  # it takes numbers, and no text


def shape_of(kind: inspect.Type) -> FieldShape | None:
    """Return None if no value of this type is changed."""
    wanted = FieldShape()
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    for one in kinds:
        if isinstance(one, inspect.StructType):
            wanted.members = {each.encode_name: shape_of(each.type) for each in one.fields}
        elif isinstance(one, inspect.ListType):
            wanted.items = shape_of(one.item_type)
        elif isinstance(one, inspect.DictType):
            wanted.values = shape_of(one.value_type)
    has = {type(one) for one in kinds}
    wanted.is_whole = inspect.IntType in has and inspect.FloatType not in has
    wanted.is_number = bool(has & NUMBERS) and not has & TEXTS
    parts = (wanted.members, wanted.items, wanted.values)
    return wanted if wanted.is_whole or wanted.is_number or any(part is not None for part in parts) else None


@dataclass(slots=True)
class LenientReader:
    """Reads one body. `unknown`: paths of members that no struct has."""

    takes_text: bool  # for numbers
    unknown: list[str] = field(default_factory=list)

    def read(self, value: object, wanted: FieldShape | None, path: str = "") -> object:
        """Return the value as the type wants it, where its meaning is clear. Another value stays as it is."""
        if wanted is None:
            return value
        if isinstance(value, dict):
            return self._object(value, wanted, path)
        if isinstance(value, list):
            return self._list(value, wanted.items, path)
        if isinstance(value, str) and self.takes_text and wanted.is_number:
            value = number_in(value)
        return whole(value) if isinstance(value, float) and wanted.is_whole else value

    def _list(self, value: list[Any], items: FieldShape | None, path: str) -> list[object]:
        """Integers stay as they are: token ids may be many."""
        if items is None:
            return value
        return [
            item if type(item) is int else self.read(item, items, f"{path}[{index}]")
            for index, item in enumerate(value)
        ]

    def _object(self, value: dict[str, Any], wanted: FieldShape, path: str) -> object:
        if wanted.members is None:
            own = wanted.values
            return value if own is None else {name: self.read(item, own, path) for name, item in value.items()}
        kept: dict[str, object] = {}
        for name, item in value.items():
            if item is None:
                continue
            if name in wanted.members:
                own = wanted.members[name]
                kept[name] = item if own is None else self.read(item, own, joined(path, name))
            elif not path or len(self.unknown) < MAX_PRUNED:
                self.unknown.append(joined(path, shorten(name)))
        return kept


def whole(value: float) -> float | int:
    return int(value) if value.is_integer() and abs(value) < LEAST_INEXACT else value


def number_in(text: str) -> object:
    """Return the number, or the text if it is none."""
    if len(text) > MOST_DIGITS:
        return text
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return found if type(found) in (int, float) else text


def joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def shorten(text: str) -> str:
    """Cut long text, because errors may quote a megabyte."""
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
