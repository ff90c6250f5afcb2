"""Loosen the schemas of tools that a grammar can't follow: drop the least that makes a grammar of them.

Patterns, the usual reason, are tried alone. Then a schema's other parts are put together in a fixed order, and the
first part with which there is no grammar is dropped, again and again. At the end each of these is tried once more,
because others may have been missing. The result depends on the schemas alone: other routers may resume the request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from router.tools.schemas.declared import Tool
from router.tools.schemas.schema_tree import MAPS, Path, holds_schemas, inner_schemas, spelled, with_inner
from shared.core.errors import InvalidRequest

Make = Callable[[Sequence[Tool]], str]  # makes a grammar; raises InvalidRequest for tools of which there is none
Part = tuple[str, Path]  # a tool's name and a path in its schema
WHOLE: Path = ()
STRUCTURE, OTHERS = 0, 4
RANKS = {"type": 1, "enum": 1, "const": 1, "$ref": 2, "required": 3}  # after the structure, to which references lead
PATTERN = "pattern"
WITH_PATTERN = frozenset({"minLength", "maxLength", "format"})  # keywords with which a pattern may be too much
MAX_DROPPED = 16  # parts of one tool that are found by search; then its whole schema goes
MAX_COST = 200  # of a request's searches, a second at most; then whole schemas go
CHARS_PER_COST = 4096


@dataclass(frozen=True, slots=True)
class Loosened:
    grammar: str
    dropped: tuple[Part, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Return names such as `mail.properties.to.pattern`; `mail` if its whole schema was dropped."""
        return tuple(f"{tool}.{spelled(path)}" if path else tool for tool, path in self.dropped)


def loosened(tools: Sequence[Tool], make: Make) -> Loosened:
    """Raise InvalidRequest for a strict tool without a grammar. It names the first part that has to go."""
    search = _Search(make)
    kept: list[Tool] = []
    dropped: list[Part] = []
    for tool in tools:
        parts = [(tool.name, path) for path in search.paths_to_drop(tool)]
        if parts and tool.is_strict:
            what = spelled(parts[0][1]) or "schema"
            raise InvalidRequest(f"{tool.name} is strict, but no grammar can enforce its {what}", param="tools")
        kept.append(without(tool, [path for _, path in parts]))
        dropped += parts
    return _together(kept, dropped, search)


def without(tool: Tool, paths: Collection[Path]) -> Tool:
    if not paths:
        return tool
    if WHOLE in paths:
        return replace(tool, parameters={})
    return replace(tool, parameters=_kept(tool.parameters, (), lambda path: path not in paths))


def _together(tools: Sequence[Tool], dropped: Sequence[Part], search: _Search) -> Loosened:
    """Drop the schemas of the largest tools if all together are too large."""
    order = sorted((tool for tool in tools if not tool.is_strict), key=lambda tool: -len(repr(tool.parameters)))
    made: dict[int, str | None] = {}  # number of dropped schemas -> grammar

    def is_made(num: int) -> bool:
        names = {tool.name for tool in order[:num]}
        made[num] = search.made([without(tool, [WHOLE] if tool.name in names else []) for tool in tools])
        return made[num] is not None

    num = _first(len(order), is_made)
    grammar = None if num is None else made[num]
    if grammar is None:
        raise InvalidRequest("all schemas together are too large for a grammar", param="tools")
    names = [tool.name for tool in order[:num]]
    others = [part for part in dropped if part[0] not in names]
    return Loosened(grammar, (*others, *((name, WHOLE) for name in names)))


def _first(most: int, is_true: Callable[[int], bool]) -> int | None:
    """Return a number from 0 to `most` from which on it is true. Return None if it is false for `most`."""
    if is_true(0):
        return 0
    if not is_true(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_true(middle) else (middle, high)
    return high


class _Search:
    def __init__(self, make: Make) -> None:
        self._make = make
        self._cost = 0
        self._patterns: dict[str, bool] = {}  # pattern with its lengths -> whether a grammar can follow it

    def made(self, tools: Sequence[Tool]) -> str | None:
        try:
            return self._make(tools)
        except InvalidRequest:
            return None

    def paths_to_drop(self, tool: Tool) -> list[Path]:
        if self.made([tool]) is not None:
            return []
        if tool.is_strict and (paths := self.paths_to_drop(replace(tool, is_strict=False))):
            return paths  # what no tool may have is told first
        parts = [path for _, path in sorted(_parts(tool.parameters, ()), key=lambda part: part[0])]
        patterns = [path for path in parts if path[-1] == PATTERN and not self._can_follow(_value_at(tool, path[:-1]))]
        found: list[Path] = []
        while len(found) < MAX_DROPPED:
            num = self._first_failure(tool, parts, [*patterns, *found])
            if num is None:
                return [*patterns, *self._needed(tool, patterns, found)]
            if num == 0 or self._cost > MAX_COST:
                break
            found.append(parts[num - 1])
        return [WHOLE]

    def _can_follow(self, schema: Mapping[str, Any]) -> bool:
        """Whether the schema's pattern makes no grammar fail. A property may have the name `pattern`."""
        if not isinstance(schema[PATTERN], str):
            return True
        others = {name: value for name, value in schema.items() if name in WITH_PATTERN}
        key = repr((schema[PATTERN], others))
        if key not in self._patterns:
            is_blameless = self._try(_of_items(others | {PATTERN: schema[PATTERN]})) or not self._try(_of_items(others))
            self._patterns[key] = is_blameless
        return self._patterns[key]

    def _try(self, tool: Tool) -> bool:
        self._cost += 1 + len(repr(tool.parameters)) // CHARS_PER_COST
        return self._cost <= MAX_COST and self.made([tool]) is not None

    def _first_failure(self, tool: Tool, parts: Sequence[Path], dropped: Collection[Path]) -> int | None:
        """Return the number of parts, in order, with which there is no grammar. None: there is one with all parts."""
        gone = set(dropped)

        def fails(num: int) -> bool:
            used = set(parts[:num]) - gone
            return not self._try(replace(tool, parameters=_kept(tool.parameters, (), used.__contains__)))

        return None if not fails(len(parts)) else _first(len(parts), fails)

    def _needed(self, tool: Tool, patterns: Sequence[Path], found: Sequence[Path]) -> list[Path]:
        needed = list(found)
        for path in found:
            others = [other for other in needed if other != path]
            if self._try(without(tool, [*patterns, *others])):
                needed = others
        return needed


def _value_at(tool: Tool, path: Path) -> Any:
    value: Any = tool.parameters
    for step in path:
        value = value[step]
    return value


def _of_items(string: Mapping[str, Any]) -> Tool:
    """Return a tool with such strings, in a place where every format of calls enforces patterns."""
    return Tool("f", parameters={"properties": {"a": {"type": "array", "items": {"type": "string", **string}}}})


def _parts(schema: object, path: Path) -> Iterator[tuple[int, Path]]:
    """Yield (rank, path) of each keyword, named schema and malformed schema, outer ones first."""
    if not isinstance(schema, Mapping):
        return
    for keyword, value in schema.items():
        own = (*path, keyword)
        yield STRUCTURE if holds_schemas(keyword, value) else RANKS.get(keyword, OTHERS), own
        for below, inner in inner_schemas(keyword, value):
            if not _is_schema(inner):
                yield OTHERS, (*own, *below)
            elif keyword in MAPS:
                yield STRUCTURE, (*own, *below)
            yield from _parts(inner, (*own, *below))


def _kept(schema: Any, path: Path, keeps: Callable[[Path], bool]) -> Any:
    """Return the schema without the parts that are not kept. A malformed schema becomes {}."""
    if not isinstance(schema, Mapping):
        return schema if _is_schema(schema) or keeps(path) else {}
    kept: dict[str, Any] = {}
    for keyword, value in schema.items():
        own = (*path, keyword)
        if not keeps(own):
            continue
        if keyword in MAPS and isinstance(value, Mapping):
            value = {name: one for name, one in value.items() if not _is_schema(one) or keeps((*own, name))}
        if holds_schemas(keyword, value):
            value = with_inner(keyword, value, partial(_kept_below, own, keeps))
        kept[keyword] = value
    if kept.get("patternProperties") != schema.get("patternProperties"):
        kept.pop("additionalProperties", None)  # it may forbid what the dropped pattern allowed
    return kept


def _kept_below(own: Path, keeps: Callable[[Path], bool], below: Path, inner: object) -> object:
    return _kept(inner, (*own, *below), keeps)


def _is_schema(value: object) -> bool:
    return isinstance(value, Mapping | bool)
