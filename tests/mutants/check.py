"""Check within seconds that the mutants, the slips, the marks on tests and the tables made of both fit the code.

    python tests/mutants/check.py [--write]       # --write: make SEEDS.md and HAZARDS.md anew

Part of `make lint`. Each old text occurs once under its name, the changed files compile, the tests exist.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import catalogue
import tables
from catalogue import ROOT, CatalogueError, Mutant, Slip

TESTS = ROOT / "tests"
UNSEEN = "## What the tests do not see yet"


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


def pages(mutants: list[Mutant]) -> dict[Path, str]:
    """Return the text of each generated page. What the tests don't see is written by hand and stays."""
    rules, marks = tables.read_rules(), tables.read_marks(mutants)
    hazards = TESTS / "HAZARDS.md"
    _, head, unseen = hazards.read_text().partition(UNSEEN)
    return {
        TESTS / "SEEDS.md": tables.seeds_page(rules, marks, mutants),
        hazards: tables.hazards_page(rules, marks, head + unseen),
    }


def main(argv: list[str]) -> int:
    mutants, slips = catalogue.read_all(), catalogue.read_slips()
    wrong = check(mutants, slips)
    for path, text in pages(mutants).items() if not wrong else ():
        if "--write" in argv:
            path.write_text(text)
        elif path.read_text() != text:
            wrong.append(f"{path.name} is stale: python tests/mutants/check.py --write")
    print("\n".join(wrong) or f"{len(mutants)} mutants and {len(slips)} slips fit the code")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
