"""Model files that lie: every one is refused by name, before a kernel trusts it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.core.errors import ConfigError
from shared.model.formats.gguf_file import GgufFile
from shared.model.formats.opened import LoadOptions
from shared.model.formats.safetensors_folder import SafetensorsFolder
from shared.model.formats.tensor_files import files_of
from shared.model.loading.load import load_model
from tests.support.models.tiny_adapters import adapter
from tests.support.models.tiny_gguf import write
from tests.support.models.tiny_llama import write_tiny_llama


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def llama(whole: Path, tmp_path: Path) -> Path:
    """8 query and 4 KV heads of 16, hidden 128, inner 192."""
    shutil.copytree(whole, tmp_path / "llama")
    return tmp_path / "llama"


def rewrite(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def replace_tensor(folder: Path, name: str, tensor: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name: tensor}, path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"intermediate_size": 96}, r"gate_proj.weight is \(192, 128\), .* says \(96, 128\)"),
        ({"intermediate_size": 384}, "gate_proj.weight is"),
        ({"vocab_size": 64}, "embed_tokens.weight is"),
        ({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}, ""),  # the same tensors, other heads
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, "q_proj.bias is|q_proj.weight is|k_proj"),
        ({"num_attention_heads": 6}, "6 heads can't share 4 KV heads"),
        ({"num_attention_heads": 0}, "num_heads is 0|by zero"),
        ({"num_key_value_heads": -4}, "num_kv_heads is -4"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000"),
        ({"head_dim": 15}, "heads of 15"),
        ({"rms_norm_eps": float("nan")}, "rms_eps is nan"),
        ({"rope_theta": -1.0}, "rope of base -1.0"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "stretched 0.0 times"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e4}}, "both rope_p"),
        ({"rope_scaling": ["linear"]}, "wrong field"),
        ({"architectures": {"Qwen2ForCausalLM": 1}}, "wrong field"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0, not a whole number"),
    ],
)
def test_numbers_that_the_tensors_are_not_of(llama: Path, changes: dict[str, Any], named: str) -> None:
    rewrite(llama, **changes)
    if not named:
        SafetensorsFolder(llama)
        return
    with pytest.raises(ConfigError, match=named):
        SafetensorsFolder(llama)


@pytest.mark.parametrize(
    ("name", "tensor", "named"),
    [
        ("model.layers.2.input_layernorm.weight", torch.ones(64), r"input_layernorm.weight is \(64,\)"),
        ("model.layers.1.self_attn.k_proj.bias", torch.zeros(128), r"k_proj.bias is \(128,\)"),
        ("model.layers.1.mlp.down_proj.weight", torch.zeros(192, 128), r"down_proj.weight is \(192, 128\)"),
        ("model.norm.weight", torch.ones(128, dtype=torch.int8), "norm.weight is I8"),
        ("lm_head.weight", torch.zeros(128, 128).to(torch.float8_e4m3fn), "lm_head.weight is F8_E4M3"),
    ],
)
def test_tensors_that_are_not_the_networks(llama: Path, name: str, tensor: torch.Tensor, named: str) -> None:
    replace_tensor(llama, name, tensor)
    with pytest.raises(ConfigError, match=named):
        SafetensorsFolder(llama)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_float_formats_are_read_as_they_are(llama: Path, dtype: torch.dtype) -> None:
    path = llama / "model.safetensors"
    tensors = {name: value.to(dtype) for name, value in load_file(path).items()}
    save_file(tensors, path)
    source = SafetensorsFolder(llama)
    assert torch.equal(source.tensor("layers.1.q"), tensors["model.layers.1.self_attn.q_proj.weight"])
    assert load_model(str(llama), LoadOptions("bfloat16")).spec.dtype == "bfloat16"


def test_a_tensor_of_two_files_is_nobodys(llama: Path) -> None:
    """A shard that is missing is found missing; one of another model beside it would win or lose by its name."""
    tensors = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:20]}, llama / "model-00001-of-00002.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"has no tensor .* \(and \d+ more\)"):
        SafetensorsFolder(llama)
    save_file({name: tensors[name] for name in names[20:]}, llama / "model-00002-of-00002.safetensors")
    SafetensorsFolder(llama)
    save_file({names[3]: tensors[names[3]] + 1}, llama / "older.safetensors")
    with pytest.raises(ConfigError, match=rf"{names[3]} is in model-00001-of-00002.safetensors and in older"):
        SafetensorsFolder(llama)


def test_weights_that_are_published_twice_are_read_once(llama: Path) -> None:
    """Mistral's repositories also have them in one file, under other names."""
    before = SafetensorsFolder(llama).content_hash()
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, llama / "consolidated.safetensors")
    save_file({"layers.1.attention.wq.weight": torch.ones(2)}, llama / "consolidated-00002-of-2.safetensors")
    assert files_of(llama) == (llama / "model.safetensors",)
    source = SafetensorsFolder(llama)
    assert source.content_hash() == before and source.stored()[1] == (llama / "model.safetensors").stat().st_size
    (llama / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no tensor"):
        SafetensorsFolder(llama)


def test_broken_headers_are_refused(llama: Path) -> None:
    """Cut off, with another length, with other offsets: no tensor is read from outside its file."""
    path, rng = llama / "model.safetensors", random.Random(3)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    broken = [data[:size] for size in (0, 7, 8, length, length + 8, len(data) - 1)]
    broken += [size.to_bytes(8, "little") + data[8:] for size in (0, 1, length - 1, length + 1, 2**63, 2**64 - 1)]
    for _ in range(200):
        at = data.index(b"data_offsets", rng.randrange(8, length - 300)) + 15
        broken.append(data[:at] + rng.choice([b"-", b"1e", b"0x", b"99"]) + data[at + 1 :])
    for bad in broken:
        path.write_bytes(bad)
        with pytest.raises(ConfigError):
            SafetensorsFolder(llama)


def test_broken_gguf_headers_are_refused(tmp_path: Path) -> None:
    data, rng = write(tmp_path / "whole.gguf", {}).read_bytes(), random.Random(3)
    bad = tmp_path / "bad.gguf"
    for size in (0, 3, 4, 20, 24, *(rng.randrange(2500) for _ in range(40))):
        bad.write_bytes(data[:size])
        with pytest.raises(ConfigError):
            GgufFile(bad)
    for _ in range(150):  # a changed name or number may be a network's all the same
        changed = bytearray(data)
        changed[rng.randrange(24, 2400)] = rng.choice((0, 1, 255))
        bad.write_bytes(changed)
        try:
            GgufFile(bad)
        except ConfigError:
            continue


def test_an_array_of_more_strings_than_the_file_has_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {}, names=["abc", "d"])
    data = path.read_bytes()
    at = data.index(b"llama.names") + len(b"llama.names") + 8
    path.write_bytes(data[:at] + (1 << 62).to_bytes(8, "little") + data[at + 8 :])
    with pytest.raises(ConfigError, match="as GGUF"):
        GgufFile(path)


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        (torch.zeros(0, 128), "needs"),
        (torch.tensor(1.0), "needs"),
        (torch.zeros(4, 128, 1), "needs"),
        (torch.ones(4, 128, dtype=torch.int32), "is I32"),
    ],
)
def test_adapters_of_no_rank_and_of_whole_numbers(llama: Path, tensor: torch.Tensor, named: str) -> None:
    folder = adapter(llama, llama / "a", 1, targets=("q",))
    path = folder / "adapter_model.safetensors"
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_"
    changed = {f"{name}A.weight": tensor}
    if tensor.numel() == 0:
        changed[f"{name}B.weight"] = torch.zeros(128, 0)
    save_file(load_file(path) | changed, path)
    with pytest.raises(ConfigError, match=named):
        load_model(str(llama), LoadOptions("float32", adapters={"a": str(folder)}))
