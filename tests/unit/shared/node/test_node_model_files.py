"""A model's files may change under the node that has mapped them: the node ends before a wrong token leaves it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.config.settings.settings import SpecConfig
from shared.core.errors import ModelChanged
from shared.node.machine.model_files import ModelFiles, files_of_model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a file that was last written long ago."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    os.utime(path, (1, 1))
    return path


@pytest.fixture
def mapped(path: Path) -> Iterator[Path]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        yield path


def watched(path: Path) -> ModelFiles:
    files = ModelFiles([path])
    files.keep_mapped()
    files.check_unchanged()
    return files


@pytest.mark.parametrize("data", [b"WEIGHTS", b"weights and more", b""], ids=["same size", "longer", "cut off"])
def test_a_file_that_is_written_in_place_ends_the_node(mapped: Path, data: bytes) -> None:
    files = watched(mapped)
    mapped.write_bytes(data)
    with pytest.raises(ModelChanged, match=f"{mapped} was written while this node used it"):
        files.check_unchanged()


def test_a_file_is_watched_where_a_link_led(mapped: Path, tmp_path: Path) -> None:
    """The hub's cache has links. One that leads elsewhere later changes no mapping."""
    link, other = tmp_path / "link", tmp_path / "other"
    link.symlink_to(mapped)
    other.write_bytes(b"another")
    files = watched(link)
    link.unlink()
    link.symlink_to(other)
    files.check_unchanged()
    mapped.write_bytes(b"WEIGHTS")
    with pytest.raises(ModelChanged):
        files.check_unchanged()


def test_a_file_that_is_replaced_or_removed_stays_mapped(mapped: Path, tmp_path: Path) -> None:
    files = watched(mapped)
    new = tmp_path / "new"
    new.write_bytes(b"WEIGHTS")
    new.rename(mapped)
    files.check_unchanged()
    mapped.unlink()
    files.check_unchanged()


def test_a_file_that_nobody_maps_may_change_after_loading(path: Path) -> None:
    files = watched(path)
    path.write_bytes(b"WEIGHTS")
    files.check_unchanged()


def test_a_change_while_the_file_is_read_is_noticed(path: Path) -> None:
    files = ModelFiles([path])
    path.write_bytes(b"WEIGHTS")
    with pytest.raises(ModelChanged):
        files.keep_mapped()


def test_all_files_with_weights_are_watched(tmp_path: Path) -> None:
    folder, head = tmp_path / "model", tmp_path / "head"
    for one, names in ((folder, ("b.safetensors", "a.safetensors", "config.json")), (head, ("h.safetensors",))):
        one.mkdir()
        for name in names:
            (one / name).touch()
    parts = [tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    for part in parts:
        part.write_bytes(b"GGUF")
    weights = [folder / "a.safetensors", folder / "b.safetensors"]
    assert files_of_model(str(folder), SpecConfig()) == weights
    own_head = SpecConfig(spec="eagle", spec_head=str(head))
    assert files_of_model(str(folder), own_head) == [*weights, head / "h.safetensors"]
    assert files_of_model(str(folder), SpecConfig(spec="eagle")) == weights
    assert files_of_model(str(parts[0]), SpecConfig()) == parts
    assert files_of_model("hashlm", own_head) == []
