"""Marks which statements of the product's functions run. An import hook puts `__ran__[number] = 1` before each of them,
which costs a small part of what `sys.settrace` costs, and which forked processes share. Knows nothing of tests.

Statements outside of functions run at import, and code that a compiler reads (`shared/kernel`, `@exact`, `@triton.jit`)
can't store into a global: neither has a number.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType

COMPILED = ("shared.kernel", "shared.gpu_kernel")
PACKAGES = ("baton_serve", "decode_node", "deploy", "prefill_node", "router", "shared")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
RUN_AS_WRITTEN = ("property", "setter", "classmethod", "staticmethod", "overload", "cached_property", "cache")
RUN_AS_WRITTEN += ("lru_cache", "contextmanager", "asynccontextmanager", "inference_mode")  # decorators' last names
MAX_STATEMENTS = 1 << 17
DIGITS = bytes.maketrans(b"\0\1", b"01")


def bodies(node: ast.AST, inside: bool = False) -> Iterator[list[ast.stmt]]:
    """Every list of statements inside of a function."""
    if isinstance(node, FUNCTIONS):
        if not all(_last_name(one) in RUN_AS_WRITTEN for one in node.decorator_list):
            return
        inside = True
    for _, value in ast.iter_fields(node):
        if inside and isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield value
    for child in ast.iter_child_nodes(node):
        yield from bodies(child, inside)


def _last_name(decorator: ast.expr) -> str:
    return ast.unparse(decorator).partition("(")[0].rpartition(".")[2]


def statements(tree: ast.Module) -> list[ast.stmt]:
    """A statement's number is its place in this list."""
    return [one for body in bodies(tree) for one in body if not _is_docstring(one)]


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def numbers_of(source: str, lines: Sequence[int]) -> set[int]:
    """Numbers of the innermost statements at these lines. Lines outside of functions have none."""
    known, found = statements(ast.parse(source)), set()
    for line in lines:
        around = [n for n, one in enumerate(known) if one.lineno <= line <= (one.end_lineno or one.lineno)]
        if around:
            found.add(max(around, key=lambda n: (known[n].lineno, n)))
    return found


def instrumented(source: str, path: str, first: int) -> tuple[CodeType, int]:
    """The code with a mark before each statement, numbered from `first` on, and how many these are."""
    tree = ast.parse(source)
    marks = {id(one): _mark(first + number, one) for number, one in enumerate(statements(tree))}
    for body in list(bodies(tree)):
        body[:] = [part for one in body for part in (marks.get(id(one)), one) if part is not None]
    return compile(tree, path, "exec", dont_inherit=True), len(marks)


def _mark(number: int, statement: ast.stmt) -> ast.stmt:
    """A failure is reported at the statement's line, and the virtual GPU counts by lines."""
    (mark,) = ast.parse(f"__ran__[{number}] = 1").body
    for node in ast.walk(mark):
        if isinstance(node, ast.expr | ast.stmt):
            node.lineno = node.end_lineno = statement.lineno
            node.col_offset = node.end_col_offset = statement.col_offset
    return mark


class Instrument(importlib.abc.MetaPathFinder):
    """To be put first into `sys.meta_path`. `spans`: file -> the numbers of its statements, as far as it is loaded."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._ran = mmap.mmap(-1, MAX_STATEMENTS)
        self._num = 0
        self.spans: dict[str, tuple[int, int]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES or fullname.startswith(COMPILED):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            spec.loader = _Loader(fullname, spec.origin, self)
        return spec

    def code_of(self, path: str) -> CodeType:
        code, count = instrumented(Path(path).read_text(encoding="utf-8"), path, self._num)
        self.spans[Path(path).relative_to(self._root).as_posix()] = (self._num, self._num + count)
        self._num += count
        if self._num > MAX_STATEMENTS:
            raise ValueError(f"more than {MAX_STATEMENTS} statements")
        return code

    def mark_into(self, module: ModuleType) -> None:
        module.__dict__["__ran__"] = self._ran

    def take(self) -> int:
        """What ran since the last call: a byte a statement, the lowest first."""
        ran = int.from_bytes(self._ran[:], "little")
        self._ran[:] = bytes(MAX_STATEMENTS)
        return ran

    def put_back(self, ran: int) -> None:
        self._ran[:] = ran.to_bytes(MAX_STATEMENTS, "little")

    def by_file(self, ran: int) -> dict[str, str]:
        """A number in hex for each file that ran: bit n is the file's statement n."""
        marks, found = ran.to_bytes(MAX_STATEMENTS, "little"), {}
        for file, (first, end) in self.spans.items():
            bits = marks[first:end]
            if 1 in bits:
                found[file] = f"{int(bits[::-1].translate(DIGITS), 2):x}"
        return found


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, instrument: Instrument) -> None:
        super().__init__(fullname, path)
        self._instrument = instrument

    def get_code(self, fullname: str) -> CodeType:
        """Never from a cache."""
        return self._instrument.code_of(self.path)

    def exec_module(self, module: ModuleType) -> None:
        self._instrument.mark_into(module)
        super().exec_module(module)
