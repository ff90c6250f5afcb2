"""Finds every `baton` command line in the files under deploy/launch, and takes it through the real CLI."""

from __future__ import annotations

import configparser
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from deploy import cli
from shared.config.flags import given_values
from shared.config.load import load

LAUNCH = Path(__file__).resolve().parents[3] / "deploy" / "launch"
CONFIG = LAUNCH / "baton.toml"
WORDS = {*cli.COMMANDS, *cli.TOOLS}
OURS = re.compile(r"(?:.*/)?baton(?:-router|-cuda)?[:@]")  # the images
OPERATORS = set("|&;<>()")
# What stands for itself until the file runs. Anything else becomes a number, which serves as a name, too.
KNOWN = {"$BATON": "baton", "${name%-*}": "decode", "$(POD_IP)": "10.0.0.1", "$(POD_NAME)": "decode-0"}
VARIABLE = re.compile(r"\$\{[^}]*\}|\$\([^)]*\)|\$\w+")

Line = list[str]  # from the word after `baton` on


def with_values(text: str) -> str:
    return VARIABLE.sub(lambda match: KNOWN.get(match[0], "7"), text)


def shell_lines(script: str) -> Iterator[Line]:
    """The `baton` commands of a shell text."""
    for text in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(with_values(text), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        yield from commands_of(list(lexer))


def commands_of(tokens: list[str]) -> Iterator[Line]:
    for at, token in enumerate(tokens[:-1]):
        if Path(token).name == "baton" and tokens[at + 1] in WORDS:
            rest = tokens[at + 1 :]
            end = next((i for i, word in enumerate(rest) if set(word) <= OPERATORS), len(rest))
            yield rest[:end]


def read_unit(path: Path) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(path.read_text("utf-8"))
    return unit


def unit_lines(path: Path) -> Iterator[Line]:
    yield from shell_lines(read_unit(path)["Service"]["ExecStart"].replace("%i", "0"))


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def dicts_in(value: object) -> Iterator[dict[str, Any]]:
    """The value's own and all nested dictionaries."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from dicts_in(inner)
    if isinstance(value, list):
        for inner in value:
            yield from dicts_in(inner)


def yaml_lines(path: Path) -> Iterator[Line]:
    yield from lines_in(documents(path))


def lines_in(objects: Iterable[dict[str, Any]]) -> Iterator[Line]:
    """`args` of our own image, compose's `command` of it, and shell texts in any `command`."""
    for found in (one for document in objects for one in dicts_in(document)):
        is_ours = OURS.match(str(found.get("image", ""))) is not None
        words = found.get("args") or found.get("command") or []
        if "sh" in words[:1]:
            yield from shell_lines(words[2])
        elif is_ours and words:
            yield [with_values(word) for word in words]


def readme_lines(path: Path) -> Iterator[Line]:
    for block in re.findall(r"^```\n(.*?)^```", path.read_text("utf-8"), re.MULTILINE | re.DOTALL):
        yield from shell_lines(block)


def lines_of(path: Path) -> list[Line]:
    kinds = {".service": unit_lines, ".yaml": yaml_lines, ".md": readme_lines}
    script = re.sub(r"^\s*#.*$", "", path.read_text("utf-8"), flags=re.MULTILINE)
    return list(kinds[path.suffix](path) if path.suffix in kinds else shell_lines(script))


def take_through_the_cli(line: Line) -> Any:
    """The namespace or configuration that this line gives; AssertionError where the CLI would refuse it."""
    try:
        args = cli.make_parser().parse_args(line)
    except SystemExit:
        raise AssertionError(f"the CLI refuses: baton {' '.join(line)}") from None
    if line[0] not in cli.COMMANDS:
        return args
    command = cli.COMMANDS[line[0]]
    fixed = {"node": {"role": command.fixed_role}} if command.fixed_role else {}
    config = load(command.process, given_values(args), CONFIG if args.config else None, fixed)
    assert not command.fixed_role or config.parts.node.router, f"it dials nobody: baton {' '.join(line)}"
    return config
