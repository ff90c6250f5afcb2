"""Make SEEDS.md and HAZARDS.md out of rules.toml, the marks on tests and the mutants.

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
MADE = "`python tests/mutants/check.py --write`\nmakes this page; the texts are in tests/mutants/rules.toml."
MARK = "pytest.mark.rule"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of the engine (S), regression (R), hazard (H) or invariant (I).

    A hazard whose mechanism is not there has no test, but a `reason` and the `types` that rule it out.
    """

    name: str
    rule: str
    kept_in: tuple[str, ...] = ()
    note: str = ""
    reason: str = ""
    types: tuple[str, ...] = ()


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
    """Return what is wrong: a mark that is no rule, a rule without test or reason, a name that is not there."""
    names = {rule.name for rule in rules}
    wrong = [
        f"{name}: no such rule, but a mark names it" for name in (marks.tests.keys() | marks.mutants.keys()) - names
    ]
    for rule in rules:
        if not marks.tests[rule.name] and not (rule.reason and rule.types):
            wrong.append(f"{rule.name}: no test has its mark, and no reason with types says why it can't occur")
        for dotted in (*rule.kept_in, *rule.types):
            try:
                find_scope(dotted, root)
            except CatalogueError as error:
                wrong.append(f"{rule.name}: {error}")
    return wrong


def seeds_page(rules: list[Rule], marks: Marks, mutants: list[Mutant]) -> str:
    seeds = [rule for rule in rules if rule.name[0] == "S"]
    regressions = [rule for rule in rules if rule.name[0] == "R"]
    told = {rule.name for rule in (*seeds, *regressions)}
    return f"""# From the seeds to the tests

Baton's engine begins where five reports on sgl-project/sglang ended: #25818, #25862, #25879, #25945, #26020. The first
two tables list each rule that they left and each regression that they suggest: the code that keeps it, the tests that
fail without it, and the mutants that prove it (`make mutants` takes away what a mutant names, and its tests must fail).
The last table lists all other mutants. {MADE}

## Rules

{_table(seeds, marks)}

## Regressions

{_table(regressions, marks)}

## What Baton adds

{_mutant_table([mutant for mutant in mutants if told.isdisjoint(mutant.rules)])}
"""


def _table(rules: list[Rule], marks: Marks) -> str:
    rows = ["| | rule | kept in | tests | mutants |", "|---|---|---|---|---|"]
    for rule in rules:
        mutants = _code(marks.mutants[rule.name]) or rule.note
        rows.append(
            f"| {rule.name} | {rule.rule} | {_code(rule.kept_in)} | {_code(marks.tests[rule.name])} | {mutants} |"
        )
    return "\n".join(rows)


def _mutant_table(mutants: list[Mutant]) -> str:
    rows = ["| taken away | in | noticed by |", "|---|---|---|"]
    for mutant in sorted(mutants, key=lambda one: (one.edits[0].at, one.name)):
        places = dict.fromkeys(edit.at for edit in mutant.edits)
        rows.append(f"| {mutant.why} (`{mutant.name}`) | {_code(places)} | {_code(mutant.kills)} |")
    return "\n".join(rows)


def hazards_page(rules: list[Rule], marks: Marks, unseen: str) -> str:
    return f"""# Hazards

Ways in which engines of this kind have been seen to fail, or could. Each has a test that would notice. Where Baton does
not have the mechanism, the row says "can't occur" and names the types that rule it out: whoever brings the mechanism
brings the test. {MADE}

{_hazard_table([rule for rule in rules if rule.name[0] == "H"], marks, "hazard")}

## Invariants

{_hazard_table([rule for rule in rules if rule.name[0] == "I"], marks, "invariant")}

{unseen}"""


def _hazard_table(rules: list[Rule], marks: Marks, kind: str) -> str:
    rows = [f"| | {kind} | tests, or reason | mutants |", "|---|---|---|---|"]
    for rule in rules:
        found = f"can't occur: {rule.reason} ({_code(rule.types)})" if rule.reason else _code(marks.tests[rule.name])
        note = f"; {rule.note}" if rule.note else ""
        rows.append(f"| {rule.name} | {rule.rule} | {found}{note} | {_code(marks.mutants[rule.name])} |")
    return "\n".join(rows)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
