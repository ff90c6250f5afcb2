"""The tools that sample mutants: a change reaches whoever holds the code, and what counts as a kill."""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.support.house.mutant_tools import loaded

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("catalogue", "run", "graft", "trial", "instrument", "traced", "areas", "arguments", "sampled")
SOURCE = """
from __future__ import annotations
from dataclasses import dataclass
LIMIT = 3
@dataclass(slots=True)
class Pair:
    first: int
    second: int = 1
    kind = "plain"
    @property
    def total(self) -> int:
        return self.first + self.second
    @classmethod
    def of(cls, first: int, *, second: int = 7) -> Pair:
        return cls(first, second)
def under(number: int) -> bool:
    return number < LIMIT
"""


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    yield from loaded(monkeypatch, NAMES)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    loaded = ModuleType("grafted")
    loaded.__file__ = "grafted.py"
    monkeypatch.setitem(sys.modules, "grafted", loaded)
    code = compile(SOURCE, "grafted.py", "exec")
    exec(code, loaded.__dict__)
    return loaded


def test_a_graft_reaches_holders_of_functions_classes_constants(
    tools: SimpleNamespace, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = ModuleType("user")
    user.__dict__["LIMIT"] = module.LIMIT
    monkeypatch.setitem(sys.modules, "user", user)
    pair, under = module.Pair(2), module.under
    changed = (
        SOURCE.replace("second: int = 1", "second: int = 5").replace("= 7", "= 8").replace("LIMIT = 3", "LIMIT = 1")
    )
    changed = changed.replace("self.first + ", "self.first - ").replace('"plain"', '"fancy"')
    tools.graft.graft(module, changed)
    assert pair.total == 2 - 1 and pair.kind == "fancy"
    assert module.Pair(2).second == 5 and module.Pair.of(0).second == 8
    assert not under(2) and user.LIMIT == 1


def test_a_source_that_can_t_be_loaded_changes_nothing(tools: SimpleNamespace, module: ModuleType) -> None:
    with pytest.raises(NameError):
        tools.graft.graft(module, SOURCE.replace("<", ">") + "nobody\n")
    assert module.under(2)


@pytest.mark.parametrize(
    ("message", "outcome"),
    [
        ("assert 1 == 2", "killed"),
        ("shared.core.errors.IntegrityError: page 3 leaked", "killed"),
        ("hazards.detector.HazardError: row 3", "killed"),
        ("Failed: DID NOT RAISE <class 'ValueError'>", "killed"),
        ("Failed: Timeout (>45.0s) from pytest-timeout.", "TIMEOUT"),
        ("TypeError: unsupported operand", "broken"),
    ],
)
def test_only_an_oracle_kills(tools: SimpleNamespace, message: str, outcome: str) -> None:
    assert tools.trial._verdict("test", message).outcome == outcome


def test_the_later_valid_result_for_a_place_counts(tools: SimpleNamespace, tmp_path: Path) -> None:
    sampled, trial = tools.sampled, tools.trial
    first, second = (sampled.Place("pools", "f.py", "AddNot", line, 4, "if a", "if not a") for line in (1, 2))
    path = tmp_path / "results.jsonl"
    results = sampled.Results(path)
    for place, outcome in [(first, trial.ALIVE), (second, trial.BROKEN), (first, trial.KILLED)]:
        results.add(sampled.Result(place, sampled.QUICK, trial.Verdict(outcome), 1.0))
    again = sampled.Results(path)
    assert again.of == results.of
    assert [one.verdict.outcome for one in again.counted("pools")] == [trial.KILLED] and not again.counted("relay")
    assert sampled.summarize(again, tools.areas.AREAS) == 1.0
    again.keep([second])
    assert list(again.of) == [second], "the code of the other has changed"


@pytest.mark.parametrize(("name", "wanted"), [("AREAS", 150), ("ARGUMENT_AREAS", 300)])
def test_areas_name_files_that_exist_and_tests_know(tools: SimpleNamespace, name: str, wanted: int) -> None:
    areas = getattr(tools.areas, name).values()
    assert not [file for area in areas for file in area.files if not (ROOT / file).exists()]
    assert all(tools.traced.tests_that_know(area.files) for area in areas)
    assert sum(area.wanted for area in areas) == wanted


WRONG = """
class Books:
    def __init__(self, old: list[int], new: list[int]) -> None:
        self.old, self.new = old, new
        self.by_key: dict[tuple[str, int], int] = {}
        self.at_key: dict[tuple[str, int], int] = {}
    def find(self, peer: str, lease: int) -> int:
        if (peer, lease) in self.by_key:
            return self.by_key[peer, lease]
        return moved(lease, self.by_key.get((peer, 0), 1))
    def is_newer(self, a: int, b: int) -> bool:
        return (a, b) > (self.a, self.b)
    def most(self, rows: list[int], i: int) -> int:
        return max(rows[i], 0)
    def both(self) -> list[int]:
        return [*self.old, *self.new]
def moved(source: int, target: int) -> int:
    return source - target
"""
WRONG_LINES = {
    "part": {
        "return (a,) > (self.a,)",
        "return (b,) > (self.b,)",
        "if (peer,) in self.by_key:",
        "if (lease,) in self.by_key:",
    },
    "swapped": {"return moved(self.by_key.get((peer, 0), 1), lease)"},
    "first": {"return max(rows[0], 0)"},
    "older": {"return min(rows[i], 0)"},
    "less": {"return [*self.new]", "return [*self.old]"},
}


def test_a_wrong_argument_of_each_kind_is_drawn(tools: SimpleNamespace) -> None:
    arguments, before = tools.arguments, set(ast.unparse(ast.parse(WRONG)).splitlines())
    found: dict[str, set[str]] = {}
    for change in arguments.changes(ast.parse(WRONG), arguments.read_signatures([WRONG])):
        after = ast.unparse(ast.parse(arguments.applied(WRONG, change))).splitlines()
        found.setdefault(change.kind, set()).add(next(line.strip() for line in after if line not in before))
    assert {kind: lines for kind, lines in found.items() if kind != "other"} == WRONG_LINES
    assert any("self.at_key" in line for line in found["other"])


def test_a_seed_draws_the_same_wrong_arguments(tools: SimpleNamespace) -> None:
    arguments = tools.arguments
    signatures, sources = arguments.read_signatures([WRONG]), {"a.py": WRONG, "b.py": WRONG}
    first, second = (
        [
            (file, change.kind, change.edits[0][1])
            for file, change in arguments.draw(sources, signatures, random.Random(7))
        ]
        for _ in range(2)
    )
    assert first == second and len(first) > 10
