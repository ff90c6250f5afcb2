"""The grammar and the reader for a single call, as a protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from router.tools.declared import Tool
from router.tools.deltas import DeltaSink
from router.tools.reading import Reading, Source

SPACES = r"[ \t\r\n]{0,4}"  # white space between parts
HEAD_SPACES = r"[ \t\r\n]{0,64}"  # before and inside a call's head; grammars and readers have the same limit
JSON_SPACES = r"[ \t\r\n]{1,32}"  # inside arguments; enough for indented JSON
MAX_CHOICES = 256  # longest list of allowed values that a grammar enforces


@dataclass(frozen=True, slots=True)
class CallRules:
    """`head`: a regular expression for the beginning that identifies a call.

    `rest`: the right side of the rule for the rest of the call. `rules`: rules that `rest` uses.
    """

    head: str
    rest: str
    rules: Mapping[str, str] = field(default_factory=dict)


class Markers:
    """How a vocabulary writes a format's markers: special tokens by id, other markers as text."""

    def __init__(self, of_format: frozenset[str], special_ids: Mapping[str, int]) -> None:
        self._ids = {mark: special_ids[mark] for mark in of_format if mark in special_ids}

    def is_special(self, mark: str) -> bool:
        return mark in self._ids

    def rule(self, mark: str) -> str:
        return f"<[{self._ids[mark]}]>" if mark in self._ids else literal(mark)

    def written(self, marks: Sequence[str]) -> list[str]:
        """Return the special tokens among `marks`, or all marks if none is special."""
        return [mark for mark in marks if mark in self._ids] or list(marks)

    def written_if_any(self, marks: Sequence[str]) -> list[str]:
        """Return the special tokens among optional `marks`, or all marks if the format has no special tokens."""
        return [mark for mark in marks if mark in self._ids or not self._ids]


class CallShape(Protocol):
    @property
    def markers(self) -> tuple[str, ...]:
        """The texts of a call's syntax, which may be special tokens."""
        ...

    def rules(self, tool: Tool, prefix: str, markers: Markers) -> CallRules:
        """Return the grammar of one tool's calls. Raise InvalidRequest for a tool that this format can't call.

        The names of the grammar's rules begin with `prefix`.
        """
        ...

    def read(self, source: Source, tools: Mapping[str, Tool], sink: DeltaSink) -> Reading[None]:
        """Read one call. Raise NotACall only before `sink.begin_call`."""
        ...


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def regex(*parts: str) -> str:
    return "/" + "".join(parts).replace("/", r"\/") + "/"


def escaped(text: str) -> str:
    return "".join(char if char.isalnum() or char == "_" else f"\\x{{{ord(char):x}}}" for char in text)


def json_rule(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """Return a rule's right side for a schema. Unsupported keywords are errors only if `is_strict`."""
    guidance = {"whitespace_pattern": JSON_SPACES, "lenient": not is_strict}
    return "%json " + json.dumps(dict(schema) | {"x-guidance": guidance}, ensure_ascii=False)
