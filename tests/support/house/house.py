"""Measure the tree: lines, functions, prose, fields, names and imports, as tables.

    python -m tests.support.house.house [FOLDER]    of this checkout, or of another one

A line of code has a token that is neither a comment nor part of a docstring. A method is of an interface if its class
is a Protocol, or has all methods of one that declares it.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.support.house.prose import DOCUMENTED, FUNCTIONS, PRODUCT, comments, docstrings

ROOT = Path(__file__).resolve().parents[3]
MOST_FIELDS, MOST_DEFINITIONS, MOST_IMPORTS, MOST_FILES = 16, 8, 25, 24
DIVIDED = ("tests/unit/", "tests/integration/", "tests/support/")  # into rooms: see docs/where_tests_go.md
MOST_IN_A_TESTS_FOLDER = 40
COMMON = {"open", "close", "start", "stop", "run"}
ONE_API = "router.api"  # its rooms read and write the same things under the same names
OF_MODULES = {"add_arguments", "real_signatures"}  # interfaces of commands and of modules with kernels
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Module:
    name: str  # dotted, without `.__init__`
    package: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [node for node in ast.walk(self.tree) if isinstance(node, FUNCTIONS)]

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]

    @cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        return list(tokenize.generate_tokens(io.StringIO(self.source).readline))

    def num_comments(self) -> int:
        return sum(token.type == tokenize.COMMENT for token in self.tokens)

    def num_words(self) -> int:
        """Words of comments and docstrings."""
        return sum(len(text.words.split()) for text in (*docstrings(self.tree), *comments(self.source)))

    def num_code_lines(self) -> int:
        """Lines with code. A string that is a docstring has none, and neither has a line of comment alone."""
        spans = [(t.start[0], t.end[0]) for t in self.tokens if t.type not in NOT_CODE and t.string]
        lines = {n for first, last in spans for n in range(first, last + 1)}
        for node in ast.walk(self.tree):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
                lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        return len(lines)


def modules_in(root: Path, packages: Sequence[str]) -> list[Module]:
    found = []
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            found.append(Module(name, package, path.read_text("utf-8")))
    return found


def row(name: str, modules: Sequence[Module]) -> str:
    files = sorted(len(module.source.splitlines()) for module in modules)
    functions = [node for module in modules for node in module.functions]
    lengths = sorted((node.end_lineno or 0) - node.lineno + 1 for node in functions) or [0]
    documented = sum(ast.get_docstring(node) is not None for node in functions)
    num_comments, code = sum(m.num_comments() for m in modules), sum(m.num_code_lines() for m in modules)
    words = sum(module.num_words() for module in modules)
    cells = (
        f"{len(files)} / {sum(files):,}",
        f"{statistics.median(files):.0f}, {files[-1]}",
        f"{statistics.median(lengths):.0f}, {lengths[len(lengths) * 99 // 100]}, {lengths[-1]}",
        f"{documented / len(lengths):.2f}",
        f"{num_comments / sum(files):.3f}",
        f"{words / max(1, code):.2f}",
    )
    return f"| {name} | {' | '.join(cells)} |"


def fields_of(node: ast.ClassDef) -> set[str]:
    """Return the names annotated in the class's body, and those that its `__init__` assigns on self."""
    found = {s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)}
    starts = [inner for s in node.body if getattr(s, "name", "") == "__init__" for inner in ast.walk(s)]
    stored = [inner for inner in starts if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)]
    return found | {inner.attr for inner in stored if getattr(inner.value, "id", "") == "self"}


def methods_of(node: ast.ClassDef) -> set[str]:
    return {method.name for method in node.body if isinstance(method, FUNCTIONS)}


def large_classes(modules: Sequence[Module]) -> dict[str, ast.ClassDef]:
    """Return the classes with more fields than MOST_FIELDS, by dotted name."""
    named = {f"{module.name}.{node.name}": node for module in modules for node in module.classes}
    return {name: node for name, node in named.items() if len(fields_of(node)) > MOST_FIELDS}


def is_protocol(node: ast.ClassDef) -> bool:
    return any("Protocol" in ast.unparse(base) for base in node.bases)


def counted_names(modules: Sequence[Module]) -> Counter[str]:
    """Count the definitions of each function's name, outside of interfaces and of other functions."""
    classes = [node for module in modules for node in module.classes]
    interfaces = [methods_of(node) for node in classes if is_protocol(node)]
    bodies = [module.tree.body for module in modules] + [node.body for node in classes]
    counts = Counter(node.name for body in bodies for node in body if isinstance(node, FUNCTIONS))
    for node in classes:
        own = methods_of(node)
        declared = own if is_protocol(node) else {m for i in interfaces if i <= own for m in i}
        counts.subtract(declared)
    return Counter({n: k for n, k in counts.items() if not n.startswith("__") and n not in COMMON | OF_MODULES})


def imports_of(module: Module, names: set[str]) -> set[str]:
    """Return the modules of the tree that it imports anywhere, also within functions or for types alone."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {whole if (whole := f"{node.module}.{a.name}") in names else node.module for a in node.names}
    return (found & names) - {module.name}


def circles(graph: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Yield the strongly connected parts of at least two modules (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> Iterator[list[str]]:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                yield from visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            part = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(part) > 1:
                yield sorted(part)

    for name in graph:
        if name not in index:
            yield from visit(name)


def folders_of(modules: Sequence[Module]) -> set[str]:
    return {module.name.rpartition(".")[0] for module in modules} - {""}


def num_files(modules: Sequence[Module]) -> Counter[str]:
    """Count each folder's own files, without its `__init__.py`."""
    folders = folders_of(modules)
    return Counter(module.name.rpartition(".")[0] for module in modules if module.name not in folders)


def room_circles(modules: Sequence[Module]) -> dict[str, list[list[str]]]:
    """Return the folders whose rooms import each other in circles. "." stands for the files beside the rooms."""
    folders, graph, found = folders_of(modules), import_graph(modules), {}
    for folder in sorted(folders):
        places = {name: place for name in graph if (place := room_in(folder, name, folders))}
        rooms: dict[str, set[str]] = {place: set() for place in places.values()}
        for name, place in places.items():
            rooms[place] |= {places[other] for other in graph[name] if other in places} - {place}
        if parts := list(circles(rooms)):
            found[folder] = parts
    return found


def room_in(folder: str, name: str, folders: set[str]) -> str:
    """Return the room of a module in a folder, "" if it is elsewhere."""
    head, _, rest = name.removeprefix(f"{folder}.").partition(".")
    if not name.startswith(f"{folder}."):
        return ""
    return head if rest or name in folders else "."


def lists(modules: Sequence[Module]) -> Iterator[tuple[str, list[str]]]:
    """Yield each list's title, and its lines."""
    sizes = {name: len(fields_of(node)) for name, node in large_classes(modules).items()}
    yield f"classes of more than {MOST_FIELDS} fields", most(sizes, MOST_FIELDS)
    yield (
        f"names of functions defined more than {MOST_DEFINITIONS} times",
        most(counted_names(modules), MOST_DEFINITIONS),
    )
    yield "class names in two packages", shared_class_names(modules)
    fan_out = {name: len(found) for name, found in import_graph(modules).items()}
    yield f"modules that import more than {MOST_IMPORTS} of ours", most(fan_out, MOST_IMPORTS)
    yield f"folders of more than {MOST_FILES} files", most(num_files(modules), MOST_FILES)
    yield (
        "circles of rooms",
        [f"{name}: {' <-> '.join(part)}" for name, found in room_circles(modules).items() for part in found],
    )
    yield "circles of imports, lazy ones too", import_circles(modules)


def import_graph(modules: Sequence[Module]) -> dict[str, set[str]]:
    names = {module.name for module in modules}
    return {module.name: imports_of(module, names) for module in modules}


def import_circles(modules: Sequence[Module]) -> list[str]:
    return [" <-> ".join(part) for part in circles(import_graph(modules))]


def shared_class_names(modules: Sequence[Module]) -> list[str]:
    """Return each class name that several packages define, with these packages."""
    homes: defaultdict[str, set[str]] = defaultdict(set)
    for module in modules:
        for node in module.classes:
            homes[node.name].add(ONE_API if module.name.startswith(ONE_API) else module.name.rpartition(".")[0])
    return sorted(f"{name}: {', '.join(sorted(found))}" for name, found in homes.items() if len(found) > 1)


def full_rooms(root: Path) -> list[str]:
    """Return the folders of tests that hold too many files of code."""
    sizes = Counter(path.parent.relative_to(root).as_posix() for path in (root / "tests").rglob("*.py"))
    rooms = {name: size for name, size in sizes.items() if f"{name}/".startswith(DIVIDED)}
    others = {name: size for name, size in sizes.items() if name not in rooms}
    return [*most(rooms, MOST_FILES), *most(others, MOST_IN_A_TESTS_FOLDER)]


def most(sizes: Mapping[str, int], above: int) -> list[str]:
    return [
        f"{size} {name}" for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])) if size > above
    ]


def report(root: Path) -> Iterable[str]:
    product = modules_in(root, PRODUCT)
    others = {folder: modules_in(root, [folder]) for folder in ("benchmarks", "tests")}
    yield "| | files / lines | file median, max | fn median, p99, max | fn doc | comment | words per line |"
    yield "|---|---|---|---|---|---|---|"
    parts = {package: [module for module in product if module.package == package] for package in PRODUCT}
    yield from (row(name, part) for name, part in {**parts, "**product**": product, **others}.items() if part)
    for title, lines in lists(product):
        yield f"\n{title}: {len(lines)}"
        yield from (f"- {line}" for line in lines)


if __name__ == "__main__":
    print("\n".join(report(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)))
