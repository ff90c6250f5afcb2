"""Names of code on the hand-written pages are names that the code has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.house import doc_pages
from tests.support.house.house import ROOT
from tests.support.house.prose import PRODUCT

SOURCES = (*PRODUCT, "tests", "benchmarks", "examples")
SUFFIXES = {".py", ".toml", ".cpp", ".cu", ".c", ".h", ".sh", ".js", ".html", ".json", ".yaml", ".yml", ".j2", ".txt"}
OF_OTHERS = {"epsilon_cutoff", "Eagle3Speculator", "Dashboard", "OTEL_EXPORTER_OTLP_HEADERS", "num_", "_idx"}
IN_CODE = re.compile(r"`([A-Za-z_][\w.]*)(?:\(\))?`")


def words_of(root: Path) -> set[str]:
    """All words of the sources, without their pages."""
    files = [root / "pyproject.toml", root / "Makefile"]
    for folder in SOURCES:
        files += [file for file in (root / folder).rglob("*") if file.suffix in SUFFIXES]
    return {word for file in files for word in re.findall(r"\w+", file.read_text("utf-8", errors="replace"))}


def is_of_code(name: str) -> bool:
    """Whether a name in backticks can only be one of code: `look_up` or `FutureMap`, not `model` or `README.md`."""
    last = name.rpartition(".")[2]
    looks = "_" in last.strip("_") or last.startswith("_") or (last[:1].isupper() and re.search("[a-z]", last))
    return bool(looks) and last not in OF_OTHERS and not name.endswith((".py", ".md"))


def gone(page: str, words: set[str]) -> Iterator[str]:
    for name in IN_CODE.findall(page):
        if is_of_code(name) and name.rpartition(".")[2] not in words:
            yield name


def test_pages_name_what_there_is() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    words = words_of(ROOT)
    written = [page for page in pages if page.name not in doc_pages.PAGES]
    found = {str(page.relative_to(ROOT)): [*gone(page.read_text("utf-8"), words)] for page in written}
    assert len(found) > 40 and {page: names for page, names in found.items() if names} == {}


def test_a_name_that_is_gone_is_found() -> None:
    page = (
        "`there` is `_taken`, and `FutureMap.look_up()`; `gone_now()` and `Gone` are not, `model` and `a_b.md` may be"
    )
    assert [*gone(page, {"_taken", "look_up"})] == ["gone_now", "Gone"]
