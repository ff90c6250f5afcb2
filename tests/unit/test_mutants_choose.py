"""Which tests `make test` has: those that notice most per second, and so most of the mutants. What a test is worth."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import DEEP, is_deep
from tests.support.mutant_tools import loaded

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("catalogue", "choose", "run", "graft", "trial", "instrument", "traced", "sampled", "worth")
LEAST_NOTICED = 0.85  # of the mutants, by the tests of `make test`


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    yield from loaded(monkeypatch, NAMES)


def entries() -> list[str]:
    return DEEP.read_text(encoding="utf-8").splitlines()


def test_make_test_notices_most_mutants(tools: SimpleNamespace) -> None:
    assert tools.choose.noticed_share(entries()) >= LEAST_NOTICED


def test_every_entry_names_tests_that_exist(tools: SimpleNamespace) -> None:
    tests = {f"{path.as_posix()}::{name}" for name, paths in tools.catalogue.find_tests().items() for path in paths}
    tests |= {path.as_posix() for paths in tools.catalogue.find_tests().values() for path in paths}
    assert entries() == sorted(set(entries()))
    of_functions = {tools.choose.test_of(entry) for entry in entries() if entry.count("::") < 2}  # not of a class
    assert not of_functions - tests, "run python tests/mutants/choose.py"


def test_an_entry_is_a_case_a_test_or_a_file() -> None:
    deep = {"tests/unit/test_a.py::test_x", "tests/unit/test_b.py", "tests/unit/test_c.py::test_y[two words-1]"}
    yes = ("test_a.py::test_x", "test_a.py::test_x[1]", "test_b.py::test_z[2]", "test_c.py::test_y[two words-1]")
    no = ("test_a.py::test_xx", "test_c.py::test_y[two words-2]", "test_bb.py::test_z")
    assert all(is_deep(f"tests/unit/{name}", deep) for name in yes)
    assert not any(is_deep(f"tests/unit/{name}", deep) for name in no)


def test_what_notices_most_per_second_goes_first(tools: SimpleNamespace) -> None:
    def one(name: str, seconds: float, *mutants: str) -> object:
        return tools.choose.Candidate(name, seconds, 1, set(mutants))

    many, same, other, slow = (
        one("many", 2, "a", "b", "c"), one("same", 1, "a", "b"), one("other", 1, "d"), one("slow", 9, "e")
    )  # fmt: skip
    assert tools.choose.choose([slow, same, many, other], 3.5) == [same, other], "many would notice only c anew"
    assert tools.choose.choose([slow, same, many, other], 4.5) == [same, other, many]


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
