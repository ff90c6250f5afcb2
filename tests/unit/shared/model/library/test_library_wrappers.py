"""Kinds that also see images or hear: their text answers are those of the whole network's own `generate` without
images, and only their text part is read."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from shared.config.models.model_folder import read_folder
from shared.model.formats.quantized_folder import open_tensors
from shared.model.library.loading import checked_config, read_network
from tests.support.models.library_families import assert_served, drawn_network
from tests.support.models.library_wrappers import WRAPPERS, make_wrapper, wrapper_config
from tests.unit.shared.model.library.test_library_loading import FORGET_PEAK, MIB, resident

MOST_TIE = 1e-2  # of logits, most of which are above 1


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_says_what_the_library_says(name: str, tmp_path: Path) -> None:
    """In chunks, handed over, with retractions and cached prompts."""
    family = make_wrapper(name, tmp_path)
    assert_served(family)
    spec, own = family.model.spec, family.model.network.parameters()
    assert 0 < spec.tie < MOST_TIE, "the check would take anything for equal"
    assert spec.stored is not None and spec.stored.memory_bytes == sum(weight.nbytes for weight in own)


def peak_of(folder: Path) -> int:
    """Return how much more memory this process has at most while it reads a folder in another dtype."""
    config, files = checked_config(read_folder(folder)), open_tensors(folder)
    FORGET_PEAK.write_text("5")
    before = resident("VmRSS")
    assert read_network(files, config, torch.bfloat16).dtype == torch.bfloat16
    return resident("VmHWM") - before


@pytest.mark.skipif(not FORGET_PEAK.exists(), reason="this system tells no peak")
def test_a_tower_is_neither_read_nor_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A text part of 30 MiB, alone and beside a tower of 70 MiB."""
    config = wrapper_config("llava", hidden_size=512, intermediate_size=4096, head_dim=128)
    config.vision_config.update({"hidden_size": 512, "intermediate_size": 16384, "num_hidden_layers": 2})
    drawn_network(config).save_pretrained(tmp_path / "whole")
    drawn_network(config.text_config).save_pretrained(tmp_path / "text")
    peak_of(tmp_path / "text")  # what is imported and kept at the first time
    alone = peak_of(tmp_path / "text")
    with caplog.at_level(logging.INFO):
        beside = peak_of(tmp_path / "whole")
    assert 30 * MIB < alone < 100 * MIB and beside < 1.15 * alone
    (line,) = (record.getMessage() for record in caplog.records if record.name == "shared.model.library.loading")
    assert line == "not read: 69.7 MiB (multi_modal_projector, vision_tower)"
