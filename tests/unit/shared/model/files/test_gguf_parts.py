"""A GGUF model in several files, split by the gguf package: each part names it, and a part that is missing is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from shared.config.models.gguf_parts import part_names, without_part
from shared.config.models.model_names import names_of
from shared.config.models.model_path import resolve_model
from shared.core.errors import ConfigError
from shared.model.formats.gguf_file import GgufFile
from tests.support.models.tiny_gguf import write

NAMES = ("embed", "norm", "layers.0.q", "layers.0.down", "layers.0.mlp_norm")


@pytest.fixture
def first(tmp_path: Path) -> Path:
    path = write(tmp_path / "big.gguf", {}, tensors_per_part=5)
    assert path.name == "big-00001-of-00003.gguf"
    return path


@pytest.mark.parametrize("number", [1, 2, 3])
def test_any_part_names_the_whole(number: int, first: Path, tmp_path: Path) -> None:
    whole = GgufFile(write(tmp_path / "whole.gguf", {}))
    named = first.with_name(f"big-0000{number}-of-00003.gguf")
    source = GgufFile(named)
    assert resolve_model(str(named)).path == first and source.config == whole.config
    for name in NAMES:
        np.testing.assert_array_equal(source.tensor(name).numpy(), whole.tensor(name).numpy())


def test_the_hash_is_of_all_parts(first: Path) -> None:
    before = GgufFile(first).content_hash()
    last = first.with_name("big-00003-of-00003.gguf")
    data = bytearray(last.read_bytes())
    data[-5] ^= 1
    last.write_bytes(data)
    assert GgufFile(first).content_hash() != before


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_missing_part_is_named(number: int, first: Path) -> None:
    missing = first.with_name(f"big-0000{number}-of-00003.gguf")
    missing.unlink()
    named = first if number > 1 else first.with_name("big-00002-of-00003.gguf")
    with pytest.raises(ConfigError, match=f"^--model {named}: part {number} of 3 is missing: {missing}$"):
        resolve_model(str(named))


def test_a_broken_part_is_named(first: Path) -> None:
    second = first.with_name("big-00002-of-00003.gguf")
    second.write_bytes(b"<html>")
    with pytest.raises(ConfigError, match=f"{second}: not a GGUF file"):
        resolve_model(str(first))


@pytest.mark.parametrize(
    ("number", "name"), [(1, "alone.gguf"), (1, "big-00002-of-00003.gguf"), (3, "x-00001-of-00001.gguf")]
)
def test_a_part_under_another_name_is_refused(number: int, name: str, first: Path) -> None:
    """Tensors of two parts could be the same, and some would be lacking."""
    renamed = first.with_name(name)
    shutil.copy(first.with_name(f"big-0000{number}-of-00003.gguf"), renamed)
    with pytest.raises(ConfigError, match=f"{name} says that it is part {number} of 3, and its name says otherwise"):
        GgufFile(renamed)


def test_names_of_parts() -> None:
    assert part_names("a/m.gguf") == ("a/m.gguf",)
    assert part_names("m-00002-of-00002.gguf") == ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    assert part_names("m-00000-of-00000.gguf") == ("m-00000-of-00000.gguf",)
    assert without_part("m-Q4_K_M-00001-of-00002.gguf") == "m-Q4_K_M"
    assert names_of("/models/m-00001-of-00002.gguf", ()) == names_of("m.gguf", ()) == ("m",)
