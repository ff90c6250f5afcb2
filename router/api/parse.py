"""Parse a body by its FieldTable.

bytes -> strict decoder -> body                                   served fields only, as in most requests
   '---> any JSON -> pruned of nulls and other fields -> converted -> body, and the ignored fields
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Generic

import msgspec
from msgspec import inspect

from router.api.fields import B, FieldTable
from shared.core.errors import InvalidRequest

# msgspec's errors quote whole values, so the patterns trust only a text's start and end
_PATH = re.compile(r"(.*) - at `\$\.?([^`]*)`", re.DOTALL)
_NAMED = re.compile(r"Object (?:contains unknown|missing required) field `(.*)`", re.DOTALL)
MAX_SHOWN = 200
MAX_PRUNED = 1000  # beyond this number of unknown fields, inner ones are not recorded


@dataclass(frozen=True, slots=True)
class Parsed(Generic[B]):
    """`ignored`: paths of fields without effect, such as messages[0].cache_control."""

    body: B
    ignored: tuple[str, ...] = ()


class BodyParser(Generic[B]):
    """Stateless. `strict`: refuse unknown fields."""

    def __init__(self, table: FieldTable[B], *, strict: bool = False) -> None:
        self._table = table
        self._strict = strict
        table.check_fields()
        self._decoder = msgspec.json.Decoder(table.served)
        self._shape = inspect.type_info(table.served)

    def parse(self, raw: bytes) -> Parsed[B]:
        """Raise InvalidRequest, which names the first invalid field."""
        try:
            return Parsed(self._decoder.decode(raw))
        except msgspec.ValidationError:
            return self._lenient(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise not_json(error) from error

    def _lenient(self, raw: bytes) -> Parsed[B]:
        others: list[str] = []
        try:
            sent = msgspec.json.decode(raw)
            body = msgspec.convert(prune(sent, self._shape, "", others), self._table.served)
        except msgspec.ValidationError as error:
            raise field_error(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise not_json(error) from error
        return Parsed(body, tuple(name for name in others if self._is_ignored(name, sent)))

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


def prune(value: object, kind: inspect.Type, path: str, unknown: list[str]) -> object:
    """Return the value without nulls and unknown members, whose names go to `unknown`."""
    if isinstance(value, dict):
        struct = next((one for one in alternatives(kind) if isinstance(one, inspect.StructType)), None)
        return value if struct is None else prune_object(value, struct, path, unknown)
    if isinstance(value, list):
        items = next((one.item_type for one in alternatives(kind) if isinstance(one, inspect.ListType)), None)
        if items is not None:
            return [prune(item, items, f"{path}[{index}]", unknown) for index, item in enumerate(value)]
    return value


def prune_object(value: dict[str, Any], struct: inspect.StructType, path: str, unknown: list[str]) -> dict[str, object]:
    fields = {one.encode_name: one.type for one in struct.fields}
    kept: dict[str, object] = {}
    for name, item in value.items():
        if item is None:
            continue
        if name in fields:
            kept[name] = prune(item, fields[name], joined(path, name), unknown)
        elif not path or len(unknown) < MAX_PRUNED:
            unknown.append(joined(path, shorten(name)))
    return kept


def joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def alternatives(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


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


def shorten(text: str) -> str:
    """Cut long text, because errors may quote a megabyte."""
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
