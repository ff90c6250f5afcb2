"""Layers that call attention twice, read their own chunk only, or count a text's tokens: logits without the check."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shared.kv.layout import page_windows
from shared.model.library import loading
from shared.model.library.attend.attention import PagedAttention
from shared.model.library.check import compared_positions, own_logits, paged_logits
from shared.model.library.model import LibraryModel
from tests.support.kernels.library_steps import LAYERS, STEPS, attended, by_hand
from tests.support.models.library_families import load, save


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(loading, "check_logits", lambda *_: SimpleNamespace(tie=0.0, bound=0.0))


def loaded(family: str, folder: Path) -> LibraryModel:
    save(family, folder)
    model = load(folder)
    assert isinstance(model, LibraryModel)
    return model


@pytest.mark.parametrize("family", ["diffllama", "llama4_text"])
def test_their_logits_are_the_library_s(family: str, tmp_path: Path) -> None:
    model = loaded(family, tmp_path)
    rows = [torch.arange(3, 63), torch.arange(90, 130)]
    wanted = compared_positions(40)
    with torch.inference_mode():
        found = paged_logits(model, rows, wanted)
        model.network.set_attn_implementation("eager")
        right = own_logits(model.network, rows, wanted)
    assert float((found - right).abs().max() / right.abs().max()) < 1e-5


def test_each_call_has_a_place_and_a_layer_one_hidden_state(tmp_path: Path) -> None:
    model = loaded("diffllama", tmp_path)
    assert len(model.layers) == 8 and model.kv_planes(8)[0].shape == (8, 8, 2 * 2 * 16)
    assert model.config.num_layers == 4


def test_chunks_are_in_the_page_groups_of_windows(tmp_path: Path) -> None:
    """Of Llama 4's four layers, the last reads all tokens."""
    model = loaded("llama4_text", tmp_path)
    assert sorted(page_windows(model.kv_planes(8))) == [0, 16, 16, 16]
    assert "chunks of 16" in model.report


@pytest.mark.parametrize("step", STEPS)
def test_a_token_reads_its_own_chunk(step: str) -> None:
    layer = LAYERS["chunks"]
    found = attended(PagedAttention([layer]), "chunks", STEPS[step], "auto", exact=True)
    right = by_hand(found, layer, "chunks", STEPS[step], "auto")
    torch.testing.assert_close(found.out.double(), right, atol=2e-6, rtol=2e-6)
