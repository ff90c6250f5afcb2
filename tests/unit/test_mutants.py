"""The mutants' tools, and that no patch has rotted: each still applies, still compiles, and its tests exist."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATCHES = sorted((ROOT / "tests" / "mutants").glob("*.patch"))


def load() -> ModuleType:
    import sys

    spec = importlib.util.spec_from_file_location("mutants_run", ROOT / "tests" / "mutants" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants_run"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


run = load()


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_patch_applies_compiles_and_names_tests_that_exist(path: Path) -> None:
    mutant = run.read_mutant(path)
    changed = run.patched(ROOT, mutant.diff)
    assert changed
    for target, text in changed.items():
        assert text != target.read_text()
        if target.suffix == ".py":
            compile(text, str(target), "exec")
    for test in mutant.kills:
        name, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / name).read_text(), test


def test_the_seeds_table_names_every_mutant_and_only_tests_that_exist() -> None:
    table = (ROOT / "tests" / "SEEDS.md").read_text()
    assert set(re.findall(r"`(\w+)\.patch`", table)) == {path.stem for path in PATCHES}
    for name, function in re.findall(r"`((?:unit|simulation)/\w+\.py)(?:::(\w+))?`", table):
        text = (ROOT / "tests" / name).read_text()
        assert not function or f"def {function}(" in text, f"{name}::{function}"
    for path in re.findall(r"`(shared/[\w/]+\.py)`", table):
        assert (ROOT / path).exists(), path


TEST_NAME = re.compile(r"`((?:unit|simulation|integration|chaos)/\w+\.py)::(test_\w+)`")
SYMBOL = re.compile(r"`((?:shared|router|prefill_node|decode_node|deploy)/[\w/]+\.py)::(\w+)`")
MOST_REASONS = 12


def hazard_rows() -> dict[str, str]:
    """What stands in the last column, by hazard or invariant."""
    table = (ROOT / "tests" / "HAZARDS.md").read_text()
    return dict(re.findall(r"^\| ([HI]\d+) \|.*\| (.*) \|$", table, re.MULTILINE))


def test_every_hazard_has_its_test_and_a_few_have_a_reason() -> None:
    rows = hazard_rows()
    assert list(rows) == [f"H{n}" for n in range(1, 47)] + [f"I{n}" for n in range(1, 11)]
    reasons = {name: text for name, text in rows.items() if not TEST_NAME.search(text)}
    assert len(reasons) <= MOST_REASONS, reasons
    for name, text in reasons.items():
        assert text.startswith("can't occur: ") and SYMBOL.search(text), f"{name} names neither a test nor a type"


def test_the_hazards_table_names_what_exists() -> None:
    table = (ROOT / "tests" / "HAZARDS.md").read_text()
    for name, function in TEST_NAME.findall(table):
        text = (ROOT / "tests" / name).read_text()
        assert re.search(rf"\b(def {function}\(|{function} = )", text), f"{name}::{function}"
    for name, symbol in SYMBOL.findall(table):
        assert symbol in defined_in(ROOT / name), f"{name}::{symbol}"
    named = set(re.findall(r"`([\w/]+\.py)(?:::\w+)?`", table))
    assert {name for name in named if not name.startswith("unit/test_mutants")} == {
        name for name, _ in TEST_NAME.findall(table) + SYMBOL.findall(table)
    }, "a file without the test or the type that is meant"
    assert set(re.findall(r"`(\w+)\.patch`", table)) <= {path.stem for path in PATCHES}


def defined_in(path: Path) -> set[str]:
    """Classes, functions and methods."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}


DIFF = """--- a/code.py
+++ b/code.py
@@ -1,3 +1,2 @@
 one
-two
 three
@@ -9,2 +8,3 @@
 nine
+nine and a half
 ten
"""
TEXT = "one\ntwo\nthree\nfour\nnine\nten\n"


def test_hunks_are_found_where_they_have_moved(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("zero\n" + TEXT)
    (text,) = run.patched(tmp_path, DIFF).values()
    assert text == "zero\none\nthree\nfour\nnine\nnine and a half\nten\n"


@pytest.mark.parametrize("text", [TEXT.replace("two", "2"), TEXT + TEXT])
def test_a_patch_whose_lines_are_gone_or_ambiguous_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "code.py").write_text(text)
    with pytest.raises(run.PatchError, match="occur"):
        run.patched(tmp_path, DIFF)


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
def test_only_assertions_and_oracles_kill(failures: list[tuple[str, str]], killed: bool) -> None:
    assert run.judge(("tests/x.py::t",), failures)[0] is killed


def test_every_named_test_must_fail() -> None:
    failures = [("t[1-True]", "assert 1 == 2")]
    assert run.judge(("tests/x.py::t",), failures)[0]
    assert not run.judge(("tests/x.py::t", "tests/x.py::u"), failures)[0]


def test_a_patch_without_its_lines_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.patch"
    path.write_text("what: something\n" + DIFF)
    with pytest.raises(run.PatchError, match="kills"):
        run.read_mutant(path)
