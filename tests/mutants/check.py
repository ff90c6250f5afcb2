"""Check within seconds that the mutants, the slips, the marks on tests and the tables made of both fit the code.

    python tests/mutants/check.py [--write]       # --write: make docs/rules.md anew

Part of `make lint`. Each old text occurs once under its name, the changed files compile, the tests exist.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import catalogue
import tables
from catalogue import ROOT, CatalogueError, Mutant, Slip

PAGE = ROOT / "docs" / "rules.md"


def check(mutants: list[Mutant], slips: list[Slip]) -> list[str]:
    """Return what is wrong with the mutants, the slips and their marks, nothing when all fit."""
    rules, tests = tables.read_rules(), catalogue.find_tests()
    wrong = [error for mutant in mutants for error in (*wrong_edits(mutant), *wrong_kills(mutant, tests))]
    wrong += [error for slip in slips for error in wrong_edits(slip)]
    return wrong + tables.check_marks(rules, tables.read_marks(mutants))


def wrong_edits(mutant: Mutant | Slip) -> Iterator[str]:
    try:
        for path, text in catalogue.mutated(mutant).items():
            if text == path.read_text():
                yield f"{mutant.name}: changes nothing in {path.name}"
            if path.suffix == ".py":
                compile(text, str(path), "exec")
    except CatalogueError as error:
        yield str(error)
    except SyntaxError as error:
        yield f"{mutant.name}: no Python any more: {error}"


def wrong_kills(mutant: Mutant, tests: dict[str, list[Path]]) -> Iterator[str]:
    for test in mutant.kills:
        try:
            catalogue.node_id(test, tests)
        except CatalogueError as error:
            yield f"{mutant.name}: {error}"


def page(mutants: list[Mutant]) -> str:
    return tables.rules_page(tables.read_rules(), tables.read_marks(mutants))


def main(argv: list[str]) -> int:
    mutants, slips = catalogue.read_all(), catalogue.read_slips()
    wrong = check(mutants, slips)
    if not wrong and "--write" in argv:
        PAGE.write_text(page(mutants))
    elif not wrong and PAGE.read_text() != page(mutants):
        wrong.append(f"{PAGE.name} is stale: python tests/mutants/check.py --write")
    print("\n".join(wrong) or f"{len(mutants)} mutants and {len(slips)} slips fit the code")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
