"""Turn values in models' calls into JSON. Models write them as JSON, Python or plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NoReturn

from router.tools.schemas.schemas import kind_of

MAX_DEPTH = 64
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""} | {
    char: char for char in "\\'\""
}
HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_SPACE = re.compile(r"\s*")
_TOKEN = re.compile(
    r"""(?P<number>[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<word>[A-Za-z]+)|(?P<quote>["'])|(?P<mark>.)""",
    re.DOTALL,
)


def json_inside(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def read_json(text: str) -> object:
    """Raise ValueError for anything but JSON, including NaN and deep nesting."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it nests too deep") from error


def from_tagged(text: str, kinds: frozenset[str]) -> str:
    """`kinds`: JSON types in the value's schema; an empty set allows all types."""
    if kinds == {"string"}:
        return json_string(text)
    value = from_python(text.strip())
    if value is None or (kinds and not _allows(kinds, kind_of(read_json(value)))):
        return json_string(text)
    # If strings are allowed, a quoted text keeps its quotes.
    return json_string(text) if "string" in kinds and value.startswith('"') else value


def from_argument(text: str, kinds: frozenset[str]) -> str:
    """Return a Python value as JSON. An unreadable value, or a value that must be a string, becomes a string."""
    value = from_python(text.strip())
    if value is None or kinds == {"string"}:
        return json_string(text.strip())
    return value


def from_python(text: str) -> str | None:
    """Return JSON unchanged, a Python literal as JSON, and None for other text."""
    try:
        read_json(text)
        return text
    except ValueError:
        pass
    try:
        literal = _Literal(text)
        value = literal.value(MAX_DEPTH)
        read_json(value)
        return value if literal.is_at_end() else None
    except ValueError:
        return None


def escaped_char(kind: str, digits: str) -> str:
    r"""Return a Python escape (`\`, kind, hexadecimal digits) as the inside of a JSON string."""
    if kind in HEX_ESCAPES:
        if len(digits) < HEX_ESCAPES[kind] or (code := int(digits, 16)) > 0x10FFFF:
            return json_inside("\\" + kind + digits)
        # JSON can escape half a surrogate pair, but text can't contain it
        return f"\\u{code:04x}" if 0xD800 <= code <= 0xDFFF else json_inside(chr(code))
    return json_inside(ESCAPES.get(kind, "\\" + kind))


class _Literal:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def is_at_end(self) -> bool:
        return self._at == len(self._text)

    def value(self, depth: int) -> str:
        if depth == 0:
            raise ValueError("it nests too deep")
        match = self._token()
        kind, token = match.lastgroup, match[0]
        if kind == "number":
            value = _number(token)
        elif kind == "word":
            value = WORDS.get(token) or _refuse(token)
        elif kind == "quote":
            value = self._string(token)
        elif token in "[(":
            items = self._items("])"["[(".index(token)], lambda: self.value(depth - 1))
            value = "[" + ", ".join(items) + "]"
        elif token == "{":
            value = "{" + ", ".join(self._items("}", lambda: self._pair(depth - 1))) + "}"
        else:
            _refuse(token)
        self._skip_space()
        return value

    def _items(self, closer: str, read: Callable[[], str]) -> list[str]:
        items: list[str] = []
        while not self._follows(closer):
            if items:
                self._expect(",")
                if self._follows(closer):
                    break
            items.append(read())
        return items

    def _pair(self, depth: int) -> str:
        key = self.value(depth)
        if not key.startswith('"'):
            key = json_string(key)
        self._expect(":")
        return f"{key}: {self.value(depth)}"

    def _string(self, quote: str) -> str:
        inside = ""
        while self._at < len(self._text):
            char = self._text[self._at]
            self._at += 1
            if char == quote:
                return f'"{inside}"'
            if char == "\\":
                inside += self._escape()
            else:
                inside += json_inside(char)
        raise ValueError("a string does not end")

    def _escape(self) -> str:
        kind = self._text[self._at : self._at + 1]
        size = HEX_ESCAPES.get(kind, 0)
        digits = re.match("[0-9a-fA-F]*", self._text[self._at + 1 : self._at + 1 + size])
        found = digits[0] if digits else ""
        self._at += 1 + len(found)
        return escaped_char(kind, found)

    def _token(self) -> re.Match[str]:
        self._skip_space()
        match = _TOKEN.match(self._text, self._at)
        if match is None:
            raise ValueError("a value is missing")
        self._at = match.end()
        return match

    def _follows(self, mark: str) -> bool:
        self._skip_space()
        is_there = self._text.startswith(mark, self._at)
        self._at += len(mark) * is_there
        return is_there

    def _expect(self, mark: str) -> None:
        if not self._follows(mark):
            raise ValueError(f"{mark} is missing")

    def _skip_space(self) -> None:
        space = _SPACE.match(self._text, self._at)
        self._at = space.end() if space else self._at


def _number(token: str) -> str:
    try:
        return str(int(token))
    except ValueError:
        return json.dumps(float(token), allow_nan=False)


def _allows(kinds: frozenset[str], kind: str) -> bool:
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _refuse(token: str) -> NoReturn:
    raise ValueError(f"{token} is not a value")
