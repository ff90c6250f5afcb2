"""Folders as they are published, which the library or its masks do not take as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from shared.model.formats.opened import LoadOptions
from shared.model.library.model import LibraryModel
from shared.model.library.survey import LayerSurvey, is_mark
from shared.model.loading.load import load_model
from shared.node.assembly.model_check import refused
from tests.support.models.library_families import SIZES, VOCAB, load, save
from tests.support.models.tiny_families import save as save_own
from tests.support.models.tiny_quantized import FORMATS, write_quantised

LAYERS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
OWN = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "global_head_dim": 32}


@pytest.mark.parametrize(("window", "marked"), [(500, [0, 500, 9, 8]), (5, [5])])
def test_a_mask_that_looks_tokens_up_is_asked_about_those(window: int, marked: list[int]) -> None:
    groups = torch.full((8,), -1)  # of images, by token: none is one

    def seen(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        is_image = (groups[query] == groups[key]) & (groups[query] >= 0)
        return is_image | (key <= query) & (key > query - window)

    mask = LayerSurvey(512).mask(q_length=8, kv_length=8, mask_function=seen)
    assert [own for own in (0, 500, 9, 8, 7, 5) if is_mark(mask, own)] == marked


def test_no_device_looks_beyond_a_tensor_s_end() -> None:
    """A real one would be lost."""
    silent = torch.empty(8, device="meta")

    def seen(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        assert silent[query].shape == query.shape
        return key <= query

    assert is_mark(LayerSurvey(512).mask(q_length=8, kv_length=8, mask_function=seen), 500), (
        "asked about 8 tokens alone"
    )


@pytest.mark.parametrize("window", [5, 12, 200])
def test_windows_are_seen_although_masks_look_tokens_up(window: int, tmp_path: Path) -> None:
    """Gemma 4 12B. Windows shorter than the survey, than the check's prompts, and than neither."""
    more = {"sliding_window": window, "layer_types": LAYERS, "use_bidirectional_attention": "vision"}
    text = SIZES | OWN | more | {"model_type": "gemma4_unified_text"}
    config = transformers.CONFIG_MAPPING["gemma4_unified"](text_config=text)
    MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert [layer.window for layer in model.layers] == [window] * 3 + [0]


def test_kimi_k2_has_the_layers_of_deepseek_v3(tmp_path: Path) -> None:
    """The published config.json also names code of its own, which is not run."""
    save("deepseek_v3", tmp_path)
    known = load(tmp_path)
    path = tmp_path / "config.json"
    published = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | published))
    assert refused(["--model", str(tmp_path)]) == ""
    assert load_model(str(tmp_path), LoadOptions("float32")).report == known.report


@pytest.mark.parametrize(
    ("form", "in_own_file"),
    [
        ("NVFP4, modelopt", False),
        ("NVFP4, modelopt", True),  # as NVIDIA's older folders have it
        ("NVFP4, compressed", False),
        ("bitsandbytes NF4, nested", False),
    ],
)
def test_the_library_gets_the_widened_weights(form: str, in_own_file: bool, tmp_path: Path) -> None:
    plain, folder = tmp_path / "plain", tmp_path / "model"
    save_own("qwen3", plain)
    meant = write_quantised(plain, folder, form)
    if in_own_file:
        shutil.copy(plain / "config.json", folder / "config.json")
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": FORMATS[form].config}))
    model = load(folder)
    assert isinstance(model, LibraryModel) and model.spec.stored is not None
    assert model.spec.stored.format == FORMATS[form].name
    weights = dict(model.network.named_parameters())
    assert all(torch.equal(weights[name], weight) for name, weight in meant.items())
