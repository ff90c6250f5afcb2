"""Pipelines and models with an encoder are frozen: what they lack is refused by name, from one table each."""

from __future__ import annotations

from dataclasses import fields

import pytest

from shared.config.processes import NodeParts
from shared.config.settings.frozen import ENCODER, PIPELINE, FrozenPath
from shared.config.settings.options import flag_name
from shared.core.errors import ConfigError

PATH = FrozenPath("old carts", {"--sail": "have no mast", "--oars": "have no mast", "--bell": "make no noise"})


def test_a_refusal_names_each_flag_that_was_asked_and_why() -> None:
    with pytest.raises(ConfigError) as caught:
        PATH.refuse({"--sail 2": True, "--oars": True, "--bell": False}, given="--cart 1", of="mine")
    assert caught.value.message == "--cart 1 --sail 2, --oars: old carts (mine) have no mast"
    with pytest.raises(ConfigError, match="--oars, --bell: old carts have no mast, and make no noise"):
        PATH.refuse({"--sail": False, "--oars": True, "--bell": True})


def test_a_feature_without_a_line_shows_before_anybody_asks_it() -> None:
    with pytest.raises(KeyError, match="--wings"):
        PATH.refuse({"--wings": False})


@pytest.mark.parametrize("path", [PIPELINE, ENCODER])
def test_each_line_is_a_flag_of_nodes(path: FrozenPath) -> None:
    parts = NodeParts()
    sections = [getattr(parts, section.name) for section in fields(parts)]
    flags = {flag_name(field.name) for section in sections for field in fields(section)}
    assert set(path.lacks) <= flags
