"""`make test-near`: which tests it chooses for a change, and what its table says."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.house.house import ROOT
from tests.support.house.mutant_tools import loaded

EXAMPLE = "tests/unit/shared/sched/test_example_rule.py"
TABLE = """# made up
0 tests/unit/test_quick.py 1.0 4
1 tests/unit/test_slow.py 50.0 2
2 tests/unit/test_whole.py 20.0 5
4 tests/unit/test_alone.py 30.0 1
router/taps.py 2 0 1 3
shared/pipes.py 4 0
"""


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    names = ("catalogue", "choose", "run", "graft", "trial", "instrument", "traced", "near")
    for tools in loaded(monkeypatch, names):
        yield tools.near


def test_the_table_names_what_there_is(near: SimpleNamespace) -> None:
    """A renamed file is renamed in near.txt, a removed one's line goes."""
    table = near.read_near(near.TABLE.read_text("utf-8"))
    assert not [name for name in (*table.seconds, *table.runs) if not (ROOT / name).exists()]
    assert len(table.runs) > 600 and max(map(len, table.runs.values())) == near.MOST


def test_changed_files_take_turns_within_the_bound(near: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near, "guarding", lambda changed: iter(["tests/unit/test_slow.py::test_a"]))
    table = near.read_near(TABLE)
    wanted = near.wishes({"router/taps.py": {1}, "shared/pipes.py": {1}}, table)
    chosen, left = near.choose(wanted, table, 60.0)
    assert list(chosen) == [f"tests/unit/test_{name}" for name in ("slow.py::test_a", "whole.py", "quick.py")]
    assert chosen["tests/unit/test_whole.py"] == "run router/taps.py"
    assert left == ["tests/unit/test_alone.py", "tests/unit/test_slow.py"]
    chosen, left = near.choose(wanted, table, 200.0)
    assert sorted(chosen) == sorted(table.seconds) and not left, "a whole file has its test"


def test_who_runs_further_statements_goes_first(near: SimpleNamespace) -> None:
    rates = dict(zip("abcd", (0.1, 0.5, 0.5, 0.7), strict=True))
    ran = {"a": 0b1111, "b": 0b0111, "c": 0b1000, "d": 0b0001}
    assert list(near.ranked(ran, rates)) == ["b", "c", "d", "a"], "two run all; then it begins anew"


def test_a_table_is_read_as_it_was_written(near: SimpleNamespace) -> None:
    """In front is the file that imports the module itself, though another one takes less time."""
    case = {"seconds": 2.0, "ran": {"shared/wire/wakeup.py": "3"}}
    others = [f"tests/unit/shared/{name}" for name in ("kv/test_kv_rows.py", "wire/test_wire_link_ends.py")]
    records = [{"file": file, "cases": dict.fromkeys("abc"[:n], case)} for n, file in enumerate(others, 2)]
    table = near.read_near("\n".join(near.near_text(records, slower=2.0)))
    assert list(table.seconds.items()) == list(zip(others, (2.0, 3.0), strict=True))
    assert table.runs == {"shared/wire/wakeup.py": others[::-1]} and table.cost(f"{others[1]}::a") == near.START_S + 1


def test_files_without_a_line_are_known_to_those_that_name_them(near: SimpleNamespace) -> None:
    helper, page = (
        [test for test, _ in near.knowing(file, near.Near())]
        for file in ("tests/support/house/mutant_tools.py", "docs/where_tests_go.md")
    )
    assert "tests/unit/house/test_mutants_traced.py" in helper and EXAMPLE not in helper
    assert page[-1] == "tests/unit/house/test_doc_links.py" and EXAMPLE in page
    assert EXAMPLE in [test for test, _ in near.knowing("shared/sched/new_module.py", near.Near())], "by its room"


def test_a_mutant_s_tests_guard_the_lines_of_its_function(near: SimpleNamespace) -> None:
    scope = near.find_scope("shared.wire.wakeup.Wakeup.close", ROOT)
    test = "tests/unit/shared/wire/test_wire_link_ends.py::test_who_wakes_a_closed_link_writes_into_nobody_s_file"
    for line, is_within in ((scope.first, False), (scope.first + 1, True), (scope.end, True), (scope.end + 1, False)):
        assert (test in near.guarding({"shared/wire/wakeup.py": {line}})) == is_within


def test_lines_that_changed_are_those_of_git(
    near: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> None:
        subprocess.run(("git", "-c", "user.name=a", "-c", "user.email=a@b", *words), cwd=tmp_path, check=True)

    for name in ("kept", "one é", "gone"):
        (tmp_path / name).write_text("".join(f"{number}\n" for number in range(1, 10)))
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    (tmp_path / "one é").write_text("1\n2\nthree\n4\n6\n7\n8\n9\n10\n11\n")
    (tmp_path / "gone").unlink()
    (tmp_path / "new").write_text("a\nb\n")
    monkeypatch.setattr(near, "ROOT", tmp_path)
    found = near.changed_lines("HEAD")
    assert found.keys() == {"one é", "gone", "new"}
    assert found["one é"] == {3, 4, 5, 9, 10} and found["new"] == {1, 2}
