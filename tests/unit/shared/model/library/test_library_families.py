"""Every family that the support page lists: its greedy streams through two cores are the library's own `generate`'s,
and draft heads read the library's own hidden states."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.core.errors import ConfigError
from tests.support.models.library_families import FAMILIES, PROMPTS, assert_captured, assert_served, make_family


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_says_what_the_library_says(name: str, tmp_path: Path) -> None:
    family = make_family(name, tmp_path)
    assert_served(family)
    if name in ("hy_v4", "longcat_flash"):  # several streams, or a layer of its own that has two attentions
        with pytest.raises(ConfigError, match="a draft head can't read between them"):
            family.model.capture_aux((0,))
        return
    assert_captured(family.network, family.model, PROMPTS[1])
