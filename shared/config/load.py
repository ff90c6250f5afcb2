"""Make a process configuration from defaults, a TOML file and flags. The settings' dataclasses check the values.

A file has one table per concern. All processes may use one file: each process checks all tables, and uses
its own.

    [memory]
    kv_bytes = "512MiB"
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from shared.config.flags import Values, concerns_of, fields_of, from_sections
from shared.config.processes import ClusterConfig, NodeProcessConfig, RayClusterConfig, RouterProcessConfig
from shared.config.settings.options import Option, flag_name, option_of, parse_bytes
from shared.config.settings.removed import REMOVED
from shared.core.errors import ConfigError

P = TypeVar("P")


def load(process: type[P], given: Values, file: Path | None = None, fixed: Values | None = None) -> P:
    """`given`: the flags, which override the file. `fixed`: values that the command sets (such as the role), which
    override file and flags."""
    layers = [read_file(file) if file is not None else {}, given, fixed or {}]
    sections = {}
    for section, settings in concerns_of(process).items():
        merged = {name: value for layer in layers for name, value in layer.get(section, {}).items()}
        try:
            sections[section] = settings(**merged)
        except ConfigError as error:
            own = layers[0].get(section, {}).keys() - given.get(section, {}).keys()
            is_own = any(f"{flag_name(name)} " in error.message for name in own)
            raise ConfigError(f"{file}, [{section}]: {error.message}" if is_own else error.message) from None
    return from_sections(process, sections)


def read_file(path: Path) -> Values:
    """Raise ConfigError for tables and keys that no process knows."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path}: not valid TOML: {error}") from None
    known = all_concerns()
    return {section: read_table(path, section, table, known) for section, table in tables.items()}


def all_concerns() -> dict[str, type]:
    processes = (ClusterConfig, RayClusterConfig, NodeProcessConfig, RouterProcessConfig)
    return {name: kind for process in processes for name, kind in concerns_of(process).items()}


def read_table(path: Path, section: str, table: object, known: Mapping[str, type]) -> dict[str, Any]:
    if section not in known:
        raise ConfigError(f"{path}: unknown table [{section}]{nearest(section, known)}")
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {section} must be a table, as [{section}], not a value")
    fields = {field.name: (field, kind) for field, kind in fields_of(known[section])}
    values = {}
    for name, value in table.items():
        if name in REMOVED:
            raise ConfigError(f"{path}: [{section}] {name} is gone: {REMOVED[name]}")
        if name not in fields:
            raise ConfigError(f"{path}: unknown key {name!r} in [{section}]{nearest(name, fields)}")
        field, kind = fields[name]
        values[name] = convert(f"{path}: [{section}] {name}", value, kind, option_of(field))
    return values


def nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}"


def convert(where: str, value: object, kind: Any, declared: Option) -> Any:
    if declared.is_bytes and isinstance(value, str):
        try:
            return parse_bytes(value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}") from None
    if kind is float and type(value) is int:
        return float(value)
    if kind in (bool, int, float, str) and type(value) is kind:
        return value
    if kind in (tuple[str, ...], tuple[int, ...]) and isinstance(value, list):
        item = str if kind == tuple[str, ...] else int
        if all(type(entry) is item for entry in value):
            return tuple(value)
    raise ConfigError(f"{where} is {value!r}; it must be {kind_text(kind, declared)}")


def kind_text(kind: Any, declared: Option) -> str:
    if declared.is_bytes:
        return "a number of bytes, or a text like '512MiB'"
    texts: dict[Any, str] = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a text",
        tuple[str, ...]: "a list of texts",
        tuple[int, ...]: "a list of whole numbers",
    }
    return texts[kind]
