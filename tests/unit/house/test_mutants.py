"""The mutants' tools: where an edit applies, what the catalogue refuses, what counts as a kill."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.house.mutant_tools import loaded
from tests.support.machine.patience import HANG_GUARD_S

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("catalogue", "tables", "check", "run")
CODE = """class Pump:
    def start(self):
        self.valve = 1
        self.on = True

    def stop(self):
        self.valve = 1


def start():
    pass
"""


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    yield from loaded(monkeypatch, NAMES)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "water").mkdir()
    (tmp_path / "water" / "pump.py").write_text(CODE)
    return tmp_path


def test_all_mutants_marks_and_tables_fit_the_code(tools: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert tools.check.main([]) == 0, capsys.readouterr().out


def one(tools: SimpleNamespace, at: str, old: str, new: str) -> SimpleNamespace:
    return tools.catalogue.Mutant("m", "why", (tools.catalogue.Edit(at, old, new),), ("test_x",))


def test_an_edit_applies_by_name_alone_and_takes_the_indentation(tools: SimpleNamespace, code: Path) -> None:
    mutant = one(tools, "water.pump.Pump.stop", "self.valve = 1", "if self.on:\n    self.valve = 0")
    (text,) = tools.catalogue.mutated(mutant, code).values()
    stop = "    def stop(self):\n        self.valve = 1\n"
    assert text == CODE.replace(stop, "    def stop(self):\n        if self.on:\n            self.valve = 0\n")


def test_an_edit_with_nothing_new_takes_its_lines_away(tools: SimpleNamespace, code: Path) -> None:
    (text,) = tools.catalogue.mutated(one(tools, "water.pump", "self.on = True", ""), code).values()
    assert text == CODE.replace("        self.on = True\n", "")


@pytest.mark.parametrize(
    ("at", "old", "why"),
    [
        ("water.pump.Pump", "self.valve = 1", "occurs 2 times"),
        ("water.pump.Pump.stop", "self.on = True", "occurs 0 times"),
        ("water.pump.Pump.stop", "valve = 1", "occurs 0 times"),
        ("water.pump.Pump.pause", "pass", "has pause 0 times"),
        ("water.tap", "pass", "no module"),
    ],
)
def test_an_edit_that_does_not_fit_is_refused(tools: SimpleNamespace, code: Path, at: str, old: str, why: str) -> None:
    with pytest.raises(tools.catalogue.CatalogueError, match=f"m: .*{why}"):
        tools.catalogue.mutated(one(tools, at, old, "pass"), code)


def test_names_that_two_scopes_have_are_refused(tools: SimpleNamespace, code: Path) -> None:
    (code / "water" / "pump.py").write_text(CODE + "\n\ndef start():\n    return 1\n")
    with pytest.raises(tools.catalogue.CatalogueError, match="2 times"):
        tools.catalogue.mutated(one(tools, "water.pump.start", "return 1", "pass"), code)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kills": ["t"], "edits": [{"at": "a", "old": "b", "new": "c"}]}, "why"),
        ({"why": "w", "edits": [{"at": "a", "old": "b", "new": "c"}]}, "kills"),
        ({"why": "w", "kills": ["t"], "edits": []}, "edits"),
        ({"why": "w", "kills": ["t"], "edits": [{"at": "a", "old": "b"}]}, "new"),
        ({"why": "w", "kills": ["t"], "edits": [{"at": "a", "old": "b", "new": "c"}], "kill": []}, "kill"),
    ],
)
def test_a_mutant_without_its_fields_is_refused(tools: SimpleNamespace, fields: dict[str, object], why: str) -> None:
    with pytest.raises(tools.catalogue.CatalogueError, match=why):
        tools.catalogue.read_mutant("m", fields)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"minds": "m", "edits": [{"at": "a", "old": "b", "new": "c"}]}, "why"),
        ({"why": "w", "minds": "m", "edits": []}, "edits"),
        ({"why": "w", "minds": "m", "edits": [{"at": "a", "old": "b"}]}, "new"),
        ({"why": "w", "minds": "m", "edits": [{"at": "a", "old": "b", "new": "c"}], "kills": ["t"]}, "kills"),
    ],
)
def test_a_slip_without_its_fields_is_refused(tools: SimpleNamespace, fields: dict[str, object], why: str) -> None:
    with pytest.raises(tools.catalogue.CatalogueError, match=why):
        tools.catalogue.read_slip("s", fields)


def test_a_slip_that_fits_no_longer_is_named(tools: SimpleNamespace) -> None:
    edits = (tools.catalogue.Edit("shared.node.records.tombstones.Tombstones.expire", "was_there_once()", "pass"),)
    (error,) = tools.check.wrong_edits(tools.catalogue.Slip("s", "why", "who", edits))
    assert "s: the old text occurs 0 times" in error
    with pytest.raises(tools.catalogue.CatalogueError, match="no slip is called"):
        tools.catalogue.read_slips(("nobody",))


def test_a_test_is_found_by_its_name_wherever_it_stands(tools: SimpleNamespace, tmp_path: Path) -> None:
    for folder, text in (
        ("unit", "def test_a():\n    pass\ndef test_b():\n    pass\n"),
        ("chaos", "test_a = X.TestCase\n"),
    ):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        (tmp_path / "tests" / folder / f"test_{folder}.py").write_text(text)
    tests = tools.catalogue.find_tests(tmp_path)
    assert tools.catalogue.node_id("test_b", tests) == "tests/unit/test_unit.py::test_b"
    assert tools.catalogue.node_id("test_chaos::test_a", tests) == "tests/chaos/test_chaos.py::test_a"
    for name in ("test_a", "test_unit::test_c", "test_chaos::test_b"):
        with pytest.raises(tools.catalogue.CatalogueError, match="one was expected"):
            tools.catalogue.node_id(name, tests)


def test_a_rule_needs_a_test_and_a_mark_needs_a_rule(tools: SimpleNamespace) -> None:
    rules = [
        tools.tables.Rule("S1", "kept", "why", ()),
        tools.tables.Rule("S2", "not kept", "why", ()),
        tools.tables.Rule("S3", "gone", "why", ("no.way",)),
    ]
    marks = tools.tables.Marks(tests={"S1": ["t"], "S2": [], "S3": ["t"], "S9": ["t"]}, mutants={})
    wrong = tools.tables.check_marks(rules, marks)
    assert [line.partition(":")[0] for line in wrong] == ["S9", "S2", "S3"]


def test_the_rules_are_those_of_the_seeds_and_the_hazards(tools: SimpleNamespace) -> None:
    """12 rules, 11 regressions, 6 rules of liveness, 47 hazards, 10 invariants; each says what, why and where."""
    rules = tools.tables.read_rules()
    names = [f"S{n}" for n in range(1, 13)] + [f"R{letter}" for letter in "abcdefghijk"]
    names += [f"L{letter}" for letter in "abcdef"]
    names += [f"H{n}" for n in range(1, 48)] + [f"I{n}" for n in range(1, 11)]
    assert [rule.name for rule in rules] == names
    assert all(rule.rule and rule.why and rule.kept_in for rule in rules)


def test_a_rule_s_row_names_its_tests_and_mutants(tools: SimpleNamespace) -> None:
    rules = [
        tools.tables.Rule("S1", "kept", "why", ("water.pump",)),
        tools.tables.Rule("S2", "kept too", "why", ("water.tap",), no_mutant="none fits"),
    ]
    marks = tools.tables.Marks(tests={"S1": ["file::test_x"], "S2": []}, mutants={"S1": ["dry"], "S2": []})
    page = tools.tables.rules_page(rules, marks)
    assert "| S1 | kept | why | `water.pump` | `file::test_x` | `dry` |" in page
    assert "| S2 | kept too | why | `water.tap` |  | none fits |" in page


@pytest.mark.parametrize(
    ("failures", "killed"),
    [
        ([], False),
        ([("t", "AssertionError: no")], True),
        ([("t", "assert 1 == 2")], True),
        ([("t", "shared.core.errors.IntegrityError: page 3 leaked")], True),
        ([("t", "Failed: DID NOT RAISE <class 'X'>")], True),
        ([("t", "Failed: Timeout (>60.0s) from pytest-timeout.")], False),
        ([("t", "ImportError: cannot import name 'x'")], False),
        ([("t", "AttributeError: 'NoneType' has no 'y'")], False),
        ([("collection", "pytest: 3 errors")], False),
        ([("t", "assert 1 == 2"), ("t", "KeyError: 3")], False),
    ],
)
def test_only_assertions_and_oracles_kill(
    tools: SimpleNamespace, failures: list[tuple[str, str]], killed: bool
) -> None:
    assert tools.run.judge(("tests/x.py::t",), failures)[0] is killed


def test_every_named_test_must_fail(tools: SimpleNamespace) -> None:
    failures = [("t[1-True]", "assert 1 == 2")]
    assert tools.run.judge(("tests/x.py::t",), failures)[0]
    assert not tools.run.judge(("tests/x.py::t", "tests/x.py::u"), failures)[0]


# Deaf to the signal of pytest's own timeout, as a hang in C is; its child holds the output open.
DEAF = """import os, signal, time
signal.signal(signal.SIGALRM, signal.SIG_IGN)
signal.alarm(1)
child = os.fork()
if child:
    print(child, flush=True)
while True:
    time.sleep(60)
"""


def is_alive(process: int) -> bool:
    """A process that nobody has waited for is none."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def end_of(child: int) -> None:
    until = time.monotonic() + HANG_GUARD_S
    while is_alive(child):
        assert time.monotonic() < until, "it lives"
        time.sleep(0.01)


def test_what_does_not_end_is_killed_with_its_children(tools: SimpleNamespace, tmp_path: Path) -> None:
    output, timeout_s = "", 1.0
    while not output:  # a slow machine may need longer to begin
        status, output = tools.run.run_group([sys.executable, "-c", DEAF], tmp_path, os.environ, timeout_s)
        timeout_s *= 2
        assert status is None
    end_of(int(output))


def test_a_child_left_behind_keeps_nobody_waiting(tools: SimpleNamespace, tmp_path: Path) -> None:
    leaves = DEAF.replace("while True:", "while not child:")
    status, output = tools.run.run_group([sys.executable, "-c", leaves], tmp_path, os.environ, HANG_GUARD_S)
    assert status == 0
    end_of(int(output))


def test_a_mutant_that_hangs_pytest_is_not_killed(
    tools: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools.run, "GROUP_TIMEOUT_S", 5)
    (tmp_path / "test_deaf.py").write_text(DEAF)
    killed, why = tools.run.judge(("test_deaf.py::t",), tools.run.run_tests(tmp_path, ("test_deaf.py",)))
    assert not killed
    assert why.startswith("TIMED OUT")
