"""Folders as others have published them: each gets the verdict that docs/support.md shows."""

from __future__ import annotations

import pytest

from tests.support.models import published_folders
from tests.support.models.published_folders import PublishedFolder, kept_verdicts
from tests.support.models.published_folders import published_folders as all_published

FOLDERS = all_published()
LEAST, LEAST_NAMED = 40, 25
HOW = ("as published", "quoted whole", "quoted in part")


@pytest.mark.parametrize("published", FOLDERS, ids=lambda published: published.name)
def test_a_published_folder_gets_its_verdict(published: PublishedFolder) -> None:
    found = published_folders.shown(published_folders.verdict_on(published))
    assert found == kept_verdicts()[published.name], f"if that is right: {published_folders.REWRITE}"


def test_no_verdict_is_kept_for_a_folder_that_is_gone() -> None:
    assert list(kept_verdicts()) == [published.name for published in FOLDERS]


def test_enough_folders_are_here_and_each_tells_its_source() -> None:
    assert len(FOLDERS) >= LEAST
    assert sum(bool(published.tensors) for published in FOLDERS) >= LEAST_NAMED
    for published in FOLDERS:
        assert published.source, published.name
        assert published.how.startswith(HOW), published.name
        assert bool(published.tensors) == bool(published.tensors_source), published.name


def test_a_pattern_stands_for_all_layers_and_two_experts() -> None:
    names = list(published_folders.written_out("a.{0-1,3}.b.{0-7}.c"))
    assert names == [f"a.{layer}.b.{expert}.c" for layer in (0, 1, 3) for expert in (0, 7)]
