"""Titles of commits that lint refuses."""

from __future__ import annotations

import pytest

from tests.support.house import titles


@pytest.mark.parametrize(
    ("title", "told"),
    [
        ("Merge a line of work", "says not what it brings"),
        ("Merge branch 'rooms'", "says not what it brings"),
        ("wip", "says not what it brings"),
        ("Fix.", "says not what it brings"),
        ("Pages as they were in /work/wt/pages", "names a folder of a machine"),
        ("Runs of /tmp/fresh.log", "names a folder of a machine"),
        ("Paths such as C:\\Users\\me", "names a folder of a machine"),
        ("Merge remote-tracking branch 'origin/main'", "says not what it brings"),
        ("x" * 73, "73 characters"),
    ],
)
def test_a_title_is_refused(title: str, told: str) -> None:
    assert [fault for fault in titles.faults([title]) if told in fault]


@pytest.mark.parametrize(
    "title",
    [
        "Fix the leak of pages at a retraction",
        "Merged prompts are cut at page boundaries",
        "GET /v1/models/ lists",
        "Merge adjacent page copies into one launch",
        "Sockets lie in /tmp only where no home is",
        f"Merge {'a1' * 20} into {'b2' * 20}",
        "x" * 72,
        "Updates of a policy: /status says when",
    ],
)
def test_a_title_is_taken(title: str) -> None:
    assert [*titles.faults([title])] == []


def test_twins_are_refused_once() -> None:
    assert [*titles.faults(["A", "B", "A"])] == ["stands 2 times: A"]


def test_without_history_nothing_is_looked_at() -> None:
    assert titles.titles_since("0" * 40) is None
