"""The dtype "auto": what it stands for, by file and kind of device."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from shared.config.model_path import bundled_gguf
from shared.model.kernels import Formats
from shared.model.opened import LoadOptions, OpenedModel, open_model, open_named, settled
from shared.model.weights import TensorSource
from tests.support.cuda_core import folder_of, new_folder
from tests.support.draft_head import save_target

GGUF = str(bundled_gguf())


@functools.cache
def files() -> dict[str, str]:
    """Made once a process, in folders of other names in the next one."""
    wide = new_folder()
    save_target(wide, head_dim=64)
    return {"gguf": GGUF, "folder": str(folder_of("draft target")), "wide heads": str(wide)}


def source_of(name: str) -> TensorSource:
    return open_model(Path(name))


def opened(name: str, options: LoadOptions, device: str = "cpu") -> OpenedModel:
    found = open_named(name, options, device)
    assert isinstance(found, OpenedModel)
    return found


@pytest.mark.parametrize(
    ("name", "device", "asked", "settles"),
    [
        ("gguf", "cpu", Formats(), Formats("int8", "file")),
        ("gguf", "cuda", Formats(), Formats()),  # blocks have no kernel there
        ("folder", "cpu", Formats(), Formats()),
        ("gguf", "cpu", Formats(weights="int8"), Formats("int8", "int8")),
        ("gguf", "cpu", Formats(weights="fp8"), Formats(weights="fp8")),
        ("gguf", "cpu", Formats("fp8"), Formats("fp8", "file")),
        ("folder", "cpu", Formats(weights="int8"), Formats(weights="int8")),  # heads too small for integer attention
        ("wide heads", "cpu", Formats(weights="int8"), Formats("int8", "int8")),
        ("wide heads", "cuda", Formats(weights="int8"), Formats(weights="int8")),
    ],
    ids=str,
)
def test_auto_is_bfloat16_and_on_a_cpu_the_blocks_of_a_file(
    name: str, device: str, asked: Formats, settles: Formats
) -> None:
    found = settled(LoadOptions("auto", formats=asked), source_of(files()[name]), device)
    assert (found.dtype, found.formats) == ("bfloat16", settles)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_dtype_by_name_is_exact(dtype: str) -> None:
    options = LoadOptions(dtype)
    assert settled(options, source_of(GGUF), "cpu") is options


def test_auto_and_the_blocks_asked_for_are_one_fingerprint() -> None:
    auto, by_name = opened(GGUF, LoadOptions("auto")), opened(GGUF, LoadOptions(formats=Formats("int8", "file")))
    assert auto.spec() == by_name.spec()
    exact = opened(GGUF, LoadOptions())
    assert auto.spec().weights_hash != exact.spec().weights_hash, "nodes of the two must not pair"
