"""Layers with multi-head latent attention: pages hold latents, and both ways to attend to them are the library's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shared.core.errors import ConfigError
from shared.kv.layout import page_bytes
from shared.model.library.attend.attention import attend_rows
from shared.model.library.attend.latents import LatentWeights
from shared.model.library.attend.layer_places import LatentHeads, LayerShape, Scoring, places_of
from shared.model.library.check import compared_positions, own_logits, paged_logits
from shared.model.library.model import LibraryModel
from shared.node.assembly.fingerprint import difference, make_fingerprint
from tests.support.models.library_families import load, save

YARN = {
    "rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7, "rope_theta": 1e4,
    "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "V2": ("deepseek_v2", {}),
    "V2 Lite": ("deepseek_v2", {"q_lora_rank": None}),
    "V3, yarn": ("deepseek_v3", {"rope_parameters": YARN}),
    "GLM": ("glm4_moe_lite", {}),
}
V3_SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "head_dim": 64}
V3 = LatentWeights(torch.empty(4, 256, 512, device="meta"), 128)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def loaded(folder: Path, family: str, **changes: Any) -> LibraryModel:
    save(family, folder, num_hidden_layers=2, **changes)
    model = load(folder)
    assert isinstance(model, LibraryModel)
    return model


def choose(monkeypatch: pytest.MonkeyPatch, *, absorbed: bool) -> None:
    monkeypatch.setattr(LatentWeights, "prefers_absorbed", lambda *_: absorbed)


@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_give_the_library_s_logits(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, then single tokens, all of them absorbed, and all expanded."""
    family, changes = KINDS[kind]
    model = loaded(tmp_path, family, **changes)
    assert [(plane.name, plane.shape) for plane in model.kv_planes(8)] == [("kv_latents0", (2, 8, 32 + 16))]
    rows = [torch.arange(3, 63), torch.arange(90, 130)]
    wanted = compared_positions(40)
    with torch.inference_mode():
        found = []
        for absorbed in (True, False):
            choose(monkeypatch, absorbed=absorbed)
            found.append(paged_logits(model, rows, wanted))
        model.network.set_attn_implementation("eager")
        right = own_logits(model.network, rows, wanted)
    for logits in found:
        assert float((logits - right).abs().max() / right.abs().max()) < 1e-5
    assert not torch.equal(*found), "they are two ways"


def test_a_token_of_v3_takes_1152_bytes_per_layer(tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path, **V3_SIZES)
    assert page_bytes(load(tmp_path, "bfloat16").kv_planes(16)) == 4 * 16 * 1152


def test_a_long_prompt_expands_some_heads_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(tmp_path, "deepseek_v3")
    rows, wanted = [torch.arange(3, 60), torch.arange(3, 40)], torch.arange(36)
    choose(monkeypatch, absorbed=False)
    with torch.inference_mode():
        whole = paged_logits(model, rows, wanted)
        numbers = 20 * 57 * 3  # 56 numbers a head and token
        monkeypatch.setattr("shared.model.library.attend.attention.MOST_NUMBERS", numbers)
        assert torch.allclose(paged_logits(model, rows, wanted), whole, atol=1e-5)
    latents, sizes = torch.empty(2, 30, 512 + 64, device="meta"), []
    for heads, keys, values in V3.expanded(latents, 3 * 60 * (128 + 64 + 128)):
        sizes.append((heads, keys.shape, values.shape))
    assert sizes == [
        (slice(0, 3), (2, 3, 30, 192), (2, 3, 30, 128)),
        (slice(3, 4), (2, 1, 30, 192), (2, 1, 30, 128)),
    ]


def num_products(num_queries: int, num_tokens: int, *, absorbed: bool) -> int:
    """Count what torch multiplies. Softcapped scores are products that it counts."""
    scoring = Scoring(1.0, softcap=1.0)
    queries, latents = torch.empty(num_queries, 4, 192, device="meta"), torch.empty(1, num_tokens, 576, device="meta")
    with FlopCounterMode(display=False) as counter:
        if absorbed:
            V3.values_of(attend_rows(V3.absorb(queries), latents[:, None], latents[:, None], None, scoring))
        else:
            ((heads, k, v),) = V3.expanded(latents, 1 << 27)
            attend_rows(queries[:, heads], k, v, None, scoring)
    return counter.get_total_flops()


@pytest.mark.parametrize(("num_tokens", "crossing"), [(40, 32), (300, 108), (2000, 157)])
def test_the_way_with_fewer_products_is_taken(num_tokens: int, crossing: int) -> None:
    """`crossing`: the most queries that are absorbed. Where it is near, padded values blur the count."""
    chosen = {num: V3.prefers_absorbed(num, num_tokens, 64) for num in (1, crossing, crossing + 1, num_tokens)}
    assert list(chosen.values()) == [True, True, False, False]
    for num in (1, crossing * 4 // 5, crossing * 5 // 4, num_tokens):
        fewer = num_products(num, num_tokens, absorbed=True) < num_products(num, num_tokens, absorbed=False)
        assert fewer is V3.prefers_absorbed(num, num_tokens, 64)


def test_wrong_latents_are_refused_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check runs prompts that are expanded, and single tokens that are absorbed."""
    save("deepseek_v3", tmp_path)
    absorb = LatentWeights.absorb

    def unrotated(own: LatentWeights, queries: torch.Tensor) -> torch.Tensor:
        found = absorb(own, queries)
        found[..., own.numbers.shape[2] :] = 0
        return found

    monkeypatch.setattr(LatentWeights, "absorb", unrotated)
    with pytest.raises(ConfigError, match="its logits differ by"):
        load(tmp_path)


def test_latents_don_t_pair_with_other_pages_of_their_size() -> None:
    spec: Any = SimpleNamespace(name="tiny", weights_hash="", dtype="float32")
    shape = LayerShape(1, 32, 16, torch.float32)
    ours, theirs = (
        make_fingerprint(spec, places_of([layer]).specs(8), 8, None, "")
        for layer in (LayerShape(1, 32, 16, torch.float32, latent=LatentHeads(4, 16, 24)), shape)
    )
    assert difference(ours, theirs).startswith(
        "page_layout differs: kv_latents0:1x8x48:torch.float32 here, kv0:1x8x48:"
    )
