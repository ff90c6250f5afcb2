"""The dtype "auto": what it stands for, by file and kind of device."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.config.model_path import bundled_gguf
from shared.model.kernels import Formats
from shared.model.opened import LoadOptions, OpenedModel, open_model, open_named, settled
from shared.model.weights import TensorSource
from tests.support.cuda_core import folder_of

GGUF, FOLDER = str(bundled_gguf()), str(folder_of("draft target"))


def source_of(name: str) -> TensorSource:
    return open_model(Path(name))


def opened(name: str, options: LoadOptions, device: str = "cpu") -> OpenedModel:
    found = open_named(name, options, device)
    assert isinstance(found, OpenedModel)
    return found


@pytest.mark.parametrize(
    ("name", "device", "asked", "weights"),
    [
        (GGUF, "cpu", "auto", "file"),
        (GGUF, "cuda", "auto", "auto"),  # blocks have no kernel there
        (FOLDER, "cpu", "auto", "auto"),
        (GGUF, "cpu", "int8", "int8"),
        (GGUF, "cpu", "fp8", "fp8"),
        (FOLDER, "cpu", "int8", "int8"),
    ],
    ids=lambda value: "folder" if value == FOLDER else str(value),  # a folder of this run has another name in the next
)
def test_auto_is_bfloat16_and_on_a_cpu_the_blocks_of_a_file(name: str, device: str, asked: str, weights: str) -> None:
    found = settled(LoadOptions("auto", formats=Formats(kv="int8", weights=asked)), source_of(name), device)
    assert (found.dtype, found.formats) == ("bfloat16", Formats(kv="int8", weights=weights))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_dtype_by_name_is_exact(dtype: str) -> None:
    options = LoadOptions(dtype)
    assert settled(options, source_of(GGUF), "cpu") is options


def test_auto_and_the_blocks_asked_for_are_one_fingerprint() -> None:
    auto, by_name = opened(GGUF, LoadOptions("auto")), opened(GGUF, LoadOptions(formats=Formats(weights="file")))
    assert auto.spec() == by_name.spec()
    exact = opened(GGUF, LoadOptions())
    assert auto.spec().weights_hash != exact.spec().weights_hash, "nodes of the two must not pair"
