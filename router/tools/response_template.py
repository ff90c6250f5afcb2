"""A model's own description of its answers: `response_template` in tokenizer_config.json.

start_anchor  the text behind which an answer begins in a prompt
fields        thinking, content, tool_calls: each a region of the answer, between an opening and a closing mark

The field without an opening mark takes the text outside all regions. `template_reader.py` reads answers by it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import regex

from router.tools.reasoning import ThoughtTags
from router.tools.template_values import Parser, checked_transform, parser_of
from shared.core.errors import ConfigError

MAX_PATTERN_CHARS = 2048
MAX_PROMPT_CHARS = 4096  # how far before a prompt's end its answer may begin
PATTERN_S = 0.05  # of processor time that a search may take; hostile patterns take exponential time
KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
FIELD_KEYS = {"open", "open_pattern", "close", "close_pattern", "content", "content_args"} | {
    "repeats",
    "join",
    "optional",
    "transform",
    "transform_each",
}
LOOKING = {  # at the text's end; spelled as look-aheads, of which partial searches know that more text may follow
    "$": r"(?=\n?[\s\S])",
    r"\Z": r"(?=[\s\S])",
    r"\z": r"(?=[\s\S])",
    r"\b": r"(?:(?<=\w)(?!\w)|(?<!\w)(?=\w))",
    r"\B": r"(?:(?<=\w)(?=\w)|(?<!\w)(?!\w))",
    r"\m": r"(?<!\w)(?=\w)",
    r"\M": r"(?<=\w)(?!\w)",
}
PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\$", re.DOTALL)
ESCAPED = re.compile(r"\\([^a-zA-Z0-9])")
Match = Any  # the package regex has no types


class RegionKind(Enum):
    THINKING = "thinking"
    CONTENT = "content"
    CALLS = "tool_calls"


KINDS = {kind.value: kind for kind in RegionKind} | {
    "reasoning": RegionKind.THINKING,
    "reasoning_content": RegionKind.THINKING,
}


@dataclass(frozen=True, slots=True)
class Mark:
    """`undecided` finds, by a partial search, where more text may still complete the mark or make it longer."""

    pattern: Any
    undecided: Any
    literals: tuple[str, ...]
    texts: tuple[str, ...]  # which may hold special tokens

    def first_in(self, text: str, start: int) -> Match | None:
        """Raise TimeoutError for a pattern that takes too long."""
        return self.pattern.search(text, start, timeout=PATTERN_S)

    def undecided_from(self, text: str, start: int) -> int:
        found = self.undecided.search(text, start, partial=True, timeout=PATTERN_S)
        return len(text) if found is None else int(found.start())


@dataclass(frozen=True, slots=True)
class Region:
    """`opens`: None for the region that takes all text outside the others. `join`: the text between two of a kind."""

    kind: RegionKind
    opens: Mark | None
    closes: Mark | None
    strips: bool = True
    join: str | None = None
    parser: Parser | None = None  # of calls
    is_json: bool = False  # so that what can be parsed is complete
    transform: object = None
    transforms_each: bool = False


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    regions: tuple[Region, ...]
    anchor: Mark

    @property
    def implicit(self) -> Region | None:
        return next((region for region in self.regions if region.opens is None), None)

    @property
    def markers(self) -> frozenset[str]:
        """The texts that must reach the reader, even if they hold special tokens."""
        marks = [mark for region in self.regions for mark in (region.opens, region.closes) if mark is not None]
        return frozenset(text for mark in marks for text in mark.texts)

    @property
    def thinks(self) -> bool:
        return self.region(RegionKind.THINKING) is not None

    @property
    def tags(self) -> ThoughtTags | None:
        """The marks of a thought, if they are texts: grammars need them."""
        thinking, content = self.region(RegionKind.THINKING), self.region(RegionKind.CONTENT)
        opening, closing = (_first_text(mark) for mark in (thinking.opens, thinking.closes)) if thinking else ("", "")
        if not opening or not closing:
            return None
        return ThoughtTags(opening, closing, content=_first_text(content.opens) if content is not None else "")

    def region(self, kind: RegionKind) -> Region | None:
        return next((region for region in self.regions if region.kind is kind), None)

    def opened_by(self, prompt: str) -> str:
        """Return what the prompt's end holds of the answer."""
        end = prompt[-MAX_PROMPT_CHARS:]
        try:
            anchors = [found.end() for found in self.anchor.pattern.finditer(end, timeout=PATTERN_S)]
        except TimeoutError:
            return ""
        return end[anchors[-1] :] if anchors else ""


def _first_text(mark: Mark | None) -> str:
    return mark.literals[0] if mark is not None and mark.literals else ""


def response_template_of(spec: object) -> ResponseTemplate:
    """Raise ConfigError for a template that is invalid, or that the router can't use."""
    if not isinstance(spec, Mapping):
        raise ConfigError("response_template must be an object")
    _check_keys("response_template", spec, KEYS)
    if spec.get("version", 1) != 1:
        raise ConfigError(f"response_template: version {spec['version']!r} is not known: 1 is")
    fields = spec.get("fields")
    if not isinstance(fields, Mapping) or not fields:
        raise ConfigError("response_template: fields must be an object, and not empty")
    regions = tuple(_region(str(name), field) for name, field in fields.items())
    if sum(region.opens is None for region in regions) > 1:
        raise ConfigError("response_template: only one field may lack open and open_pattern")
    anchor = _mark("response_template", spec, "start_anchor")
    if anchor is None:
        raise ConfigError("response_template needs start_anchor or start_anchor_pattern")
    return ResponseTemplate(regions, anchor)


def _region(name: str, field: object) -> Region:
    scope = f"response_template: field {name!r}"
    if name not in KINDS:
        raise ConfigError(f"{scope} is not supported: {', '.join(KINDS)} are")
    if not isinstance(field, Mapping):
        raise ConfigError(f"{scope} must be an object")
    _check_keys(scope, field, FIELD_KEYS)
    args = field.get("content_args", {})
    if not isinstance(args, Mapping):
        raise ConfigError(f"{scope}: content_args must be an object")
    join = field.get("join")
    if join is not None and not isinstance(join, str):
        raise ConfigError(f"{scope}: join must be a text")
    opens, closes = _mark(scope, field, "open"), _mark(scope, field, "close")
    parser = field.get("content", "text")
    if KINDS[name] is not RegionKind.CALLS:
        if parser != "text" or "transform" in field:
            raise ConfigError(f"{scope} must be text, without transform")
        return Region(KINDS[name], opens, closes, strips=bool(args.get("strip", True)), join=join)
    return Region(
        RegionKind.CALLS,
        opens,
        closes,
        parser=parser_of(scope, parser, args),
        is_json=parser == "json",
        transform=checked_transform(scope, field.get("transform")),
        transforms_each=_flag(scope, field, "transform_each"),
    )


def _check_keys(scope: str, given: Mapping[str, object], known: set[str]) -> None:
    if unknown := sorted(set(map(str, given)) - known):
        raise ConfigError(f"{scope}: {', '.join(unknown)} not known")


def _flag(scope: str, field: Mapping[str, object], name: str) -> bool:
    value = field.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{scope}: {name} must be true or false")
    return value


def _mark(scope: str, field: Mapping[str, object], name: str) -> Mark | None:
    """Return the mark that NAME has as a text or texts, or NAME_pattern as a regular expression."""
    given, pattern = field.get(name), field.get(f"{name}_pattern")
    if given is not None and pattern is not None:
        raise ConfigError(f"{scope} can't have both {name} and {name}_pattern")
    if pattern is not None:
        if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARS:
            raise ConfigError(f"{scope}: {name}_pattern must be a text of at most {MAX_PATTERN_CHARS} characters")
        texts = (pattern, ESCAPED.sub(r"\1", pattern))
        return _compiled(f"{scope}: {name}_pattern", pattern, (), texts)
    if given is None:
        return None
    literals = [given] if isinstance(given, str) else given
    if not isinstance(literals, list) or not literals or not all(isinstance(one, str) and one for one in literals):
        raise ConfigError(f"{scope}: {name} must be a text or texts, none empty")
    longest_first = sorted(set(literals), key=len, reverse=True)
    texts = tuple(longest_first)
    return _compiled(f"{scope}: {name}", "|".join(map(regex.escape, longest_first)), texts, texts)


def _compiled(scope: str, pattern: str, literals: tuple[str, ...], texts: tuple[str, ...]) -> Mark:
    """A partial search prefers whole matches. One that can never be whole finds the first place that may still be."""
    try:
        whole = regex.compile(pattern, regex.DOTALL)
        undecided = regex.compile(f"(?:{_looking(pattern)})(?!)", regex.DOTALL)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"{scope} is not a regular expression: {error}") from error
    return Mark(whole, undecided, literals, texts)


def _looking(pattern: str) -> str:
    return PART.sub(lambda part: LOOKING.get(part[0], part[0]), pattern)
