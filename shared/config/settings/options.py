"""Declare configuration fields with help texts and limits, and check their values."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, TypeVar

from shared.core.errors import ConfigError

T = TypeVar("T")
OPTION_KEY = "option"

BYTE_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
BYTE_PATTERN = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([kmg]i?b)?\s*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Option:
    help: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    metavar: str = ""
    is_bytes: bool = False


def option(default: T, help: str, **limits: Any) -> T:
    return dataclasses.field(default=default, metadata={OPTION_KEY: Option(help=help, **limits)})


def option_of(field: dataclasses.Field[Any]) -> Option:
    declared = field.metadata.get(OPTION_KEY)
    if not isinstance(declared, Option):
        raise TypeError(f"field {field.name} was not declared with option()")
    return declared


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def parse_bytes(text: str) -> int:
    """Parse '512MiB', '2 GB' or a plain number of bytes."""
    match = BYTE_PATTERN.match(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a size: write a number of bytes, or for example 512MiB or 2GB")
    number, unit = match.groups()
    return int(float(number) * BYTE_UNITS[(unit or "").lower()])


def show_bytes(number: Any) -> str:
    """Write a size as a user types it, in the largest binary unit that needs no fraction."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number and number % size == 0:
            return f"{number // size}{unit}"
    return str(number)


class Settings:
    """A frozen dataclass whose fields are declared with `option`; they are checked when it is made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_fields(self)


def check_fields(settings: Any) -> None:
    for field in dataclasses.fields(settings):
        check_value(field.name, getattr(settings, field.name), option_of(field))


def check_value(name: str, value: object, declared: Option) -> None:
    flag = flag_name(name)
    if declared.choices and value not in declared.choices:
        raise ConfigError(f"{flag} is {value!r}; it must be one of {', '.join(declared.choices)}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if value != value:
        raise ConfigError(f"{flag} is not a number")
    if declared.low is not None and value < declared.low:
        raise ConfigError(f"{flag} is {value}; it must be at least {declared.low:g}")
    if declared.high is not None and value > declared.high:
        raise ConfigError(f"{flag} is {value}; it must be at most {declared.high:g}")
