"""Draws single-change mutants of some files with Cosmic Ray's operators, in an order decided by a seed, as JSON lines.

    <python with cosmic-ray> draw.py ROOT SEED LIMIT < {"area": ["shared/kv/pages.py", ...], ...}

Every place where an operator applies comes once, with one of its mutations. Left out is what no test could tell by
construction: annotations, texts of messages and logs, options of @dataclass, and checks that only guard ourselves
(`assert`, `strict=`). Runs in an environment of its own; knows nothing of tests.
"""

from __future__ import annotations

import ast
import itertools
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.operators.provider import OperatorProvider
from parso.python.tree import Keyword

Place = tuple[int, int]  # line from 1, column from 0
Span = tuple[Place, Place]
# two need arguments; the only decorators here are @property and the like, without which nothing runs at all
LEFT_OUT = ("VariableReplacer", "VariableInserter", "RemoveDecorator")
THROWN_BY_NOBODY = ("CosmicRayTestingException", "ZeroDivisionError")  # the operator's name is not imported here
SILENT_KEYWORDS = ("strict", "non_blocking", "label")
# what the many operators look at; the others look at every node
NODES_OF = {
    "ReplaceBinaryOperator": ("operator",),
    "ReplaceComparisonOperator": ("comparison",),
    "ReplaceUnaryOperator": ("factor", "not_test"),
}


@dataclass(frozen=True)
class Drawn:
    """`text` is the whole file with the change in it; `before` and `after` are the lines that differ."""

    area: str
    file: str
    operator: str
    line: int
    column: int
    before: str
    after: str
    text: str


class DropStatement(Operator):
    """Replaces a statement that only has effects (a call, a store into an object, del, raise) by `pass`."""

    def mutation_positions(self, node: object) -> Iterator[Span]:
        if node.type == "simple_stmt" and _has_effects(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: object, index: int) -> object:
        first = node.children[0]
        node.children[0] = Keyword("pass", first.start_pos, first.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("def f():\n    g()\n", "def f():\n    pass\n"),)


def _has_effects(statement: object) -> bool:
    if statement.type in ("del_stmt", "raise_stmt"):
        return True
    if statement.type == "atom_expr":
        return statement.children[-1].type == "trailer"
    if statement.type != "expr_stmt" or statement.children[1].type == "annassign":
        return False
    if statement.children[1].value != "=":
        return True
    function = statement.search_ancestor("funcdef")  # without a store of __init__ nothing runs at all
    return statement.children[0].type == "atom_expr" and function is not None and function.name.value != "__init__"


def operators() -> dict[str, Operator]:
    provider = OperatorProvider()
    found = {name: provider[name]() for name in provider if name not in LEFT_OUT}
    return {**found, "DropStatement": DropStatement()}


def silent_spans(source: str) -> list[Span]:
    """Parts of a file whose change nobody could see."""
    spans: list[Span] = []
    for node in ast.walk(ast.parse(source)):
        spans += [_span(part) for part in _silent_parts(node)]
    return spans


def _silent_parts(node: ast.AST) -> Iterable[ast.AST]:
    if isinstance(node, ast.arg | ast.AnnAssign):
        return [node.annotation] if node.annotation is not None else []
    if isinstance(node, ast.FunctionDef):
        return [node.returns] if node.returns is not None else []
    if isinstance(node, ast.ClassDef):
        return node.decorator_list
    if isinstance(node, ast.JoinedStr | ast.Assert):
        return [node]
    if isinstance(node, ast.keyword):
        return [node.value] if node.arg in SILENT_KEYWORDS else []
    is_log = isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("logger.", "logging."))
    return [node] if is_log else []


def _span(node: ast.AST) -> Span:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def places(source: str) -> dict[tuple[str, Place], list[tuple[str, int]]]:
    """(kind of operator, where) -> (operator, occurrence) of each mutation that is possible there."""
    silent, counts = silent_spans(source), defaultdict(int)
    found: dict[tuple[str, Place], list[tuple[str, int]]] = defaultdict(list)
    table = operators()
    for node in ast_nodes(get_ast(source)):
        for name, operator in table.items():
            if node.type not in NODES_OF.get(name.partition("_")[0], (node.type,)):
                continue
            for begin, end in operator.mutation_positions(node):
                occurrence = counts[name]
                counts[name] += 1
                if not any(first <= begin and end <= last for first, last in silent):
                    found[type(operator).__module__, begin].append((name, occurrence))
    return found


def draw(root: Path, area: str, files: list[str], rng: random.Random) -> Iterator[Drawn]:
    sources = {file: (root / file).read_text() for file in files}
    chosen = [
        (file, where, *rng.choice(choices))
        for file, source in sources.items()
        for (_, where), choices in sorted(places(source).items())
    ]
    rng.shuffle(chosen)
    table = operators()
    for file, (line, column), name, occurrence in chosen:
        text = (mutate_code(sources[file], table[name], occurrence) or "").replace(*THROWN_BY_NOBODY)
        start, before, after = _difference(sources[file], text)
        if start > line or start + before.count("\n") < line:
            raise ValueError(f"{file}:{line} {name} changed line {start}")
        yield Drawn(area, file, name, line, column, before, after, text)


def _difference(old: str, new: str) -> tuple[int, str, str]:
    """(line, old lines, new lines) without what both begin and end with."""
    first, second = old.splitlines(), new.splitlines()
    start = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    end = next(i for i, (a, b) in enumerate(zip(first[::-1], second[::-1], strict=False)) if a != b)
    return start + 1, "\n".join(first[start : len(first) - end]), "\n".join(second[start : len(second) - end])


def main(root: str, seed: str, limit: str) -> None:
    """At most `limit` of each area."""
    for area, files in json.load(sys.stdin).items():
        for drawn in itertools.islice(draw(Path(root), area, files, random.Random(f"{seed} {area}")), int(limit)):
            print(json.dumps(asdict(drawn)))


if __name__ == "__main__":
    main(*sys.argv[1:])
