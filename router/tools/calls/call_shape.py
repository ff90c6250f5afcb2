"""The grammar and the reader for a single call, as a protocol."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from router.tools.calls.deltas import DeltaSink
from router.tools.calls.reading import Reading, Source
from router.tools.schemas.declared import Tool

SPACES = r"[ \t\r\n]{0,8}"  # white space between parts
HEAD_SPACES = r"[ \t\r\n]{0,64}"  # before and inside a call's head; grammars and readers have the same limit
JSON_SPACES = r"[ \t\r\n]{1,32}"  # inside arguments; enough for indented JSON
MAX_CHOICES = 256  # longest list of allowed values that a grammar enforces
ANY_TEXT = "/(?s:.*)/"


@dataclass(frozen=True, slots=True)
class CallRules:
    """`lead`: what the grammar writes before the head; it may hold special tokens.

    `head`: a regular expression for the text that identifies a call. `rest`: the right side of the rule for the rest of
    the call. `rules`: rules that `rest` uses.
    """

    head: str
    rest: str
    rules: Mapping[str, str] = field(default_factory=dict)
    lead: str = ""


class Markers:
    """How a vocabulary writes marks. A mark may be text, a special token, or both: `<|channel>thought`."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._ids = special_ids
        longest_first = sorted(special_ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if special_ids else None

    def is_special(self, mark: str) -> bool:
        """Whether the mark holds a special token, so that plain text can't spell it."""
        return self._pattern is not None and self._pattern.search(mark) is not None

    def rule(self, mark: str, *, spaced: bool = False) -> str:
        """`spaced`: white space may stand before the mark."""
        parts: list[str] = []
        for part, token_id in self._parts(mark):
            is_first = not parts
            if token_id is not None:
                parts.append(f"GAP? <[{token_id}]>" if spaced and is_first else f"<[{token_id}]>")
            else:
                parts.append(regex(SPACES, escaped(part)) if spaced and is_first else literal(part))
        return " ".join(parts)

    def written(self, marks: Sequence[str]) -> list[str]:
        """Return the marks that a special token begins, or all marks if none is so."""
        return [mark for mark in marks if self.is_special(mark)] or list(marks)

    def written_if_any(self, marks: Sequence[str]) -> list[str]:
        """Return the special tokens among optional `marks`, or all marks if the format has no special tokens."""
        return [mark for mark in marks if self.is_special(mark) or not self._ids]

    def text_and(self, mark: str, name: str, rules: dict[str, str], without: Sequence[str] = ()) -> str:
        """Return the right side of a rule for any text, then the mark, which the text does not hold.

        `name`: of a terminal that goes to `rules`. `without`: other marks that the text does not hold if they have
        special tokens; if the mark has none, the rule must be lazy."""
        if not self.is_special(mark):
            return f"{ANY_TEXT} {literal(mark)}"
        parts = self._parts(mark)
        before = parts[0][0] if parts[0][1] is None else ""  # the text includes it: a lexer can't end the text there
        rules[name] = text_without(mark, *filter(self.is_special, without), end=before)
        return f"{name} {self.rule(mark.removeprefix(before))}"

    def up_to(self, name: str, mark: str, rules: dict[str, str], without: Sequence[str] = ()) -> None:
        """Add the rule `name` for any text up to and with the mark."""
        is_lazy = not self.is_special(mark)
        right = self.text_and(mark, f"{name.upper()}_TEXT", rules, without)
        rules[f"{name}[lazy]" if is_lazy else name] = right

    def _parts(self, mark: str) -> list[tuple[str, int | None]]:
        if self._pattern is None:
            return [(mark, None)]
        parts: list[tuple[str, int | None]] = []
        end = 0
        for found in self._pattern.finditer(mark):
            if found.start() > end:
                parts.append((mark[end : found.start()], None))
            parts.append((found[0], self._ids[found[0]]))
            end = found.end()
        return [*parts, (mark[end:], None)] if end < len(mark) else parts


class CallShape(Protocol):
    @property
    def markers(self) -> tuple[str, ...]:
        """The texts of a call's syntax, which may hold special tokens."""
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


def text_without(*marks: str, end: str = "") -> str:
    """Return a terminal for text without these marks. Readers can't tell a mark's text from the special token.

    `end`: how the text ends."""
    text = regex("(?s:.*)", escaped(end)) if end else ANY_TEXT
    if not marks:
        return text
    # one negation of all marks: with one for each, the lexer's states multiply
    return f"{text} & ~/(?s:.*)({'|'.join(sorted(set(map(escaped, marks))))})(?s:.*)/"


def in_order(is_required: list[bool], prefix: str, comma: str, rules: dict[str, str]) -> str:
    """Return the right side of a rule for the members PREFIX_p0, PREFIX_p1, ... in their order, with commas between.

    `is_required`: whether each member must be there. The rules that it needs go to `rules`."""
    num = len(is_required)
    after = [f"{prefix}_after{index}" if index + 1 < num else "" for index in range(num)]
    for index in range(1, num):
        argument = f"{comma} {prefix}_p{index}"
        argument = argument if is_required[index] else f"({argument})?"
        rules[after[index - 1]] = f"{argument} {after[index]}"
    first_required = is_required.index(True) if True in is_required else num - 1
    firsts = [f"{prefix}_p{index} {after[index]}" for index in range(first_required + 1)]
    if not firsts:
        return ""
    return f"({' | '.join(firsts)}){'' if True in is_required else '?'}"


def json_rule(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """Return a rule's right side for a schema. Unsupported keywords are errors only if `is_strict`."""
    guidance = {"whitespace_pattern": JSON_SPACES, "lenient": not is_strict}
    return "%json " + json.dumps(dict(schema) | {"x-guidance": guidance}, ensure_ascii=False)
