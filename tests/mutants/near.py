"""Run the tests that are nearest to what the working tree changed: `make test-near`.

    python tests/mutants/near.py [--base REV] [--bound SECONDS] [--list]
    python tests/mutants/near.py --write [--slower TIMES]     near.txt anew: traces what is stale, all of it for an hour

near.txt has a line for each test file, with its seconds and cases, and one for each product file, with the test files
that run its statements: first those that together run all of them in the least time, then those that run them once
more, and so on. In front go the tests that the catalogue's mutants of the changed functions name. A file that near.txt
lacks is known to the tests that import it, or, if it is not Python, to those that mention it. Tests of real processes
(integration, chaos, drill) run only if they have changed themselves.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import operator
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from catalogue import ROOT, CatalogueError, find_scope, find_tests, module_of, node_id, read_all
from choose import file_of, read_list
from traced import PARTS, TRACE, Record, ensure, every_test, names_imported_by, names_known_to, read

TABLE = Path(__file__).with_name("near.txt")
MOST = 24  # test files of a product file
BOUND_S = 60.0
START_S = 1.0  # of a test file, beside its tests
OWN_TIMES = 10  # so many times the worth of another has a test file that imports the product file itself
NEW_FILE_S = 5.0  # a test file that was never traced
ALONE_S = 15.0  # with less to do, further processes cost more than they bring
NO_TESTS_COLLECTED = 5
ENOUGH = 3  # failures
HUNK = re.compile(r"^(?:\+\+\+ (?:b/)?([^\t\n]*).*|@@ -\S+ \+(\d+)(?:,(\d+))? @@.*)$", re.MULTILINE)
Wish = tuple[str, str]  # (a test file or a test, why it is near)


@dataclass(frozen=True)
class Near:
    """`runs`: the test files of a product file, the best first."""

    seconds: dict[str, float] = field(default_factory=dict)
    num_cases: dict[str, int] = field(default_factory=dict)
    runs: dict[str, list[str]] = field(default_factory=dict)

    def cost(self, test: str) -> float:
        file = file_of(test)
        seconds = self.seconds.get(file, NEW_FILE_S)
        return START_S + (seconds if test == file else seconds / self.num_cases.get(file, 1))


def read_near(text: str) -> Near:
    near, files = Near(), dict[str, str]()
    for first, second, *others in (line.split() for line in text.splitlines() if not line.startswith("#")):
        if first.isdecimal():
            files[first] = second
            near.seconds[second], near.num_cases[second] = float(others[0]), int(others[1])
        else:
            near.runs[first] = [files[number] for number in (second, *others) if number in files]
    return near


def near_text(records: Iterable[Record], slower: float) -> Iterator[str]:
    ran: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))  # product file -> test file -> statements
    seconds, num_cases = defaultdict[str, float](float), Counter[str]()
    for record in records:
        for case in record["cases"].values():
            num_cases[record["file"]] += 1
            seconds[record["file"]] += case["seconds"] / slower
            for file, statements in case["ran"].items():
                ran[file][record["file"]] |= int(statements, 16)
    numbers = {test: str(number) for number, test in enumerate(sorted(num_cases))}
    yield "# Written by near.py, which says what this is. A renamed file is renamed here, a removed one's line goes."
    yield from (f"{number} {test} {seconds[test]:.1f} {num_cases[test]}" for test, number in numbers.items())
    for file in sorted(ran):
        importing = {test for test in ran[file] if module_of(file) in names_imported_by(test)}
        rates = {test: (OWN_TIMES if test in importing else 1) / (START_S + seconds[test]) for test in ran[file]}
        yield " ".join([file, *(numbers[test] for test in itertools.islice(ranked(ran[file], rates), MOST))])


def ranked(ran: Mapping[str, int], rates: Mapping[str, float]) -> Iterator[str]:
    """Yield who runs the most further statements at its rate. When all have been run, begin anew with the others."""
    left, missing = dict(ran), 0
    while left:
        missing = missing or functools.reduce(operator.or_, left.values())
        best = max(left, key=lambda test: (left[test] & missing).bit_count() * rates[test])
        missing &= ~left.pop(best)
        yield best


def changed_lines(base: str) -> dict[str, set[int]]:
    """File -> the lines that are new in it. Of a removed line, those around it."""
    diff = ("diff", "--no-renames", "--no-ext-diff", "--no-color", git("merge-base", base, "HEAD").strip())
    found, file = {name: set[int]() for name in git(*diff, "--name-only").splitlines()}, ""
    for named, first, count in HUNK.findall(git(*diff, "-U0")):
        file = named or file
        if first and file in found:  # not in /dev/null, where removed files go
            found[file] |= set(range(int(first), int(first) + int(count or 1))) or {int(first), int(first) + 1}
    for name in git("ls-files", "--others", "--exclude-standard").splitlines():
        found[name] = set(range(1, (ROOT / name).read_bytes().count(b"\n") + 1))
    return found


def git(*words: str) -> str:
    command = ("git", "-c", "core.quotePath=off", *words)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"near: git {words[0]} failed: {done.stderr.strip()}")
    return done.stdout


def wishes(changed: Mapping[str, set[int]], near: Near) -> list[Wish]:
    """The best first; the changed files take turns."""
    guards = ((test, "named by mutants of the changed functions") for test in guarding(changed))
    turns = itertools.zip_longest(*(knowing(file, near) for file in sorted(changed) if not is_test(file)))
    return [*guards, *(wish for turn in turns for wish in turn if wish)]


def is_test(file: str) -> bool:
    return file.startswith("tests/") and Path(file).name.startswith("test_") and file.endswith(".py")


def guarding(changed: Mapping[str, set[int]]) -> Iterator[str]:
    """Tests that mutants of the changed lines' functions name."""
    known, lines_of = find_tests(), {module_of(file): lines for file, lines in changed.items() if file.endswith(".py")}
    for mutant in read_all():
        places = ((edit.at, lines) for edit in mutant.edits for name, lines in lines_of.items() if is_in(edit.at, name))
        if any(is_within(at, lines) for at, lines in places):
            tests = (node_id(name, known) for name in mutant.kills)
            yield from (test for test in tests if test.startswith(("tests/unit/", "tests/simulation/")))


def is_in(at: str, module: str) -> bool:
    return f"{at}.".startswith(f"{module}.")


def is_within(at: str, lines: Iterable[int]) -> bool:
    try:
        scope = find_scope(at, ROOT)
    except CatalogueError:
        return False  # it was renamed
    return any(scope.first < line <= scope.end for line in lines)


def knowing(file: str, near: Near) -> Iterator[Wish]:
    """Tests that know a file which is not one of them."""
    if file in near.runs:
        tests, why = near.runs[file], "run"
    elif file.endswith(".py"):
        room = next(folder for folder in Path("tests/unit", file).parents if (ROOT / folder).is_dir()).as_posix()
        beside = [test for test in every_test() if test.startswith(f"{room}/") and room != "tests/unit"]
        tests = [test for test in every_test() if module_of(file) in names_known_to(test)] + beside
        tests, why = sorted(tests, key=near.cost), "import, or stand in the room of,"
    else:
        tests, why = [test for test in every_test() if Path(file).name in (ROOT / test).read_text("utf-8")], "mention"
        tests += ["tests/unit/house/test_doc_links.py"] if file.endswith(".md") else []
    yield from ((test, f"{why} {file}") for test in tests)


def choose(wanted: Iterable[Wish], near: Near, bound_s: float) -> tuple[dict[str, str], list[str]]:
    """(test -> why, those without room). Short ones take the room that a long one would not fit into."""
    chosen, left = dict[str, str](), dict[str, None]()
    for test, why in wanted:
        if test in chosen or file_of(test) in chosen:
            continue
        if near.cost(test) <= bound_s:
            bound_s -= near.cost(test)
            chosen[test] = why
        else:
            left[file_of(test)] = None
    files = {test for test in chosen if test == file_of(test)}
    return {test: why for test, why in chosen.items() if test in files or file_of(test) not in files}, list(left)


def lint(files: Iterable[str]) -> bool:
    existing = [file for file in files if file.endswith(".py") and (ROOT / file).exists()]
    checks = (("check", "-q"), ("format", "-q", "--check")) if existing else ()
    commands = [(sys.executable, "-m", "ruff", *check, *existing) for check in checks]
    return not any([subprocess.run(command, cwd=ROOT, check=False).returncode for command in commands])


def run(tests: Collection[str], waiting: Iterable[str], seconds: float) -> bool:
    if not tests:
        return True
    spread = ("-n", "auto", "--maxprocesses=4", "--dist", "loadfile") if seconds > ALONE_S else ()
    left_out = (f"--deselect={name}" for name in waiting)
    command = (sys.executable, "-m", "pytest", "-q", f"--maxfail={ENOUGH}", *spread, *left_out, *tests)
    return subprocess.run(command, cwd=ROOT, check=False).returncode in (0, NO_TESTS_COLLECTED)


def write(slower: float) -> None:
    ensure(every_test(), PARTS)
    lines = near_text(read(TRACE).values(), slower)
    TABLE.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD", help="what to compare with (default: %(default)s)")
    parser.add_argument("--bound", type=float, default=BOUND_S, help="seconds of tests (default: %(default)g)")
    parser.add_argument("--list", action="store_true", help="name the tests, and run nothing")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--slower", type=float, default=1.0, help="than a quiet machine was the one that traced")
    options = parser.parse_args(argv)
    if options.write:
        write(options.slower)
        return 0
    changed = changed_lines(options.base)
    if not changed:
        print(f"near: nothing has changed since {options.base}. BASE=HEAD~1 adds the last commit, BASE=main a branch")
        return 0
    near, long = read_near(TABLE.read_text("utf-8")), set(read_list("long"))
    own = {file: "changed" for file in sorted(changed) if is_test(file) and (ROOT / file).exists()}
    wanted = [
        (test, why)
        for test, why in wishes(changed, near)
        if file_of(test) not in own and not {test, file_of(test)} & long and (ROOT / file_of(test)).exists()
    ]
    chosen, left = choose(wanted, near, options.bound)
    chosen = own | chosen
    seconds, more = sum(map(near.cost, chosen)), sum(map(near.cost, left))
    print(f"near: files changed since {options.base}: {len(changed)}. Tests, or files of tests, that are near:")
    counts = Counter(chosen.values()) or {"(docs/where_tests_go.md says where one would go)": 0}
    print("\n".join(f"{count:6} {why}" for why, count in counts.items()))
    beyond = f"; {len(left)} files with {more:.0f} s are beyond BOUND={options.bound:g}" if left else ""
    print(f"near: {seconds:.0f} s of tests{beyond}. Before a commit: make lint, make test", flush=True)
    if options.list:
        print("\n".join([*chosen, *(f"left out: {test}" for test in left)]))
        return 0
    fine = lint(changed)
    waiting = [name for name in long if file_of(name) in chosen.keys() - own.keys()]
    return 0 if run(chosen, waiting, seconds) and fine else 1


if __name__ == "__main__":
    sys.exit(main())
