"""Make docs/rules.md out of rules.toml, the marks on tests and the mutants.

A test says which rules it keeps, `@pytest.mark.rule("S7", "H6")`. A mutant says which it breaks, `rules = ["S7"]`. The
texts of the rules stand in rules.toml. Reads source text only; runs no test.
"""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from catalogue import ROOT, CatalogueError, Mutant, find_scope

RULES = Path(__file__).with_name("rules.toml")
MARK = "pytest.mark.rule"
INTRODUCTION = """# The rules of the engine

This page is for readers who meet a name such as S6, H11, I3 or "rule c" in the code. It shows the rule, its reason, the
code that keeps the rule, and the tests that fail without it.

- **S1 to S12** are the rules from five reports on sgl-project/sglang: #25818, #25862, #25879, #25945, #26020.
  [engine.md](engine.md) explains them in context.
- **Ra to Rk** are the regressions that the five reports suggest.
- **La to Lf** are the liveness rules of memory. The code calls them rule a to rule f.
- **H1 to H47** are hazards: ways in which engines of this kind have failed, or could fail.
- **I1 to I10** are invariants that hold at every moment.

Tests are named as `file::test`. A mutant is an edit in `tests/mutants/catalogue/` that breaks a rule; `make mutants`
checks that its tests fail. The catalogue has many more mutants, for fences, checks and locks without a rule here.
`python tests/mutants/check.py --write` makes this page from `tests/mutants/rules.toml`, the marks
`@pytest.mark.rule("S7")` on tests, and the mutants.
"""
SECTIONS = (
    ("S", "Rules of the relay and of lengths", "rule", "why"),
    ("R", "Regressions", "what happened", "what prevents it"),
    ("L", "Liveness of memory", "rule", "why"),
    ("H", "Hazards", "hazard", "what prevents it"),
    ("I", "Invariants", "invariant", "why"),
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. Its first letter is its section's. `no_mutant` says why no mutant can break it."""

    name: str
    rule: str
    why: str
    kept_in: tuple[str, ...]
    no_mutant: str = ""


@dataclass(frozen=True, slots=True)
class Marks:
    """What keeps each rule, by the rule's name: tests as `file::name`, mutants by name."""

    tests: dict[str, list[str]]
    mutants: dict[str, list[str]]


def read_rules(path: Path = RULES) -> list[Rule]:
    return [
        Rule(name, **{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})
        for name, fields in tomllib.loads(path.read_text()).items()
    ]


def read_marks(mutants: Iterable[Mutant], root: Path = ROOT) -> Marks:
    tests, named = defaultdict(list), defaultdict(list)
    for path in sorted((root / "tests").rglob("test_*.py")):
        for test, rules in marked_tests(ast.parse(path.read_text())):
            for rule in rules:
                tests[rule].append(f"{path.stem}::{test}")
    for mutant in mutants:
        for rule in mutant.rules:
            named[rule].append(mutant.name)
    return Marks(tests, named)


def marked_tests(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Find the tests of a file that carry the mark, and its arguments. A test is a function or an assigned TestCase."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            name, calls = ast.unparse(node.targets[0]), list(ast.walk(node.value))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name, calls = node.name, list(node.decorator_list)
        else:
            continue
        for call in calls:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == MARK:
                yield name, [ast.literal_eval(argument) for argument in call.args]


def check_marks(rules: list[Rule], marks: Marks, root: Path = ROOT) -> list[str]:
    """Return what is wrong: a mark that is no rule, a rule without a test, a name that is not there."""
    names = {rule.name for rule in rules}
    wrong = [
        f"{name}: no such rule, but a mark names it" for name in (marks.tests.keys() | marks.mutants.keys()) - names
    ]
    for rule in rules:
        if not marks.tests[rule.name]:
            wrong.append(f"{rule.name}: no test has its mark")
        for dotted in rule.kept_in:
            try:
                find_scope(dotted, root)
            except CatalogueError as error:
                wrong.append(f"{rule.name}: {error}")
    return wrong


def rules_page(rules: list[Rule], marks: Marks) -> str:
    sections = (
        f"## {title}\n\n{_table([rule for rule in rules if rule.name[0] == letter], marks, what, why)}\n"
        for letter, title, what, why in SECTIONS
    )
    return "\n".join([INTRODUCTION, *sections])


def _table(rules: list[Rule], marks: Marks, what: str, why: str) -> str:
    rows = [f"| | {what} | {why} | kept in | tests | mutants |", "|---|---|---|---|---|---|"]
    for rule in rules:
        mutants = _code(marks.mutants.get(rule.name, ())) or rule.no_mutant
        cells = (rule.rule, rule.why, _code(rule.kept_in), _code(marks.tests[rule.name]), mutants)
        rows.append(f"| {rule.name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
