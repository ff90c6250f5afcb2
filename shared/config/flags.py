"""Make command-line flags from the settings' fields, and turn a configuration back into argv."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_type_hints

from shared.config.settings.options import Option, flag_name, option_of, parse_bytes, show_bytes
from shared.core.errors import ConfigError

P = TypeVar("P")
Values = dict[str, dict[str, Any]]  # concern -> field -> value


def holds_sections(kind: type) -> bool:
    return all(dataclasses.is_dataclass(inner) for inner in get_type_hints(kind).values())


def concerns_of(process: type) -> dict[str, type]:
    found: dict[str, type] = {}
    for name, kind in get_type_hints(process).items():
        found |= concerns_of(kind) if holds_sections(kind) else {name: kind}
    return found


def sections_of(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        found |= sections_of(value) if holds_sections(type(value)) else {field.name: value}
    return found


def from_sections(process: type[P], sections: Mapping[str, Any]) -> P:
    """Invert sections_of."""
    hints = get_type_hints(process).items()
    return process(
        **{name: from_sections(kind, sections) if holds_sections(kind) else sections[name] for name, kind in hints}
    )


def fields_of(settings: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = get_type_hints(settings)
    return [(field, hints[field.name]) for field in dataclasses.fields(settings)]


def add_flags(
    parser: argparse.ArgumentParser,
    process: type,
    hidden: frozenset[str] = frozenset(),
    explained: frozenset[str] | None = None,
) -> None:
    """A flag that is not given stays out of the namespace, so that a file can set the value.

    `hidden`: fields without a flag. `explained`: fields whose flags the help shows, in one group; None: all, by
    section."""
    usual = None if explained is None else parser.add_argument_group("usual flags")
    for section, settings in concerns_of(process).items():
        fields = [(field, kind) for field, kind in fields_of(settings) if field.name not in hidden]
        if not fields:
            continue
        group = usual or parser.add_argument_group(section, first_line(settings.__doc__))
        for field, kind in fields:
            add_flag(group, section, field, kind, explained is None or field.name in explained)


def add_flag(group: Any, section: str, field: dataclasses.Field[Any], kind: Any, is_explained: bool) -> None:
    declared = option_of(field)
    default = show_bytes(field.default) if declared.is_bytes else show(field.default)
    common: dict[str, Any] = {
        "dest": f"{section}.{field.name}",
        "default": argparse.SUPPRESS,
        "help": f"{declared.help} (default: {default})".replace("%", "%%") if is_explained else argparse.SUPPRESS,
    }
    if kind is bool:
        common["action"] = argparse.BooleanOptionalAction
    elif kind == tuple[str, ...]:
        common |= {"action": "append", "metavar": declared.metavar or None}
    elif declared.choices:
        common |= {"choices": declared.choices}
    else:
        common |= {"type": parser_for(kind, declared), "metavar": declared.metavar or kind_name(kind)}
    group.add_argument(flag_name(field.name), **common)


def first_line(doc: str | None) -> str:
    return (doc or "").strip().split("\n")[0]


def show(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(value) if value != "" else "empty"


def kind_name(kind: Any) -> str:
    return {int: "N", float: "X"}.get(kind, "TEXT")


def parser_for(kind: Any, declared: Option) -> Callable[[str], Any]:
    if declared.is_bytes:
        return parse_size
    if kind == tuple[int, ...]:
        return parse_int_list
    parsers: dict[Any, Callable[[str], Any]] = {int: int, float: float, str: str}
    return parsers[kind]


def parse_size(text: str) -> int:
    """Raise argparse's error for bad text, because argparse then names the flag."""
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def parse_int_list(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers like 0,1") from None


def given_values(namespace: argparse.Namespace) -> Values:
    """Leave out names without a dot, which belong to the command."""
    values: Values = {}
    for dest, value in vars(namespace).items():
        section, dot, name = dest.partition(".")
        if dot:
            values.setdefault(section, {})[name] = tuple(value) if isinstance(value, list) else value
    return values


def to_argv(config: Any, hidden: frozenset[str] = frozenset()) -> list[str]:
    """Return flags that reproduce the configuration. Leave out default values."""
    argv: list[str] = []
    for settings in sections_of(config).values():
        for field, _ in fields_of(type(settings)):
            value = getattr(settings, field.name)
            if field.name not in hidden and value != field.default:
                argv += flag_for(field.name, value)
    return argv


def flag_for(name: str, value: Any) -> list[str]:
    flag = flag_name(name)
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag.removeprefix("--")]
    if isinstance(value, tuple) and all(isinstance(item, int) for item in value):
        return [f"{flag}={','.join(map(str, value))}"]
    if isinstance(value, tuple):
        return [f"{flag}={item}" for item in value]
    return [f"{flag}={value}"]
