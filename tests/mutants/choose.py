"""Choose the tests of `make test`: those that notice most per second. `make test-deep` gets the next ones.

    python tests/mutants/choose.py [--seconds FOLDER] [--slower TIMES]

Each test is worth 1, and 1 more for every mutant that only it would notice among those chosen so far. What it costs was
measured: `make test` and `make test-deep` leave each tier's seconds in build/seconds. The most valuable per second go
first, until the tier's share of ten minutes is used up; rules of the house always do. Of the rest, `tests/deep.txt`
gets the most valuable in the same way, until CI's share is used up; `tests/long.txt` gets what remains, for `make
test-long`. Both keep what was not measured. Another test that was not measured is new, and runs in `make test`.
"""

from __future__ import annotations

import argparse
import heapq
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from catalogue import ROOT, find_tests, node_id, read_all

SECONDS = ROOT / "build" / "seconds"
# Seconds of tests, on one core each, in the first and in the deep part of a tier. Two cores share the first two tiers.
SHARES_S = {
    "unit": (380.0, 800.0),
    "simulation": (100.0, 220.0),
    "integration": (125.0, 320.0),
    "chaos": (45.0, 130.0),
    "drill": (45.0, 60.0),
}
BIG_S = 8.0  # of a test's cases together, from which on they are chosen one by one
# Files that are one thing: clusters are their fixtures, or a last test counts what the others did.
WHOLE_FILES = ("tests/integration/", "tests/chaos/", "tests/drill/", "tests/simulation/test_equivalence.py")
# They notice few mutants that others don't, but CI must see how users launch, and how streams go on, in real processes,
# and that checks for a GPU still run.
IN_CI = (
    "tests/integration/deploy/test_ray_cluster.py",
    "tests/integration/routers/test_resume.py",
    "tests/unit/support/test_gpu_pack.py::test_the_checks_import_what_a_packed_machine_has",
    *(
        f"tests/unit/support/test_gpu_checks.py::test_every_check_runs_on_the_virtual_gpu[{name}]"
        for name in ("attention of SmolLM2-135M", "speed, kernels", "speed, 0.6B")
    ),
)
RULES = ("tests/unit/house/test_frame_rules.py", "tests/unit/house/test_house.py")  # any commit can break them


@dataclass(slots=True, eq=False)
class Candidate:
    """Tests that are chosen together: a file, a test with all its cases, or one case."""

    name: str
    seconds: float = 0.0
    num_tests: int = 0
    mutants: set[str] = field(default_factory=set)

    def worth(self, noticed: Collection[str]) -> float:
        """Per second. A test of no time costs a hundredth: to be run."""
        return (self.num_tests + len(self.mutants - set(noticed))) / max(self.seconds, 0.01 * self.num_tests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=Path, default=SECONDS, help="JUnit files of all tiers (default: %(default)s)")
    parser.add_argument("--slower", type=float, default=1.0, help="than a quiet machine's were these seconds, in times")
    options = parser.parse_args()
    measured = {test: s / options.slower for test, s in read_seconds(options.seconds).items()}
    if not measured:
        parser.error("nothing was measured: run `make test test-deep` first")
    naming = tests_of_mutants()
    names = {name for test in measured for name in (test, test_of(test), file_of(test))}
    lists = {part: [line for line in read_list(part) if line not in names] for part in ("deep", "long")}
    for tier, shares_s in SHARES_S.items():
        left = group({test: s for test, s in measured.items() if test.startswith(f"tests/{tier}/")}, naming)
        noticed: set[str] = set()
        for part, share_s in zip(("first", "deep"), shares_s, strict=True):
            kept = [one for one in left if part == "deep" and one.name in IN_CI]
            others = [one for one in left if one not in kept]
            chosen = kept + choose(others, share_s - sum(one.seconds for one in kept), noticed)
            left = [one for one in left if one not in chosen]
            lists.get(part, []).extend(one.name for one in chosen)
            print(f"{tier}, {part}: {summary(chosen)}")
        lists["long"] += [one.name for one in left]
        print(f"{tier}, long: {summary(left)}")
    for part, listed in lists.items():
        listed[:] = [name for name in listed if name == test_of(name) or test_of(name) not in listed]
        path_of(part).write_text("".join(f"{name}\n" for name in sorted(listed)), encoding="utf-8")
    first, ci = noticed_share(lists["deep"] + lists["long"]), noticed_share(lists["long"])
    print(f"of the mutants, make test notices {first:.1%}, CI {ci:.1%}")


def read_list(part: str) -> list[str]:
    return path_of(part).read_text(encoding="utf-8").splitlines()


def path_of(part: str) -> Path:
    return ROOT / "tests" / f"{part}.txt"


def summary(chosen: Collection[Candidate]) -> str:
    return f"{sum(one.num_tests for one in chosen)} tests, {sum(one.seconds for one in chosen):.0f} s"


def read_seconds(folder: Path) -> dict[str, float]:
    """Return what each case that may wait took, set-up included, by pytest's name for it."""
    found: dict[str, float] = {}
    for path in sorted(folder.glob("*.xml")):
        for case in ElementTree.parse(path).iter("testcase"):
            name = id_of(case.get("classname", ""), case.get("name", ""))
            if case.find("skipped") is None and not name.startswith(RULES):
                found[name] = float(case.get("time", "0"))
    return found


def id_of(classname: str, name: str) -> str:
    """JUnit's `tests.unit.test_pool` or `tests.unit.test_pool.TestClass`, and pytest's name of the case."""
    parts = classname.split(".")
    stem = next(index for index, part in enumerate(parts) if part.startswith("test_")) + 1
    return "::".join(["/".join(parts[:stem]) + ".py", *parts[stem:], name])


def tests_of_mutants() -> dict[str, set[str]]:
    """Return the names of the mutants that each test notices."""
    known, naming = find_tests(), defaultdict(set)
    for mutant in read_all():
        for test in mutant.kills:
            naming[node_id(test, known)].add(mutant.name)
    return naming


def group(seconds: Mapping[str, float], naming: Mapping[str, set[str]]) -> list[Candidate]:
    """Return the candidates of a tier. A mutant counts for a test with all its cases, not for one of them."""
    of_test: dict[str, float] = defaultdict(float)
    for case, took in seconds.items():
        of_test[test_of(case)] += took
    found: dict[str, Candidate] = {}
    for case, took in seconds.items():
        test = test_of(case)
        is_whole = case.startswith(WHOLE_FILES)
        name = file_of(case) if is_whole else test if of_test[test] < BIG_S else case
        one = found.setdefault(name, Candidate(name))
        one.seconds += took
        one.num_tests += 1
        if name != case or test == case:
            one.mutants |= naming.get(test, set())
    return list(found.values())


def test_of(case: str) -> str:
    """A case's name without its parameters; a file's as it is."""
    file, colons, rest = case.partition("::")
    return file + colons + rest.partition("[")[0]


def file_of(case: str) -> str:
    return case.partition("::")[0]


def choose(candidates: list[Candidate], share_s: float, noticed: set[str]) -> list[Candidate]:
    """Greedily. A candidate's worth only falls as mutants are noticed, so it is worked out anew when it comes up.
    Adds to `noticed`."""
    heap = [(-one.worth(()), number) for number, one in enumerate(candidates)]
    heapq.heapify(heap)
    chosen: list[Candidate] = []
    while heap:
        before, number = heapq.heappop(heap)
        one = candidates[number]
        now = -one.worth(noticed)
        if now > before:
            heapq.heappush(heap, (now, number))
        elif one.seconds <= share_s:
            share_s -= one.seconds
            noticed |= one.mutants
            chosen.append(one)
    return chosen


def noticed_share(deep: Collection[str]) -> float:
    """Return the share of mutants that a test notices all cases of which run in `make test`."""
    known, mutants, absent = find_tests(), read_all(), {test_of(name) for name in deep}
    tests = [[node_id(test, known) for test in mutant.kills] for mutant in mutants]
    return sum(any(not {test, file_of(test)} & absent for test in named) for named in tests) / len(mutants)


if __name__ == "__main__":
    main()
