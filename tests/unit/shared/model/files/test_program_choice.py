"""Which program runs a published folder of a family of ours: config.json alone decides, and the reason is told."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers

from shared.config.models.model_folder import read_folder
from shared.core import extras
from shared.core.errors import ConfigError
from shared.model.formats.choice import uses_library
from shared.model.formats.config_fields import declared_fields
from shared.model.formats.hf_config import FAMILY_FIELDS, HF_ARCHITECTURES, NO_MATTER, USED, config_from_hf
from shared.model.formats.opened import LibraryFolder, LoadOptions, open_named
from shared.model.loading.load import load_model, refuse_attention
from shared.model.loading.pipeline import load_pipeline
from shared.model.math.kernels import Formats
from tests.support.models.tiny_families import SIZES, save
from tests.support.models.tiny_models import save_random

MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
# what older versions of the library and training programs wrote, as whole dumps
DUMP: dict[str, Any] = {
    "add_cross_attention": True, "bad_words_ids": [[3]], "begin_suppress_tokens": [4], "chunk_size_feed_forward": 0,
    "diversity_penalty": 0.5, "finetuning_task": "chat", "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "length_penalty": 1.0, "model_max_length": 512, "num_beams": 1, "num_return_sequences": 1, "return_dict": True,
    "repetition_penalty": 1.1, "rope_interleaved": True, "typical_p": 1.0, "use_bfloat16": True,
}  # fmt: skip


def write(folder: Path, family: str, fields: Mapping[str, Any]) -> Path:
    """A config.json without weights."""
    kinds = {"llama": "LlamaForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "gemma3": "Gemma3ForCausalLM"}
    config = SIZES | (MOE if family == "qwen3_moe" else {}) | {"rms_norm_eps": 1e-6} | fields
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [kinds[family]], "model_type": family}))
    return folder


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", DUMP),
        ("qwen3_moe", {"shared_expert_intermediate_size": 0, "use_qk_norm": True, "qkv_bias": False}),  # Qwen3-Coder
        ("llama", {"model_max_length": 4096, "unheard_of": 7}),
        ("qwen3_moe", {"router_jitter_noise": 0.01, "chunk_size_feed_forward": 0}),
        (
            "gemma3",
            {"use_bidirectional_attention": False, "chunk_size_feed_forward": 0},
        ),
    ],
)
def test_fields_that_the_library_leaves_unread_are_ours(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    folder = read_folder(write(tmp_path, family, fields))
    assert not uses_library(folder, "auto")
    assert config_from_hf(folder).family == family


def test_unread_fields_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = read_folder(write(tmp_path, "llama", {"told_once": 7, "and_this": 1}))
    for _ in range(2):
        assert not uses_library(folder, "auto")
    told = [record.getMessage() for record in caplog.records]
    assert told == ["config.json has fields that no program reads for llama: and_this, told_once"]


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("llama", {"mlp_bias": True}, "mlp_bias is not supported"),  # Granite code
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("llama", {"partial_rotary_factor": 0.5}, "rotating only a part of each head"),
        ("llama", {"rope_scaling": LONGROPE}, "rope scaling 'longrope' is not supported"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "own": 1}}, "'linear' with own is not supported"),
        ("llama", {"chunk_size_feed_forward": 2}, "not supported for llama: chunk_size_feed_forward 2"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    ],
)
def test_what_only_the_library_may_have_is_its(
    family: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = read_folder(write(tmp_path, family, fields))
    assert uses_library(folder, "auto")
    assert not uses_library(folder, "baton")
    with pytest.raises(ConfigError, match=rf"{reason}.*; --model-library transformers may run it"):
        config_from_hf(folder)


@pytest.mark.parametrize("family", sorted(HF_ARCHITECTURES.values()))
def test_the_table_has_what_the_library_declares(family: str) -> None:
    kind = transformers.CONFIG_MAPPING["gemma3_text" if family == "gemma3" else family]
    defaults = kind().to_dict()
    known = USED | NO_MATTER | set(FAMILY_FIELDS[family].split())
    assert declared_fields(family) == {name: value for name, value in defaults.items() if name not in known}
    assert kind.attribute_map.keys() <= known


def test_without_the_library_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "is_here", lambda extra: False)
    folder = read_folder(write(tmp_path, "llama", {"mlp_bias": True}))
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM .mlp_bias is not supported. needs the package transform"):
        uses_library(folder, "auto")


def test_a_folder_that_no_program_could_run_keeps_its_reason(tmp_path: Path) -> None:
    wrong = {"mlp_bias": True, "quantization_config": {"quant_method": "hqq"}}
    folder = read_folder(write(tmp_path, "llama", wrong))
    assert not uses_library(folder, "auto")
    with pytest.raises(ConfigError, match="quant_method 'hqq' is not supported, only [^;]*$"):
        config_from_hf(folder)


@pytest.fixture(scope="module")
def with_bias(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Granite's code models: Llama with biases in the inner network."""
    folder = tmp_path_factory.mktemp("models") / "granite-code"
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, mlp_bias=True))
    save_random(network, folder)
    return folder


def test_auto_serves_it_checked_with_the_reason_in_one_line(with_bias: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = load_model(str(with_bias), LoadOptions("float32"))
    assert model.spec.library.startswith("transformers ")
    lines = [record.getMessage() for record in caplog.records if "mlp_bias" in record.getMessage()]
    assert len(lines) == 1 and "runs granite-code, because Baton's own program does not: mlp_bias" in lines[0]
    with pytest.raises(ConfigError, match="mlp_bias is not supported; --model-library transformers may run it"):
        load_model(str(with_bias), LoadOptions("float32", library="baton"))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"formats": Formats(weights="int8")}, "--weight-dtype"),
        ({"adapters": {"own": "/nowhere"}}, "--lora"),
        ({"kernels": "fixed"}, "--deterministic"),
    ],
)
def test_a_flag_of_our_programs_gets_both_reasons(changes: dict[str, Any], flag: str, with_bias: Path) -> None:
    both = rf"^{flag}: models that the library transformers runs \(granite-code: mlp_bias is not supported\) "
    with pytest.raises(ConfigError, match=both):
        load_model(str(with_bias), LoadOptions("float32", **changes))


def test_stages_and_attention_get_both_reasons_too(with_bias: Path) -> None:
    both = r"models that the library transformers runs \(granite-code: mlp_bias is not supported\) "
    with pytest.raises(ConfigError, match=rf"^--pp 2: {both}are not cut"):
        load_pipeline(str(with_bias), LoadOptions("float32"), 2)
    asked = LoadOptions("float32", attention=lambda: None)  # type: ignore[arg-type]
    asked.attention.is_asked = True  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=rf"^--attention: {both}have Baton's attention"):
        refuse_attention(LibraryFolder(with_bias), asked)


def test_qwen3_coder_s_folder_is_our_program_s(tmp_path: Path) -> None:
    save("qwen3-moe", tmp_path / "plain")
    folder = shutil.copytree(tmp_path / "plain", tmp_path / "coder")
    path = folder / "config.json"
    more = {"shared_expert_intermediate_size": 0, "use_qk_norm": True, "qkv_bias": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    assert not isinstance(open_named(str(folder), LoadOptions("float32")), LibraryFolder)
    assert not load_model(str(folder), LoadOptions("float32")).spec.library
