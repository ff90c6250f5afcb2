"""The trace of tests: which statements have marks, which cases a mutant is tried against, and what is traced again."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.house.mutant_tools import FOLDER, loaded

TAPS = '''
LIMIT = 3
class Taps:
    size: int = 2
    def flow(self, level):
        """Say how water flows."""
        if level > LIMIT:
            out = "over"
        elif level == LIMIT:
            return "full"
        else:
            try:
                out = [1, 2][level]
            except IndexError:
                out = [
                    one for one in (level,)
                    if one
                ]
        return out
@exact
def compiled(level):
    return level
'''
ALWAYS = {"if level > LIMIT:"}
BELOW = ALWAYS | {"elif level == LIMIT:", "try:", "out = [1, 2][level]", "return out"}


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    yield from loaded(monkeypatch, ("catalogue", "run", "graft", "trial", "instrument", "traced"))


@pytest.mark.parametrize(
    ("level", "out", "ran"),
    [
        (4, "over", ALWAYS | {'out = "over"', "return out"}),
        (3, "full", ALWAYS | {"elif level == LIMIT:", 'return "full"'}),
        (1, 2, BELOW),
        (2, [2], BELOW | {"out = ["}),
    ],
)
def test_statements_that_run_leave_marks(tools: SimpleNamespace, level: int, out: object, ran: set[str]) -> None:
    marks = bytearray(50)
    space: dict[str, object] = {"exact": lambda function: function, "__ran__": marks}
    code, count = tools.instrument.instrumented(TAPS, "taps.py", 20)
    exec(code, space)
    assert space["Taps"]().flow(level) == out  # type: ignore[operator]
    known = tools.instrument.statements(ast.parse(TAPS))
    assert count == len(known)
    assert {TAPS.splitlines()[known[n - 20].lineno - 1].strip() for n, mark in enumerate(marks) if mark} == ran


def test_a_line_belongs_to_its_innermost_statement(tools: SimpleNamespace) -> None:
    known = tools.instrument.statements(ast.parse(TAPS))
    firsts = {
        line: {known[number].lineno for number in tools.instrument.numbers_of(TAPS, [line])}
        for line in range(1, TAPS.count("\n") + 1)
    }
    alone = {line: {line} for line in (7, 8, 9, 10, 12, 13, 15, 19)}
    inner = {11: {9}, 14: {12}, 16: {15}, 17: {15}, 18: {15}}  # else, except, and the lines of one statement
    assert firsts == {line: set() for line in firsts} | alone | inner


def test_a_failure_is_told_at_the_statement_s_line(tools: SimpleNamespace) -> None:
    code, _ = tools.instrument.instrumented("def f():\n    a = 1\n    return a / 0\n", "f.py", 0)
    space: dict[str, object] = {"__ran__": bytearray(9)}
    exec(code, space)
    with pytest.raises(ZeroDivisionError) as failed:
        space["f"]()  # type: ignore[operator]
    assert traceback.extract_tb(failed.value.__traceback__)[-1].lineno == 3


# A project in small: the tools find their root by their own place.
FILES = {
    "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\naddopts = ["--import-mode=importlib"]\n',
    "tests/conftest.py": """
def pytest_addoption(parser):
    parser.addoption("--seeds")
    parser.addoption("--part")
def pytest_collection_modifyitems(config, items):
    part = config.getoption("--part")
    items[:] = [item for item in items if part is None or ("deep" in item.name) == (part == "deep")]
""",
    "router/__init__.py": "",
    "router/taps.py": """
LIMIT = 2
def over(level):
    if level > LIMIT:
        return True
    return False
def fill(level):
    return level + 1
""",
    "router/idle.py": "SIZE = 1\n",
    "tests/helper.py": "from router import taps\n",
    "tests/unit/test_plain.py": "def test_nothing(): pass\n",
    "tests/unit/test_taps.py": """
import os, pytest
from tests.helper import taps
@pytest.fixture(scope="module")
def full():
    return taps.fill(1)
def test_low(): assert not taps.over(0)
def test_filled(full): assert full == 2
def test_filled_too(full): assert full < 9
def test_forked():
    child = os.fork()
    if child == 0:
        os._exit(taps.over(7))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
def test_fails(): assert taps.over(0)
def test_deep(): assert taps.over(3)
""",
    "tests/simulation/test_world.py": "from router.taps import over\ndef test_world(): assert over(8)\n",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    shutil.copytree(FOLDER, root / "tests" / "mutants", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def told(project: Path, program: str) -> Any:
    """What a program prints that uses the project's tools."""
    path = project / "program.py"
    path.write_text(f"import sys\nsys.path[:0] = [{str(project / 'tests' / 'mutants')!r}, {str(project)!r}]\n{program}")
    done = subprocess.run([sys.executable, path], cwd=project, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


CASES = """
import json
from pathlib import Path
from traced import PARTS, Trace, ensure, tests_that_know
tests = tests_that_know(["router/taps.py"])
ensure(tests, PARTS)
trace = Trace(tests, PARTS)
def cases(file, *edit):
    old = Path(file).read_text()
    return [case.name.rpartition("test_")[2] for case in trace.cases_that_run(file, old, old.replace(*edit))]
edits = ("> LIMIT", "< LIMIT"), ("return True", "return 1"), ("+ 1", "+ 2"), ("LIMIT = 2", "LIMIT = 3")
print(json.dumps([tests, *(cases("router/taps.py", *edit) for edit in edits), cases("router/idle.py", "1", "2")]))
"""


@pytest.fixture(scope="module")
def found(project: Path) -> Any:
    return told(project, CASES)


def test_a_mutant_meets_the_cases_that_run_its_statement(found: Any) -> None:
    tests, compared, returned, filled, *_ = found
    assert tests == ["tests/unit/test_taps.py", "tests/simulation/test_world.py"], "one of them by a helper"
    assert sorted(compared[:2]) == ["forked", "low"] and compared[2:] == ["world", "deep"], "units, simulations, deep"
    assert returned == ["forked", "world", "deep"], "what a fork runs counts"
    assert sorted(filled) == ["filled", "filled_too"], "a module's fixture counts for all that have it"


def test_what_runs_at_import_meets_all_cases_nearby(found: Any) -> None:
    everybody = ["deep", "filled", "filled_too", "forked", "low", "world"]
    assert [sorted(one) for one in found[4:]] == [everybody, everybody]


@pytest.mark.parametrize(
    ("changed", "still_fresh"),
    [
        ("tests/unit/test_plain.py", {("taps", "first"), ("taps", "deep"), ("world", "first"), ("world", "deep")}),
        ("tests/unit/test_taps.py", {("world", "first"), ("world", "deep")}),
        ("router/taps.py", {("world", "deep")}),  # no deep case of that file runs anything
    ],
)
def test_only_what_has_changed_is_traced_again(
    tools: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    project: Path,
    found: Any,
    changed: str,
    still_fresh: set[tuple[str, str]],
) -> None:
    monkeypatch.setattr(tools.traced, "ROOT", project)
    path, text = project / changed, FILES[changed]
    path.write_text(text + "\n")
    fresh = tools.traced.read(project / "build" / "trace.jsonl")
    path.write_text(text)
    assert {(file.rpartition("_")[2].removesuffix(".py"), part) for file, part in fresh} == still_fresh


TRIALS = """
import json
from pathlib import Path
from trial import Trials
text, said = Path("router/taps.py").read_text(), []
def work(trials):
    for cases, edit in [
        (["fails", "low", "deep"], ("> LIMIT", ">= LIMIT")),
        (["fails", "low", "deep"], ("> LIMIT", "< LIMIT")),
        (["low"], ("    if level > LIMIT", "    __import__('os')._exit(7) or level > LIMIT")),
        (["low"], ("LIMIT = 2", "LIMIT = nobody")),
        (["filled"], ("level + 1", "level + 'x'")),
        ([], ("level + 1", "level")),
    ]:
        names = [f"tests/unit/test_taps.py::test_{case}" for case in cases]
        verdict = trials.try_file(names, "router/taps.py", text.replace(*edit))
        said.append([verdict.outcome, verdict.by.rpartition("test_")[2]])
Trials(Path.cwd(), work).start(["tests/unit/test_taps.py"])
print(json.dumps([said, Path("router/taps.py").read_text() == text]))
"""


def test_what_fails_without_the_change_notices_nothing(project: Path) -> None:
    said = [["ALIVE", ""], ["killed", "low"], ["broken", ""], ["broken", ""], ["broken", "filled"], ["ALIVE", ""]]
    assert told(project, TRIALS) == [said, True]
