"""What a format says of a single call: how grammars spell it and how readers read it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from router.tools.declared import Tool
from router.tools.deltas import DeltaSink
from router.tools.reading import Reading, Source

SPACES = r"[ \t\r\n]{0,4}"  # as much white space as a grammar allows where a format has some
HEAD_SPACES = r"[ \t\r\n]{0,64}"  # in front of and within what begins a call: as much as readers take
JSON_SPACES = r"[ \t\r\n]{1,32}"  # within arguments: enough for indented JSON, and no endless loop
NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
MAX_NAME_CHARS = 128
MAX_CHOICES = 256  # values of a schema that a grammar spells out


@dataclass(frozen=True, slots=True)
class CallRules:
    """A grammar's words for calls of one tool.

    `head` is a regular expression for the beginning of a call, up to where no other text can be meant any more.
    `rest` is the right side of a rule; `rules` are the further rules that it uses, by name.
    """

    head: str
    rest: str
    rules: Mapping[str, str] = field(default_factory=dict)


class Markers:
    """How one vocabulary spells a format's markers: by id where it has them as special tokens, else as text."""

    def __init__(self, of_format: frozenset[str], special_ids: Mapping[str, int]) -> None:
        self._ids = {mark: special_ids[mark] for mark in of_format if mark in special_ids}

    def is_special(self, mark: str) -> bool:
        return mark in self._ids

    def rule(self, mark: str) -> str:
        return f"<[{self._ids[mark]}]>" if mark in self._ids else literal(mark)

    def written(self, marks: Sequence[str]) -> list[str]:
        """Return those of equal marks that models of this vocabulary write, at least one of them."""
        return [mark for mark in marks if mark in self._ids] or list(marks)

    def written_if_any(self, marks: Sequence[str]) -> list[str]:
        """Return the same for marks that may be missing: none that is text where others are special tokens."""
        return [mark for mark in marks if mark in self._ids or not self._ids]


class CallShape(Protocol):
    @property
    def markers(self) -> tuple[str, ...]:
        """Texts within a call that may be special tokens."""
        ...

    def rules(self, tool: Tool, prefix: str, markers: Markers) -> CallRules:
        """Return the grammar of one tool's calls. `prefix` begins the names of the rules that no other tool shares.

        Raise InvalidRequest for a tool that this format can't call.
        """
        ...

    def read(self, source: Source, tools: Mapping[str, Tool], sink: DeltaSink) -> Reading[None]:
        """Read one call up to its end. Raise NotACall before `sink.begin_call`, and never after it."""
        ...


def literal(text: str) -> str:
    """Return a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def regex(*parts: str) -> str:
    """Return a Lark regular expression of parts that are regular expressions."""
    return "/" + "".join(parts).replace("/", r"\/") + "/"


def escaped(text: str) -> str:
    """Return a regular expression for exactly this text."""
    return "".join(char if char.isalnum() or char == "_" else f"\\x{{{ord(char):x}}}" for char in text)


def json_rule(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """Return the right side of a rule for JSON of a schema. What can't be kept is refused only where it is strict."""
    guidance = {"whitespace_pattern": JSON_SPACES, "lenient": not is_strict}
    return "%json " + json.dumps(dict(schema) | {"x-guidance": guidance}, ensure_ascii=False)
