"""Layers whose indexer chooses what a query reads: index keys in pages, and the choice, are the library's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shared.core.errors import ConfigError
from shared.kv.layout import page_bytes
from shared.model.library.attend import indexer
from shared.model.library.attend.indexer import best_of
from shared.model.library.attend.layer_places import IndexKey, LayerShape, places_of
from shared.model.library.attend.step_rows import StepRows
from shared.model.library.check import compared_positions, own_logits, paged_logits
from shared.model.library.model import LibraryModel
from shared.node.assembly.fingerprint import difference, make_fingerprint
from tests.support.models.library_families import INDEXED, load, network_of, save

K: int = INDEXED["index_topk"]
V32_SIZES = {
    **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "head_dim": 64},
    "index_head_dim": 128,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def loaded(folder: Path, family: str = "deepseek_v32", **changes: Any) -> LibraryModel:
    save(family, folder, num_hidden_layers=2, **changes)
    model = load(folder)
    assert isinstance(model, LibraryModel)
    return model


def test_of_equal_scores_the_first_are_chosen() -> None:
    draw = torch.Generator().manual_seed(1)
    for most in (1, 2, 5, 1000):  # different scores
        scores = torch.randint(0, most, (3, 4, 40), generator=draw).float()
        scores[0, :, 7:] = float("-inf")
        for num in (1, 6, 39):
            right = scores.sort(dim=-1, descending=True, stable=True).indices[..., :num]
            expected = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, right, True)
            assert torch.equal(best_of(scores, num), expected)


def test_a_tie_takes_the_lower_positions(tmp_path: Path) -> None:
    """All scores of a network without weights of heads are 0: a query reads the first tokens of its row."""
    network = network_of("deepseek_v32", num_hidden_layers=2)
    with torch.no_grad():
        for layer in network.model.layers:
            layer.self_attn.indexer.weights_proj.weight.zero_()
    network.save_pretrained(tmp_path / "own")
    rows = [torch.arange(3, 63), torch.arange(90, 130)]
    wanted = compared_positions(40)
    for layer in network.model.layers:
        layer.self_attn.indexer.forward = lambda hidden, *_, **__: torch.arange(K).expand(*hidden.shape[:2], K)
    with torch.inference_mode():
        right = own_logits(network, rows, wanted)
    with pytest.MonkeyPatch.context() as patched:  # the library may choose others
        patched.setattr("shared.model.library.loading.check_logits", lambda *_: SimpleNamespace(tie=0.0, bound=0.0))
        model = load(tmp_path / "own")
    assert isinstance(model, LibraryModel)
    with torch.inference_mode():
        found = paged_logits(model, rows, wanted)
    assert float((found - right).abs().max() / right.abs().max()) < 1e-5


def test_long_prompts_are_scored_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(tmp_path)
    rows, wanted = [torch.arange(3, 63), torch.arange(90, 130)], compared_positions(40)
    with torch.inference_mode():
        whole = paged_logits(model, rows, wanted)
        monkeypatch.setattr(indexer, "MOST_NUMBERS", 7 * 60 * INDEXED["index_n_heads"])
        assert torch.allclose(paged_logits(model, rows, wanted), whole, atol=1e-5)
    assert StepRows(2, 5, 12, (20,)).split(3) == [
        StepRows(2, 5, 8, (16,)), StepRows(2, 8, 11, (19,)), StepRows(2, 11, 12, (20,))
    ]  # fmt: skip


def test_a_token_of_v32_takes_1408_bytes_per_layer(tmp_path: Path) -> None:
    """128 numbers more than V3's. Layers that share an indexer keep no key for it."""
    save("deepseek_v32", tmp_path / "own", **V32_SIZES)
    save("glm_moe_dsa", tmp_path / "shared", **V32_SIZES)
    own, shared = (load(tmp_path / one, "bfloat16").kv_planes(16) for one in ("own", "shared"))
    assert [plane.name for plane in own] == [plane.name for plane in shared] == ["kv_latents0", "kv_index"]
    assert page_bytes(own) == 4 * 16 * (1152 + 256)
    assert page_bytes(shared) == 4 * 16 * 1152 + 2 * 16 * 256


def test_a_wrong_choice_is_refused_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("deepseek_v32", tmp_path)
    monkeypatch.setattr(indexer, "best_of", lambda scores, num: best_of(-scores, num))
    with pytest.raises(ConfigError, match="its logits differ by"):
        load(tmp_path)


def test_bounds_of_lengths_change_no_choice(tmp_path: Path) -> None:
    """Shapes as on a GPU: the check compares them with the library's choice."""
    save("glm_moe_dsa", tmp_path, num_hidden_layers=2, indexer_types=["full", "shared"])
    model = load(tmp_path, kernels="triton")
    assert isinstance(model, LibraryModel) and model.gathers and not model.spec.needs_cpu_seq_lens
    assert f"of {K} tokens that are chosen by index keys of 32" in model.report
    assert f"of {K} tokens that are chosen before" in model.report


def test_an_indexer_that_takes_no_best_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("deepseek_v32", tmp_path, num_hidden_layers=2)
    monkeypatch.setattr(indexer._Scores, "__torch_function__", lambda own, func, _, args=(), kwargs=None: func(
        *args, **(kwargs or {})
    ))  # fmt: skip
    with pytest.raises(ConfigError, match="layer 0 has an indexer that Baton doesn't know"):
        load(tmp_path)


def test_a_choice_of_another_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An indexer that isn't found gives indices of its own."""
    save("deepseek_v32", tmp_path, num_hidden_layers=2)
    monkeypatch.setattr(indexer, "MASK", "another")
    with pytest.raises(ConfigError, match="layer 0 reads tokens that were chosen in a way that Baton doesn't know"):
        load(tmp_path)


def test_index_keys_don_t_pair_with_pages_without_them() -> None:
    spec: Any = SimpleNamespace(name="tiny", weights_hash="", dtype="float32")
    shape = LayerShape(2, 16, 16, torch.float32)
    chosen = LayerShape(2, 16, 16, torch.float32, num_chosen=8, index=IndexKey(32, torch.float32))
    ours, theirs = (
        make_fingerprint(spec, places_of([layer]).specs(8), 8, None, "") for layer in (chosen, shape)
    )  # fmt: skip
    assert difference(ours, theirs).startswith("page_layout differs: kv0:1x8x64:torch.float32;kv_index:1x8x32:")
