"""Read the mutants: what is taken out of the code, under which dotted name, and which tests must notice.

They stand in `catalogue/*.toml`, one file a room. No path is named: a module that moves changes one dotted name, a test
that moves changes nothing. Reads source text only and imports none of it.
"""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = Path(__file__).with_name("catalogue")
SLIPS = Path(__file__).with_name("slips") / "slips.toml"
TEST = re.compile(r"^(?:async )?(?:def (test_\w+)\(|(test_\w+) = )", re.MULTILINE)
SCOPES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
Node = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class CatalogueError(Exception):
    """A mutant does not fit the code; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace the lines `old`, which occur exactly once under the dotted name `at`, by the lines `new`.

    Indentation is that of the code: a function that moves into a class keeps its mutants. A file that is not Python is
    named by its path from the root.
    """

    at: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """`kills`: tests by name, as `file::name` where two files have the name. `rules`: rows of docs/rules.md."""

    name: str
    why: str
    edits: tuple[Edit, ...]
    kills: tuple[str, ...]
    rules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Slip:
    """Like a mutant, but nobody has said which test must notice. `minds`: who suffers."""

    name: str
    why: str
    minds: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True, slots=True)
class Scope:
    """The lines `first` to `end` (from 0, end excluded) of a file that a dotted name stands for."""

    path: Path
    first: int
    end: int


def read_all(wanted: tuple[str, ...] = (), folder: Path = CATALOGUE) -> list[Mutant]:
    """Return all mutants in the order of their names, or those whose name contains one of `wanted`."""
    mutants = [
        read_mutant(name, fields)
        for path in folder.glob("*.toml")
        for name, fields in tomllib.loads(path.read_text()).items()
    ]
    names = [mutant.name for mutant in mutants]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise CatalogueError(f"two mutants are called {sorted(twice)}")
    chosen = [mutant for mutant in mutants if not wanted or any(part in mutant.name for part in wanted)]
    return sorted(chosen, key=lambda mutant: mutant.name)


def read_mutant(name: str, fields: dict[str, Any]) -> Mutant:
    """Raises CatalogueError when a field is missing, empty or unknown."""
    texts = {key: tuple(fields.get(key, ())) for key in ("kills", "rules")}
    try:
        mutant = Mutant(name=name, why=fields["why"], edits=_read_edits(fields), **texts)
    except (KeyError, TypeError) as error:
        raise CatalogueError(f"{name}: needs why, kills and edits of at, old and new: {error}") from None
    if not (mutant.edits and mutant.kills and fields.keys() <= {"why", "kills", "edits", "rules"}):
        raise CatalogueError(f"{name}: needs edits and kills, may have rules, and has {sorted(fields)}")
    return mutant


def _read_edits(fields: dict[str, Any]) -> tuple[Edit, ...]:
    return tuple(Edit(**edit) for edit in fields["edits"])


def read_slips(wanted: tuple[str, ...] = (), path: Path = SLIPS) -> list[Slip]:
    """Return the slips in the order of the file, or those called like one of `wanted`. Raises CatalogueError."""
    entries = tomllib.loads(path.read_text())
    strangers = set(wanted) - entries.keys()
    if strangers:
        raise CatalogueError(f"no slip is called {sorted(strangers)}")
    return [read_slip(name, fields) for name, fields in entries.items() if not wanted or name in wanted]


def read_slip(name: str, fields: dict[str, Any]) -> Slip:
    """Raises CatalogueError when a field is missing, empty or unknown."""
    try:
        slip = Slip(name, **(fields | {"edits": _read_edits(fields)}))
    except (KeyError, TypeError) as error:
        raise CatalogueError(f"{name}: needs why, minds and edits of at, old and new: {error}") from None
    if not (slip.why and slip.minds and slip.edits):
        raise CatalogueError(f"{name}: needs why, minds and edits")
    return slip


def mutated(mutant: Mutant | Slip, root: Path = ROOT) -> dict[Path, str]:
    """Return the new text of each file that the mutant changes. Raises CatalogueError when an edit does not fit."""
    spans: dict[Path, list[tuple[int, int, list[str]]]] = {}
    for edit in mutant.edits:
        try:
            path, first, new = place(edit, root)
        except CatalogueError as error:
            raise CatalogueError(f"{mutant.name}: {error}") from None
        spans.setdefault(path, []).append((first, first + len(edit.old.splitlines()), new))
    return {path: _replaced(path, sorted(found, reverse=True)) for path, found in spans.items()}


def _replaced(path: Path, spans: list[tuple[int, int, list[str]]]) -> str:
    """Replace spans of a file, last one first."""
    lines = path.read_text().splitlines()
    for first, end, new in spans:
        lines[first:end] = new
    return "\n".join(lines) + "\n"


def place(edit: Edit, root: Path) -> tuple[Path, int, list[str]]:
    """Return (file, line from 0 at which `old` begins, the new lines with the code's indentation)."""
    scope = find_scope(edit.at, root)
    lines, old = scope.path.read_text().splitlines(), edit.old.splitlines()
    hits = [first for first in range(scope.first, scope.end - len(old) + 1) if _indent(lines, first, old) is not None]
    if len(hits) != 1:
        raise CatalogueError(f"the old text occurs {len(hits)} times under {edit.at}: {edit.old!r}")
    indent = _indent(lines, hits[0], old) or ""
    return scope.path, hits[0], [indent + line if line else line for line in edit.new.splitlines()]


def _indent(lines: list[str], first: int, old: list[str]) -> str | None:
    """Return the indentation that `old` has at this line, None where it does not stand."""
    indent = lines[first].removesuffix(old[0])
    if len(indent) + len(old[0]) != len(lines[first]) or indent.strip():
        return None
    fits = all(line == (indent + part if part else part) for line, part in zip(lines[first:], old, strict=False))
    return indent if fits else None


def find_scope(at: str, root: Path) -> Scope:
    """Find a module, class or function by its dotted name, or a file by its path."""
    if "/" in at:
        return Scope(root / at, 0, len((root / at).read_text().splitlines()))
    path, inner = _find_module(at, root)
    node: Node = _parse(path, path.stat().st_mtime_ns)
    for name in inner:
        matching = [child for child in node.body if isinstance(child, SCOPES) and child.name == name]
        if len(matching) != 1:
            raise CatalogueError(f"{at}: {path.name} has {name} {len(matching)} times")
        node = matching[0]
    if isinstance(node, ast.Module):
        return Scope(path, 0, len(path.read_text().splitlines()))
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    return Scope(path, first - 1, node.end_lineno or first)


def module_of(file: str) -> str:
    """Return the dotted name of a Python file that is named by its path from the root."""
    return file.removesuffix(".py").replace("/", ".")


def _find_module(at: str, root: Path) -> tuple[Path, list[str]]:
    parts = at.split(".")
    for count in range(len(parts), 0, -1):
        folder = root.joinpath(*parts[:count])
        for path in (folder.with_suffix(".py"), folder / "__init__.py"):
            if path.is_file():
                return path, parts[count:]
    raise CatalogueError(f"there is no module {at}")


@functools.cache
def _parse(path: Path, _changed_ns: int) -> ast.Module:
    return ast.parse(path.read_text())


def find_tests(root: Path = ROOT) -> dict[str, list[Path]]:
    """Return the files that have a test of each name; paths from the root."""
    found: dict[str, list[Path]] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        for match in TEST.finditer(path.read_text()):
            found.setdefault(match[1] or match[2], []).append(path.relative_to(root))
    return found


def node_id(test: str, tests: dict[str, list[Path]]) -> str:
    """Return what pytest calls a test that a mutant names. Raises CatalogueError unless exactly one is meant."""
    stem, _, name = test.rpartition("::")
    files = [path for path in tests.get(name, []) if stem in ("", path.stem)]
    if len(files) != 1:
        where = ", ".join(path.stem for path in files) or "no file"
        raise CatalogueError(f"{test} stands in {where}; one was expected")
    return f"{files[0].as_posix()}::{name}"
