"""Which tests `make test` has: those that notice most per second, and so most of the mutants. What a test is worth."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import LISTS, entries, lists_of, part_of
from tests.support.house.mutant_tools import loaded
from tests.tiers import TURNS, in_turn

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("catalogue", "choose", "run", "graft", "trial", "instrument", "traced", "sampled", "worth")
LEAST_NOTICED, LEAST_IN_CI = 0.85, 0.95  # of the mutants, by the tests of `make test`, and with `make test-deep`


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    yield from loaded(monkeypatch, NAMES)


def test_make_test_notices_most_mutants(tools: SimpleNamespace) -> None:
    assert tools.choose.noticed_share(entries("deep") + entries("long")) >= LEAST_NOTICED
    assert tools.choose.noticed_share(entries("long")) >= LEAST_IN_CI


@pytest.mark.parametrize("part", LISTS)
def test_every_entry_names_tests_that_exist(tools: SimpleNamespace, part: str) -> None:
    tests = {f"{path.as_posix()}::{name}" for name, paths in tools.catalogue.find_tests().items() for path in paths}
    tests |= {path.as_posix() for paths in tools.catalogue.find_tests().values() for path in paths}
    assert entries(part) == sorted(set(entries(part)))
    of_functions = {tools.choose.test_of(entry) for entry in entries(part) if entry.count("::") < 2}  # not of a class
    assert not of_functions - tests, "run python tests/mutants/choose.py"


def test_each_entry_changes_the_part_of_something() -> None:
    lists = {part: frozenset(entries(part)) for part in LISTS}
    for part, listed in lists.items():
        idle = [entry for entry in listed if part_of(entry, lists | {part: listed - {entry}}) == part]
        assert not idle, f"tests/{part}.txt names these and what they belong to"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("test_a.py::test_x", "deep"),
        ("test_a.py::test_x[1]", "deep"),
        ("test_b.py::test_z[2]", "deep"),
        ("test_c.py::test_y[two words-1]", "long"),
        ("test_a.py::test_xx", "first"),
        ("test_c.py::test_y[two words-2]", "first"),
        ("test_bb.py::test_z", "first"),
        ("test_a.py::test_x[long]", "long"),
        ("test_d.py::test_z[1]", "deep"),
        ("test_d.py::test_z[2]", "long"),
    ],
)
def test_an_entry_is_a_case_a_test_or_a_file(name: str, part: str) -> None:
    """The nearest one counts."""
    deep = {"tests/unit/test_a.py::test_x", "tests/unit/test_b.py", "tests/unit/test_d.py::test_z[1]"}
    long = {"tests/unit/test_c.py::test_y[two words-1]", "tests/unit/test_a.py::test_x[long]", "tests/unit/test_d.py"}
    assert part_of(f"tests/unit/{name}", {"deep": deep, "long": long}) == part


def test_turns_take_all_that_waits_for_the_long_run() -> None:
    assert sorted(entry for turn in range(TURNS) for entry in lists_of(turn)["long"]) == entries("long")


def test_a_turn_runs_just_the_tiers_that_have_tests_in_it() -> None:
    for turn in range(TURNS):
        assert {tier.name for tier in in_turn(turn)} == {entry.split("/")[1] for entry in lists_of(turn)["long"]}


def test_what_notices_most_per_second_goes_first(tools: SimpleNamespace) -> None:
    def one(name: str, seconds: float, *mutants: str) -> object:
        return tools.choose.Candidate(name, seconds, 1, set(mutants))

    many, same, other, slow = (
        one("many", 2, "a", "b", "c"), one("same", 1, "a", "b"), one("other", 1, "d"), one("slow", 9, "e")
    )  # fmt: skip
    noticed: set[str] = set()
    assert tools.choose.choose([slow, same, many, other], 3.5, noticed) == [same, other], "many notices only c anew"
    assert tools.choose.choose([slow, many], 1.5, noticed) == [] and noticed == {"a", "b", "d"}
    assert tools.choose.choose([slow, same, many, other], 4.5, set()) == [same, other, many]


def test_a_small_test_keeps_its_cases_and_a_big_one_is_parted(tools: SimpleNamespace) -> None:
    seconds = {"tests/unit/test_a.py::test_x[1]": 1.0, "tests/unit/test_a.py::test_x[2]": 2.0}
    seconds |= {"tests/unit/test_a.py::test_big[1]": 9.0, "tests/unit/test_a.py::test_big[2]": 1.0}
    seconds |= {"tests/chaos/test_c.py::test_y": 1.0, "tests/chaos/test_c.py::test_z": 2.0}
    naming = {"tests/unit/test_a.py::test_x": {"m"}, "tests/unit/test_a.py::test_big": {"n"}}
    found = {one.name: (one.seconds, one.num_tests, one.mutants) for one in tools.choose.group(seconds, naming)}
    assert found == {
        "tests/unit/test_a.py::test_x": (3.0, 2, {"m"}),
        "tests/unit/test_a.py::test_big[1]": (9.0, 1, set()),
        "tests/unit/test_a.py::test_big[2]": (1.0, 1, set()),
        "tests/chaos/test_c.py": (3.0, 2, set()),
    }


@pytest.mark.parametrize(
    ("classname", "name", "expected"),
    [
        ("tests.unit.test_a", "test_x[1.5-a]", "tests/unit/test_a.py::test_x[1.5-a]"),
        ("tests.unit.test_a.TestPool", "runTest", "tests/unit/test_a.py::TestPool::runTest"),
    ],
)
def test_junit_s_names_are_pytest_s(tools: SimpleNamespace, classname: str, name: str, expected: str) -> None:
    assert tools.choose.id_of(classname, name) == expected


def test_a_statement_that_one_group_runs_is_its_own(tools: SimpleNamespace) -> None:
    ran = {"a::x[1]": "7", "a::x[2]": "9", "a::y": "11", "b::z": "42"}  # bits 0, 1, 2; 0, 3; 0, 4; 1, 6
    records = [{"cases": {name: {"ran": {"taps.py": bits}} for name, bits in ran.items()}}]
    records += [{"cases": {"b::z": {"ran": {"pump.py": "3"}}}}]
    assert tools.worth.alone(records, tools.choose.file_of) == {"a": 4, "b": 3}
    assert tools.worth.alone(records, tools.choose.test_of) == {"a::x": 2, "a::y": 1, "b::z": 3}
