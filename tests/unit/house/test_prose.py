"""The lint of prose.

Each habit is found at its line, the list of exempt files only shrinks, and test names have 60 characters at most.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.house import prose

BAD = {
    '"""Gives the pages."""': "'Gives'",
    "# what is measured goes here": "'what is'",
    "# those that wait come first": "'those that'",
    "# nobody reads it": "'nobody'",
    "# whoever asks gets it": "'whoever'",
    "# so long must it stay": "'so long'",
    "# this is no page": "'is no'",
    "# all but for one": "'but for'",
    "# the end thereof": "'thereof'",
    'raise ValueError(f"nobody has {1}")': "'nobody'",
    'self._log.warning("whoever did it", why=1)': "'whoever'",
    'option(0, "so many pages")': "'so many'",
    'parser.add_argument("--x", help="what is counted")': "'what is'",
}
GOOD = (
    '"""Return the pages, longest first."""',
    "# What is it? A question may ask so.",
    "# this is no longer true, and was no more than a guess",
    "x = 'nobody reads this string'",
    'math.log("nobody")',
)


def found_in(tmp_path: Path, text: str, name: str = "one.py") -> list[str]:
    path = tmp_path / name
    path.write_text(text + "\n", "utf-8")
    return [one.what for one in prose.findings(prose.texts_of(path))]


@pytest.mark.parametrize(("text", "habit"), BAD.items())
def test_each_habit_is_found(tmp_path: Path, text: str, habit: str) -> None:
    (what,) = found_in(tmp_path, text)
    assert what.startswith(habit)


@pytest.mark.parametrize("text", GOOD)
def test_plain_english_passes(tmp_path: Path, text: str) -> None:
    assert found_in(tmp_path, text) == []


def test_every_banned_habit_has_an_example() -> None:
    for pattern, _ in prose.PATTERNS:
        assert any(pattern.search(text) for text in BAD), pattern.pattern


@pytest.mark.parametrize(("count", "is_found"), [(20, False), (21, True)])
def test_a_first_sentence_has_so_few_words(tmp_path: Path, count: int, is_found: bool) -> None:
    sentence = " ".join(["word"] * count)
    docstring = f'def f():\n    """{sentence}. {sentence} {sentence}."""'
    assert bool(found_in(tmp_path, docstring)) == is_found
    assert found_in(tmp_path, f"# {sentence} {sentence}.") == []


def test_pages_are_read_without_their_code(tmp_path: Path) -> None:
    page = "Whoever\n\n```\nnobody\n```\n`those that` [here](what is)\n\nnobody"
    assert len(found_in(tmp_path, page, "page.md")) == 2
    (first, second) = prose.findings(prose.texts_of(tmp_path / "page.md"))
    assert (first.line, second.line) == (1, 8)


def test_a_finding_is_said_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text('"""Head.\n\nnobody\n"""\n# fine\n\n# fine\n# so many\n', "utf-8")
    assert [one.line for one in prose.findings(prose.texts_of(path))] == [3, 7]


def test_the_list_of_exempt_files_only_shrinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = [prose.Finding(3, "bad")]
    assert prose.complaints({"a.py": [], "b.py": bad}, ["b.py"]) == []
    assert prose.complaints({"a.py": bad}, []) == ["a.py:3: bad"]
    (clean,) = prose.complaints({"a.py": []}, ["a.py"])
    assert "a.py has no findings" in clean
    (gone,) = prose.complaints({}, ["gone.py"])
    assert "gone.py has no findings" in gone
    assert prose.complaints({"a.py": bad, "b.py": bad}, ["b.py", "a.py"]) != []
    listed = tmp_path / "exempt.txt"
    listed.write_text("# head\na.py\nb.py\n", "utf-8")
    monkeypatch.setattr(prose, "EXEMPT", listed)
    prose.write({"a.py": [], "b.py": bad, "new.py": bad})
    assert listed.read_text("utf-8") == "# head\nb.py\n"


def test_the_check_reads_the_product_the_examples_and_all_pages() -> None:
    names = set(map(prose.name_of, prose.all_files()))
    assert {"router/app.py", "shared/config/flags.py", "examples/tools.py", "README.md", "docs/support.md"} <= names
    assert not {name for name in names if name.startswith((".venv", "build"))}


@pytest.mark.parametrize(("length", "is_found"), [(60, False), (61, True)])
@pytest.mark.parametrize("kind", ["def", "async def", "class A:\n    def"])
def test_the_check_fails_on_a_test_name_above_60_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, length: int, is_found: bool
) -> None:
    name = "test_".ljust(length, "x")
    path = tmp_path / "tests" / "unit" / "test_one.py"
    path.parent.mkdir(parents=True)
    path.write_text(f"x = 1\n{kind} {name}() -> None: ...\ndef {'long' * 20}() -> None: ...\n", "utf-8")
    listed = tmp_path / "exempt.txt"
    listed.write_text("", "utf-8")
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "EXEMPT", listed)
    line = 3 if "class" in kind else 2
    expected = [f"tests/unit/test_one.py:{line}: {name} has 61 characters, 60 at most"]
    assert prose.complaints_of_test_names() == (expected if is_found else [])
    assert prose.main([str(path)]) == is_found
    for mode in ("--check", "--write"):
        assert prose.main([mode]) == is_found
