"""Names in README.md, CONTRIBUTING.md, docs/ and examples/README.md are those of the product."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.cli import COMMANDS
from shared.config.flags import concerns_of, fields_of
from shared.config.settings.options import flag_name
from tests.support.house import doc_pages
from tests.support.house.prose import GENERATED, PRODUCT

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
MAX_README_WORDS = 700
SURFACE = (ROOT / "tests/unit/house/surface.txt").read_text("utf-8")
SUFFIXES = ("_bucket", "_sum", "_count", "")  # a histogram's series are shown by these names
# Flags of programs of others, which pages name.
OTHERS_FLAGS = {
    "--constraint",
    "--index-url",
    "--no-deps",
    "--head",
    "--address",
    "--include-dashboard",
    "--kernel-name",
    "--launch-count",
    "--set",
    "--tool",
    "--trace",
    "--basetemp",
    "--data-urlencode",
    "--name",
    "--network",
    "--now",
    "--rm",
    "--storage",
    "--web",
}

# Where names in backticks come from, and such names of others.
SOURCES = (*PRODUCT, "tests", "benchmarks", "examples")
SOURCE_SUFFIXES = {
    ".py",
    ".toml",
    ".cpp",
    ".cu",
    ".c",
    ".h",
    ".sh",
    ".js",
    ".html",
    ".json",
    ".yaml",
    ".yml",
    ".j2",
    ".txt",
}
OF_OTHERS = {"epsilon_cutoff", "Eagle3Speculator", "Dashboard", "OTEL_EXPORTER_OTLP_HEADERS", "num_", "_idx"}
IN_CODE = re.compile(r"`([A-Za-z_][\w.]*)(?:\(\))?`")


def found(pattern: str, page: Path) -> set[str]:
    return set(re.findall(pattern, page.read_text("utf-8")))


def words_of(root: Path) -> set[str]:
    """All words of the sources, without their pages."""
    files = [root / "pyproject.toml", root / "Makefile"]
    for folder in SOURCES:
        files += [file for file in (root / folder).rglob("*") if file.suffix in SOURCE_SUFFIXES]
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


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= MAX_README_WORDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_metrics_that_exist(page: Path) -> None:
    metrics = set(re.findall(r"^(?:counter|gauge|histogram) (baton_\w+)", SURFACE, re.MULTILINE))
    assert metrics
    for name in found(r"\bbaton_[a-z_]+\b", page) - {"baton_serve"}:
        assert any(name.removesuffix(suffix) in metrics for suffix in SUFFIXES), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_targets_and_modules_that_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert found(r"(?:`|^)make ([a-z-]+)", page) <= targets
    for name in found(r"python -m\s+((?:tests|benchmarks)[\w.]+\w)", page):
        assert importlib.util.find_spec(name) is not None, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_flags_that_exist(page: Path) -> None:
    """Of `baton` and of the repository's own programs."""
    known = set(re.findall(r"--[a-z][\w-]*", SURFACE)) | OTHERS_FLAGS
    known |= {f"--no-{name[2:]}" for name in set(known)} | {"--help"}
    sources = [path for folder in ("tests", "benchmarks", "router") for path in (ROOT / folder).rglob("*.py")]
    named = found(r"(?<![\w-])--[a-z][\w-]*", page) - known
    if named:
        text = "\n".join(path.read_text("utf-8") for path in sources)
        assert {name for name in named if f'"{name}"' not in text} == set()


def test_each_setting_s_flag_is_named_where_users_read() -> None:
    """As `--flag` or `--no-flag`. The `--help` of tools shows all of theirs, that of daemons only the usual ones."""
    pages = (path for path in (ROOT / "docs").rglob("*.md") if path.relative_to(ROOT).as_posix() not in GENERATED)
    named = {name for page in pages for name in found(r"(?<![\w-])--(?:no-)?([a-z][\w-]*)", page)}
    flags = {
        flag_name(field.name)
        for command in COMMANDS.values()
        for settings in concerns_of(command.process).values()
        for field, _ in fields_of(settings)
        if field.name not in command.hidden
    }
    assert len(flags) > 100 and {flag for flag in flags if flag[2:] not in named} == set()


def test_the_page_of_folders_quotes_a_test_that_runs() -> None:
    page = (ROOT / "docs" / "where_tests_go.md").read_text("utf-8")
    (path,) = re.findall(r"all of\s+`(tests/unit/\S+\.py)`", page)
    assert re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) == [(ROOT / path).read_text("utf-8")]


def test_the_page_of_folders_has_all_rooms_of_helpers() -> None:
    page = (ROOT / "docs" / "where_tests_go.md").read_text("utf-8")
    rows = page.split("|---|---|\n")[-1].split("\n\n")[0].splitlines()
    rooms = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert rooms == {path.parent.name for path in (ROOT / "tests" / "support").rglob("*.py")}


def test_pages_name_what_there_is() -> None:
    words = words_of(ROOT)
    written = [page for page in PAGES if page.name not in doc_pages.PAGES]
    found = {str(page.relative_to(ROOT)): [*gone(page.read_text("utf-8"), words)] for page in written}
    assert len(found) > 40 and {page: names for page, names in found.items() if names} == {}


def test_a_name_that_is_gone_is_found() -> None:
    page = (
        "`there` is `_taken`, and `FutureMap.look_up()`; `gone_now()` and `Gone` are not, `model` and `a_b.md` may be"
    )
    assert [*gone(page, {"_taken", "look_up"})] == ["gone_now", "Gone"]
