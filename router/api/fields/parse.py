"""Parse a body by its FieldTable.

bytes -> strict decoder -> body                                   served fields and their types, as in most requests
   '---> any JSON -> read leniently (lenient.py) -> converted -> body, and the ignored fields
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Generic

import msgspec
from msgspec import inspect

from router.api.fields.fields import B, FieldTable
from router.api.fields.lenient import LenientReader, shape_of, shorten, with_whole_characters
from shared.core.errors import InvalidRequest

# msgspec's errors quote whole values, so the patterns trust only a text's start and end
_PATH = re.compile(r"(.*) - at `\$\.?([^`]*)`", re.DOTALL)
_NAMED = re.compile(r"Object (?:contains unknown|missing required) field `(.*)`", re.DOTALL)
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Parsed(Generic[B]):
    """`ignored`: paths of fields without effect, such as messages[0].cache_control."""

    body: B
    ignored: tuple[str, ...] = ()


class BodyParser(Generic[B]):
    """Stateless. `strict`: refuse unknown fields, and numbers that are sent as texts."""

    def __init__(self, table: FieldTable[B], *, strict: bool = False) -> None:
        self._table = table
        self._strict = strict
        table.check_fields()
        self._decoder = msgspec.json.Decoder(table.served)
        self._wanted = shape_of(inspect.type_info(table.served))

    def parse(self, raw: bytes) -> Parsed[B]:
        """Raise InvalidRequest, which names the first invalid field."""
        try:
            return self._read(raw)
        except NOT_JSON as error:
            mended = with_whole_characters(raw)
            if mended == raw:
                raise not_json(error) from error
        try:
            return self._read(mended)
        except NOT_JSON as error:
            raise not_json(error) from error

    def _read(self, raw: bytes) -> Parsed[B]:
        try:
            return Parsed(self._decoder.decode(raw))
        except msgspec.ValidationError:
            return self._lenient(raw)

    def _lenient(self, raw: bytes) -> Parsed[B]:
        reader = LenientReader(takes_text=not self._strict)
        try:
            sent = msgspec.json.decode(raw)
            body = msgspec.convert(reader.read(sent, self._wanted), self._table.served)
        except msgspec.ValidationError as error:
            raise field_error(str(error)) from error
        return Parsed(body, tuple(name for name in reader.unknown if self._is_ignored(name, sent)))

    def _is_ignored(self, name: str, sent: dict[str, Any]) -> bool:
        """Raise InvalidRequest for a refused field."""
        refused = self._table.refused.get(name)
        if refused is None:
            if self._strict and name not in self._table.ignored:
                raise InvalidRequest(f"{name}: unknown field `{name}`", param=name)
            return True
        if not is_one_of(sent[name], refused.harmless):
            raise InvalidRequest(f"{name} is not supported: {refused.why}", param=name)
        return False


def is_one_of(value: object, others: tuple[object, ...]) -> bool:
    """Whether the value equals one of `others`, including its type: JSON's true is not 1."""
    return any(type(value) is type(other) and value == other for other in others)


def not_json(error: Exception) -> InvalidRequest:
    if isinstance(error, RecursionError):
        return InvalidRequest("the request body is nested too deeply")
    return InvalidRequest(f"the request body is not valid JSON: {shorten(str(error))}")


def field_error(text: str) -> InvalidRequest:
    """Turn `Expected ... - at `$.messages[0].role`` into an error with param messages[0].role."""
    located = _PATH.fullmatch(text)
    what, path = (located[1], located[2]) if located else (text, "")
    named = _NAMED.fullmatch(what)
    if named:
        path = f"{path}.{named[1]}" if path else named[1]
    path = shorten(path.replace("[...]", ""))
    if not path:
        return InvalidRequest(f"the request body does not fit: {shorten(what)}")
    return InvalidRequest(f"{path}: {shorten(what)}", param=path)
