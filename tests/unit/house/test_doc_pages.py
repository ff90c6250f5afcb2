"""The pages that are made from the running code are up to date, and notice a change."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.support.house import doc_pages, model_table, surface
from tests.support.models import library_families, library_wrappers


def test_the_pages_are_what_the_code_says() -> None:
    assert not doc_pages.stale(), f"to write them: {doc_pages.REWRITE}"


@pytest.mark.parametrize("name", doc_pages.PAGES)
def test_a_page_that_is_not_is_named(tmp_path: Path, name: str) -> None:
    for page, make in doc_pages.PAGES.items():
        (tmp_path / page).write_text(make() + " " * (page == name))
    assert doc_pages.stale(tmp_path) == [name]


def test_readme_counts_the_families_of_the_table() -> None:
    own = len(list(model_table.own_rows()))
    numbers = {7: "seven", 8: "eight", 9: "nine", 10: "ten"}
    counted = (
        f"[{numbers[own]} text families of its own, {len(library_families.FAMILIES)} through transformers, and texts "
        f"of {len(library_wrappers.WRAPPERS)} wrappers]"
    )
    assert counted in (surface.ROOT / "README.md").read_text("utf-8")


class Inner(msgspec.Struct):
    """Its own words."""

    count: int


class Outer(msgspec.Struct):
    first: str  # a name
    # told in a line
    # of two
    second: list[Inner] | None


def test_each_field_is_told_with_its_type_and_its_comment() -> None:
    rows = list(doc_pages.message_section(Outer, 2048))
    assert rows == [
        "### Outer",
        "",
        "At most 2 KiB.",
        "",
        "| field | type | |",
        "|---|---|---|",
        "| `first` | str | a name |",
        "| `second` | list of [Inner](#inner) or nothing | told in a line of two |",
        "",
    ]
    assert "Its own words." in list(doc_pages.message_section(Inner))
