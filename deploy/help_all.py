"""What `baton COMMAND --help-all` shows: all flags of a command, or of a tool and its words."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

from shared.config.flags import concerns_of, fields_of, first_line, kind_name
from shared.config.settings.options import flag_name, option_of, show_bytes

LEFT = 32  # width of the column with flags
LEAST = 40  # width of the column with their meanings, at least
HEAD = (
    "Each flag stands above its line in a TOML file (--config FILE), under the file's [table]; the line shows the "
    "default. Flags override the file. MODEL is the same as --model. "
    "Where an environment variable counts too, it is named."
)
wrap = functools.partial(textwrap.wrap, break_on_hyphens=False)


def of_settings(process: type, hidden: frozenset[str]) -> str:
    """Show the settings of a daemon or a cluster, in groups."""
    width = max(shutil.get_terminal_size().columns - 2, LEFT + LEAST)
    lines = wrap(HEAD, width)
    for section, settings in concerns_of(process).items():
        fields = [(field, kind) for field, kind in fields_of(settings) if field.name not in hidden]
        if fields:
            lines += ["", *wrap(f"[{section}]  # {first_line(settings.__doc__)}", width, subsequent_indent="# ")]
        for field, kind in fields:
            lines += entry(field, kind, width)
    return "\n".join(lines) + "\n"


def entry(field: dataclasses.Field[Any], kind: Any, width: int) -> Iterator[str]:
    """Yield a flag and its key beside its meaning. One that is too long for its column has a line of its own."""
    declared, flag = option_of(field), flag_name(field.name)
    value = declared.metavar or "|".join(declared.choices) or kind_name(kind)
    default = show_bytes(field.default) if declared.is_bytes and field.default else field.default
    meaning = iter(wrap(declared.help, width - LEFT))
    for text in (
        f"{flag}, --no-{flag[2:]}" if kind is bool else f"{flag} {value}",
        f"  {field.name} = {json.dumps(default)}",
    ):
        yield f"{text:<{LEFT}}{next(meaning, '')}".rstrip() if len(text) < LEFT - 1 else text
    yield from (" " * LEFT + line for line in meaning)


def of_words(parser: argparse.ArgumentParser) -> str:
    """Show the help of a tool, then that of each of its words."""
    inner = (action.choices.values() for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return "\n".join([parser.format_help(), *(of_words(word) for words in inner for word in words)])
