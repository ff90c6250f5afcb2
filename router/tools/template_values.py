"""Turn the text of a response template's region into calls: a parser of its content, then a transform.

text -> parser (json, xml-inline, kv-lines, ...) -> value -> transform with {name}, {content} -> calls
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import regex

from router.tools.calls.deltas import DeltaSink, WholeCall, whole_answer
from router.tools.calls.literals import from_tagged, json_string, read_json
from router.tools.calls.python_calls import PythonCalls
from router.tools.calls.reading import NotACall, Reading, Source, expect, found, skip_any_space
from router.tools.schemas.declared import Tool
from router.tools.schemas.schemas import kinds_of_property
from shared.core.errors import ConfigError

Args = Mapping[str, Any]
Parser = Callable[[str, Mapping[str, Tool]], object]  # raises ValueError, or TimeoutError for a hostile pattern
MAX_NESTING = 8
TAGS_S = 0.05  # of processor time, for all tags of a region
PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
BARE_KEY = re.compile(r"([{,]\s*)(\w+)(\s*:)")
JSON_STRING = r'"(?:\\.|[^"\\])*+"'
SURROGATE = re.compile("[\ud800-\udfff]")


def parser_of(scope: str, name: object, args: object, depth: int = MAX_NESTING) -> Parser:
    """Raise ConfigError for an unknown parser or unusable arguments."""
    maker = MAKERS.get(name) if isinstance(name, str) else None
    if maker is None:
        raise ConfigError(f"{scope}: content {name!r} is not supported: {', '.join(MAKERS)} are")
    if not isinstance(args, Mapping) or depth == 0:
        raise ConfigError(f"{scope}: arguments of {name} must be an object, nested at most {MAX_NESTING} times")
    return maker(scope, args, depth)


def checked_transform(scope: str, transform: object) -> object:
    """Raise ConfigError for a text that mixes a placeholder with other text."""
    if isinstance(transform, Mapping):
        return {key: checked_transform(scope, value) for key, value in transform.items()}
    if isinstance(transform, list):
        return [checked_transform(scope, value) for value in transform]
    if isinstance(transform, str) and PLACEHOLDER.search(transform) and not PLACEHOLDER.fullmatch(transform):
        raise ConfigError(f"{scope}: transform {transform!r} mixes a placeholder with text")
    return transform


def calls_of(
    value: object,
    transform: object,
    captures: Mapping[str, object],
    tools: Mapping[str, Tool],
    *,
    transforms_each: bool,
) -> list[WholeCall]:
    """Raise ValueError if a parsed value holds other things than calls of these tools."""
    try:
        if transforms_each:
            if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
                raise ValueError("it is not a list of objects")
            value = [_filled(transform, {**captures, **item}) for item in value]
        elif transform is not None:
            value = _filled(transform, {**captures, "content": value})
        calls = [_call(one, tools) for one in (value if isinstance(value, list) else [value])]
    except RecursionError as error:
        raise ValueError("it nests too deep") from error
    if not calls:
        raise ValueError("it calls nothing")
    return calls


def _filled(transform: object, scope: Mapping[str, object]) -> object:
    if isinstance(transform, Mapping):
        return {key: _filled(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [_filled(value, scope) for value in transform]
    path = PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if path is None:
        return transform
    value: object = scope
    for key in path[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"there is no {path[1]}")
        value = value[key]
    return value


def _call(value: object, tools: Mapping[str, Tool]) -> WholeCall:
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise ValueError("it is not a call")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or name not in tools:
        raise ValueError("there is no such tool")
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("the arguments are not an object")
    typed = {key: _typed(item, kinds_of_property(key, tools[name].schema)) for key, item in arguments.items()}
    text = json.dumps(typed, ensure_ascii=False, allow_nan=False)
    # JSON can escape half a surrogate pair, but text can't contain it
    return WholeCall(name, json.dumps(typed) if SURROGATE.search(text) else text)


def _typed(value: object, kinds: frozenset[str]) -> object:
    """Give a text the type of its property. Parsers of tags and lines know only texts."""
    return json.loads(from_tagged(value, kinds)) if isinstance(value, str) and kinds else value


def _text(scope: str, args: Args, depth: int) -> Parser:
    strips = args.get("strip", True)
    return lambda text, tools: text.strip() if strips else text


def _json(scope: str, args: Args, depth: int) -> Parser:
    """`string_delims`: other quotes of strings. `unquoted_keys`: keys may lack quotes. `allow_non_json`: other text
    is a string."""
    quotes = args.get("string_delims", [])
    if not isinstance(quotes, list) or not all(map(_is_pair, quotes)):
        raise ConfigError(f"{scope}: string_delims must be pairs of texts")
    own = [f"{regex.escape(opening)}(.*?){regex.escape(closing)}" for opening, closing in quotes]
    strings = regex.compile("|".join([*own, JSON_STRING]), regex.DOTALL)
    plain = _text(scope, args, depth)

    def parse(text: str, tools: Mapping[str, Tool]) -> object:
        quotes_keys = bool(args.get("unquoted_keys"))
        written = _standard(text, strings, quotes_keys) if own or quotes_keys else text
        try:
            return read_json(written)
        except ValueError:
            if not args.get("allow_non_json"):
                raise
            return plain(text, tools)

    return parse


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(one, str) and one for one in value)


def _standard(text: str, strings: Any, quotes_keys: bool) -> str:
    """Return a dialect of JSON as JSON."""
    parts, end = [], 0
    for string in [*strings.finditer(text, timeout=TAGS_S), None]:
        between = text[end : len(text) if string is None else string.start()]
        parts.append(BARE_KEY.sub(r'\1"\2"\3', between) if quotes_keys else between)
        if string is not None:
            inside = next((group for group in string.groups() if group is not None), None)
            parts.append(string[0] if inside is None else json_string(inside))
            end = string.end()
    return "".join(parts)


def _value_parser(scope: str, args: Args, depth: int) -> Parser:
    given = args.get("value_parser")
    if given is None:
        return _text(scope, {"strip": False}, depth)
    if not isinstance(given, Mapping):
        raise ConfigError(f"{scope}: value_parser must be an object")
    return parser_of(scope, given.get("name", "text"), given.get("args", {}), depth - 1)


def _xml_inline(scope: str, args: Args, depth: int) -> Parser:
    """`tag_pattern` finds a tag with its groups `key` and `value`. `merge_duplicates`: equal keys make a list."""
    values = _value_parser(scope, args, depth)
    try:
        tags = regex.compile(args.get("tag_pattern"), regex.DOTALL)
    except (regex.error, TypeError, RecursionError, OverflowError) as error:
        raise ConfigError(f"{scope}: tag_pattern is not a regular expression: {error}") from error
    if "key" not in tags.groupindex:
        raise ConfigError(f"{scope}: tag_pattern needs a group called key")

    def parse(text: str, tools: Mapping[str, Tool]) -> object:
        found: dict[str, list[object]] = {}
        for tag in tags.finditer(text, timeout=TAGS_S):
            groups = tag.groupdict()
            if groups["key"] is None:
                raise ValueError("a tag has no key")
            found.setdefault(groups["key"], []).append(values(groups.get("value") or "", tools))
        merges = args.get("merge_duplicates", False)
        return {key: many if merges and len(many) > 1 else many[-1] for key, many in found.items()}

    return parse


def _kv_lines(scope: str, args: Args, depth: int) -> Parser:
    values, plain = _value_parser(scope, args, depth), _text(scope, args, depth)
    line_sep, kv_sep = args.get("line_sep", "\n"), args.get("kv_sep", ":")
    if not all(isinstance(sep, str) and sep for sep in (line_sep, kv_sep)):
        raise ConfigError(f"{scope}: line_sep and kv_sep must be texts, not empty")

    def parse(text: str, tools: Mapping[str, Tool]) -> object:
        pairs = [line.split(kv_sep, 1) for line in text.split(line_sep) if kv_sep in line]
        return {str(plain(key, tools)): values(str(plain(value, tools)), tools) for key, value in pairs}

    return parse


def _python_calls(scope: str, args: Args, depth: int) -> Parser:
    def parse(text: str, tools: Mapping[str, Tool]) -> object:
        source, sink = Source(), DeltaSink()
        source.feed(text)
        source.has_ended = True
        try:
            next(_python_list(source, tools, sink), None)
        except NotACall as error:
            raise ValueError("it is not a list of calls") from error
        if sink.is_in_call or source.text[source.at :].strip():
            raise ValueError("it is not a list of calls")
        calls = whole_answer(sink.taken()).calls
        return [{"name": call.name, "arguments": read_json(call.arguments)} for call in calls]

    return parse


def _python_list(source: Source, tools: Mapping[str, Tool], sink: DeltaSink) -> Reading[None]:
    yield from skip_any_space(source)
    yield from expect(source, "[")
    while True:
        yield from skip_any_space(source)
        yield from PythonCalls().read(source, tools, sink)
        yield from skip_any_space(source)
        if not (yield from found(source, ",")):
            break
    yield from expect(source, "]")


MAKERS: dict[str, Callable[[str, Args, int], Parser]] = {
    "text": _text,
    "int": lambda scope, args, depth: lambda text, tools: int(text),
    "float": lambda scope, args, depth: lambda text, tools: float(text),
    "bool": lambda scope, args, depth: lambda text, tools: text.strip().lower() in ("true", "1"),
    "json": _json,
    "xml-inline": _xml_inline,
    "kv-lines": _kv_lines,
    "python-call-list": _python_calls,
}
