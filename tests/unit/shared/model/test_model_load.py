"""Finding, refusing and sizing models before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from shared.config.models.model_folder import read_folder
from shared.config.models.model_path import bundled_gguf
from shared.core.errors import ConfigError
from shared.device.gpu import MemoryInfo
from shared.model.formats.hf_config import config_from_hf
from shared.model.formats.opened import LoadOptions, open_model
from shared.model.loading.load import load_model
from shared.model.math.weights import weights_bytes

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "eos_token_id": 7,
}


def folder(tmp_path: Path, **changes: object) -> Path:
    merged = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(merged))
    return tmp_path


def test_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        load_model("/no/such.gguf")


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="--dtype is 'float64'"):
        load_model("smollm2", LoadOptions("float64"))


def test_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 8192"):
        load_model("smollm2", LoadOptions(max_context=8193))


def test_small_machine_is_told_before_loading() -> None:
    with pytest.raises(ConfigError, match=r"weights need 0\.\d+ GiB, and 95\.37 MiB of 1\.00 GiB are free"):
        load_model("smollm2", LoadOptions(memory=MemoryInfo(100_000_000, 1 << 30)))
    LoadOptions(memory=MemoryInfo(5, 8)).check_memory(5)


def test_weights_bytes_counts_the_parameters() -> None:
    config = open_model(bundled_gguf()).config
    assert config.num_parameters() == 134_515_008
    head, tables = 49152 * 576, 8192 * 64 * 4
    assert weights_bytes(config, torch.float32, 8192) == (134_515_008 + head) * 4 + tables
    assert weights_bytes(config, torch.bfloat16, 8192) == 134_515_008 * 2 + head * 4 + tables
    untied = dataclasses.replace(config, tie_embeddings=False)
    assert weights_bytes(untied, torch.bfloat16, 8192) == weights_bytes(config, torch.bfloat16, 8192)


def test_hf_config(tmp_path: Path) -> None:
    config = config_from_hf(read_folder(folder(tmp_path)))
    assert (config.family, config.head_dim, config.rope.theta, config.eos_ids) == ("qwen2", 8, 1e6, (7,))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert config_from_hf(read_folder(tmp_path)).eos_ids == (7, 9)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 64}, ()),  # qwen2: only if switched on, and from max_window_layers upwards
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, (0, 64)),
        ({"sliding_window": 64, "architectures": ["MistralForCausalLM"]}, (64, 64)),
        ({"architectures": ["MistralForCausalLM"]}, (4096, 4096)),  # the architecture's own default
    ],
)
def test_windows(changes: dict[str, object], windows: tuple[int, ...], tmp_path: Path) -> None:
    config = config_from_hf(read_folder(folder(tmp_path, **changes)))
    assert (config.windows, config.max_context) == (windows, 512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported"),
        ({"mlp_bias": True}, "mlp_bias is not supported; --model-library transformers may run it"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_act": "gelu"}, "only SwiGLU"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not supported"),
    ],
)
def test_bad_hf_config_is_named(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_hf(read_folder(folder(tmp_path, **changes)))


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no \\*.safetensors"):
        open_model(folder(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ConfigError, match="can't read"):
        open_model(tmp_path)
