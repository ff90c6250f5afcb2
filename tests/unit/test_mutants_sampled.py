"""The tools that sample mutants: a change reaches whoever holds the code, and what counts as a kill."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.support.mutant_tools import loaded

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tests" / "mutants"
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
    yield from loaded(monkeypatch, ("run", "graft", "trial", "sampled"))


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
        results.add(sampled.Result(place, sampled.UNIT, trial.Verdict(outcome), 1.0))
    again = sampled.Results(path)
    assert again.of == results.of
    assert [one.verdict.outcome for one in again.counted("pools")] == [trial.KILLED] and not again.counted("relay")
    assert sampled.summarize(again) == 1.0
    again.keep([second])
    assert list(again.of) == [second], "the code of the other has changed"


def test_areas_name_files_and_tests_that_exist(tools: SimpleNamespace) -> None:
    sampled = tools.sampled
    quick, rest = sampled.all_tests()
    missing = [name for name in (*quick, *rest) if not (ROOT / name).exists()]
    missing += [file for area in sampled.AREAS.values() for file in area.files if not (ROOT / file).exists()]
    assert not missing
    assert sum(area.wanted for area in sampled.AREAS.values()) == 150
