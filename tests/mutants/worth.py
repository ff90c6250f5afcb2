"""What each test file is worth: the mutants that it was the first to notice, and the statements that it alone runs.

    python tests/mutants/worth.py --write     tests/mutants/worth.txt anew, from the files in build/
    python tests/mutants/worth.py --idle      tests that notice nothing first, run nothing alone and name no rule

An idle test is only a candidate: it may state an API, or document a fault that happened. A mutant that the short files
notice is not tried on the long ones, so "first" is less than "alone"; a mutant of the catalogue counts for a file if it
names no other.
"""

from __future__ import annotations

import argparse
import ast
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from catalogue import ROOT, find_tests, node_id, read_all
from choose import file_of, test_of
from sampled import Results
from tables import marked_tests
from traced import TRACE, Record, read
from trial import KILLED

TABLE = ROOT / "tests" / "mutants" / "worth.txt"
Group = Callable[[str], str]  # `file_of` or `test_of`: whose cases count together


def alone(records: Iterable[Record], group: Group) -> Counter[str]:
    """How many statements each group runs that no other group runs."""
    ran: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))  # product file -> group -> statements
    for record in records:
        for name, case in record["cases"].items():
            for file, statements in case["ran"].items():
                ran[file][group(name)] |= int(statements, 16)
    found: Counter[str] = Counter()
    for of_group in ran.values():
        once = twice = 0
        for statements in of_group.values():
            twice |= once & statements
            once |= statements
        for name, statements in of_group.items():
            found[name] += (statements & ~twice).bit_count()
    return found


def noticed_first(group: Group) -> Counter[str]:
    """The drawn mutants of all results, by the group that was the first to notice."""
    paths = [path for kind in ("arguments", "mutants") for path in (ROOT / "build").glob(f"{kind}-*.jsonl")]
    verdicts = (result.verdict for path in sorted(paths) for result in Results(path).of.values())
    return Counter(group(one.by) for one in verdicts if one.outcome == KILLED)


def named_alone(group: Group) -> Counter[str]:
    """The catalogue's mutants that name tests of one group only."""
    known = find_tests()
    groups = [{group(node_id(test, known)) for test in mutant.kills} for mutant in read_all()]
    return Counter(next(iter(found)) for found in groups if len(found) == 1)


def of_a_rule(files: Iterable[str]) -> set[str]:
    return {f"{file}::{test}" for file in files for test, _ in marked_tests(ast.parse((ROOT / file).read_text()))}


def table(records: Mapping[tuple[str, str], Record]) -> Iterator[str]:
    first, named, own = noticed_first(file_of), named_alone(file_of), alone(records.values(), file_of)
    cases = Counter(file_of(name) for record in records.values() for name in record["cases"])
    seconds: dict[str, float] = defaultdict(float)
    for record in records.values():
        seconds[record["file"]] += sum(case["seconds"] for case in record["cases"].values())
    parts = " and ".join(sorted({record["part"] for record in records.values()}))
    yield f"{time.strftime('%Y-%m-%d')}: {cases.total()} cases of {len(cases)} test files, part {parts}."
    yield f"Mutants: {first.total()} drawn and noticed, {named.total()} of the catalogue name one file. See worth.py.\n"
    yield f"{'cases':>6}{'seconds':>9}{'drawn, first':>14}{'named, alone':>14}{'statements, alone':>19}  file"
    for file in sorted(cases):
        numbers = f"{first[file]:>14}{named[file]:>14}{own[file]:>19}"
        yield f"{cases[file]:>6}{seconds[file]:>9.1f}{numbers}  {file.removeprefix('tests/')}"


def idle(records: Mapping[tuple[str, str], Record]) -> Iterator[str]:
    first, own = noticed_first(test_of), alone(records.values(), test_of)
    known = find_tests()
    named = {node_id(test, known) for mutant in read_all() for test in mutant.kills}
    tests = {test_of(name) for record in records.values() for name in record["cases"]}
    marked = of_a_rule({record["file"] for record in records.values()})
    yield from sorted(test for test in tests - named - marked if not first[test] and not own[test])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--idle", action="store_true")
    options, records = parser.parse_args(), read(TRACE)
    lines = "\n".join(idle(records) if options.idle else table(records)) + "\n"
    if options.write:
        TABLE.write_text(lines)
    else:
        sys.stdout.write(lines)


if __name__ == "__main__":
    main()
