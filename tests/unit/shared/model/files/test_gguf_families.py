"""Families in GGUF files against transformers on the same tiny random weights: whole prompts, and in chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shared.core.errors import ConfigError
from shared.model.formats.gguf_file import GgufFile
from shared.model.formats.opened import LoadOptions, open_model
from shared.model.loading.load import load_model
from tests.support.models import tiny_families
from tests.support.models.gguf_families import write_gguf
from tests.support.models.tiny_families import GEMMA_ROPE, SIZES, Make, llama, qwen2, qwen3
from tests.support.models.tiny_models import Rows, prompt, reference, save_random

CONTEXT, ORIGINAL = SIZES["max_position_embeddings"], 32
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.6, 1.8, 2.0], "long_factor": [1.0, 1.5, 2, 3, 5, 8, 13, 21.5]}


def phi3(**changes: Any) -> Make:
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"} | {"pad_token_id": 0}
    return lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**(sizes | changes)))


def long_phi3(**changes: Any) -> Make:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL} | FACTORS
    return phi3(rope_parameters=rope, original_max_position_embeddings=ORIGINAL, **changes)


def gemma(**changes: Any) -> Make:
    """All published sizes but one scale scores by the size of a head; files don't say it."""
    return tiny_families.gemma(query_pre_attn_scalar=SIZES["head_dim"], **changes)


ALTERNATING = ["sliding_attention", "full_attention"] * 2
CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "gemma3": (gemma(num_hidden_layers=7), {}),
    "gemma3, own period": (
        gemma(layer_types=ALTERNATING, rope_parameters=GEMMA_ROPE, final_logit_softcapping=3.0),
        {"attention__sliding_window_pattern": 2, "final_logit_softcapping": 3.0},
    ),
    "gemma3, own pattern, untied": (
        gemma(layer_types=ALTERNATING, tie_word_embeddings=False),
        {"attention__sliding_window_pattern": [True, False] * 2},
    ),
    "phi3": (phi3(), {}),
    "phi3, windowed, tied": (phi3(sliding_window=9, tie_word_embeddings=True), {}),
    "phi3, stretched": (long_phi3(), {}),
    "llama": (llama(), {}),
    "qwen2, windowed": (qwen2(use_sliding_window=True, sliding_window=9, max_window_layers=0), {}),
    "qwen3": (qwen3(sliding_window=None), {}),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def written(name: str, tmp_path: Path, **fields: Any) -> tuple[transformers.PreTrainedModel, Path]:
    make, own = CASES[name]
    network = save_random(make(), tmp_path / "folder")
    return network, write_gguf(network, tmp_path / "m.gguf", **(own | fields))


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("name", CASES)
def test_logits_of_a_file_equal_transformers(name: str, tmp_path: Path) -> None:
    network, path = written(name, tmp_path)
    ids = prompt(61)
    want = reference(network, ids)
    assert want.std() > 0.1
    model = load_model(str(path), LoadOptions("float32", kernels="torch"))
    assert model.spec.max_context == CONTEXT
    assert_equal(Rows(model, 1, 16).step({0: ids}), want)
    rows, parts = Rows(model, 2, page_size=4), []
    for begin, end in ((0, 23), (23, 24), (24, 43), (43, 61)):
        parts.append(rows.step({0: ids[begin:end], 1: ids[:2]})[: end - begin])
    assert_equal(torch.cat(parts), want)


@pytest.mark.parametrize(("context", "is_long"), [(ORIGINAL, False), (ORIGINAL + 1, True), (0, True)])
def test_phi3_takes_the_factors_of_the_context(context: int, is_long: bool, tmp_path: Path) -> None:
    """transformers decides by the longest text of a batch, whose cached keys then no longer fit."""
    network, path = written("phi3, stretched", tmp_path)
    ids = prompt(ORIGINAL + is_long)
    model = load_model(str(path), LoadOptions("float32", kernels="torch", max_context=context))
    assert_equal(Rows(model, 1, 16).step({0: ids}), reference(network, ids))
    assert model.spec.weights_hash.endswith(" long rope") == is_long


def test_windows_do_not_cut_the_context(tmp_path: Path) -> None:
    _, path = written("gemma3", tmp_path)
    config = GgufFile(path).config
    assert (config.windows, config.max_context) == ((7, 7, 7, 7, 7, 0, 7), CONTEXT)
    _, whole = written("phi3, windowed, tied", tmp_path, attention__sliding_window=CONTEXT)
    assert GgufFile(whole).config.windows == ()  # a window that holds all is none


def test_gemma_s_windows_also_choose_the_rotation(tmp_path: Path) -> None:
    _, whole = written("gemma3", tmp_path, attention__sliding_window=CONTEXT)
    config = GgufFile(whole).config
    assert config.local_rope is not None and len(config.windows) == config.num_layers


def test_gemma_27b_scales_scores_by_its_size(tmp_path: Path) -> None:
    """The header does not say it: 62 layers do."""
    network = gemma(num_hidden_layers=62, intermediate_size=8, num_attention_heads=2)()
    path = write_gguf(network, tmp_path / "m.gguf")
    assert GgufFile(path).config.score_scale == (SIZES["hidden_size"] / 2) ** -0.5


@pytest.mark.parametrize(
    ("name", "fields", "named"),
    [
        ("gemma3", {"attention__scale": 2.0}, "gemma3.attention.scale 2.0"),
        ("gemma3", {"attention__sliding_window_pattern": [True]}, "sliding_window_pattern is of 1 layers"),
        ("llama", {"attention__sliding_window_pattern": 2}, "llama.attention.sliding_window_pattern 2"),
        ("llama", {"rope__dimension_sections": [8, 4, 4]}, r"llama.rope.dimension_sections \[8, 4, 4\]"),
        ("llama", {"attention__head_count_kv": [2, 1, 2, 1]}, "head_count_kv differs between layers"),
        ("llama", {"rope__scaling__type": "longrope"}, "rope scaling 'longrope'"),
        ("phi3", {"rope__scaling__type": "yarn"}, "rope scaling 'yarn'"),
        ("phi3", {"rope__dimension_count": 12}, "only a part of each head"),
        ("phi3", {"attention__causal": 1}, "phi3.attention.causal 1"),
    ],
)
def test_what_a_file_says_and_we_do_not_know_is_named(
    name: str, fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    _, path = written(name, tmp_path, **fields)
    with pytest.raises(ConfigError, match=named):
        open_model(path)
