"""LoRA adapters: as if merged into the weights, for each row its own, and none where none was asked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from shared.core.errors import ConfigError
from shared.kernel.product.linear import PlainLinear
from shared.kernel.product.product import supports
from shared.model.formats.lora_file import LoraFolder
from shared.model.formats.opened import LoadOptions
from shared.model.llama.lora import AdaptedModel, Adapter, LoraBank
from shared.model.loading.load import load_model
from shared.model.math.adapter_bank import bank_of
from shared.model.math.interface import Model
from tests.support.models.tiny_adapters import CONFIG, adapter
from tests.support.models.tiny_models import VOCAB, Rows, prompt, save_random

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
# Rows are bit for bit their own in our own products alone: the library's depend on the size of the batch.
OWN_PRODUCTS = [
    pytest.param(
        str(dtype).removeprefix("torch."),
        marks=pytest.mark.skipif(
            not supports(64, dtype), reason="our products of this dtype don't run on this processor"
        ),
    )
    for dtype in (torch.float32, torch.bfloat16)
]


def base(folder: Path) -> Path:
    save_random(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), folder)
    return folder


def merged(model: Path, lora: Path, folder: Path, scale: float) -> Path:
    """The model with the adapter in its weights."""
    folder.mkdir()
    tensors, delta = load_file(model / "model.safetensors"), load_file(lora / "adapter_model.safetensors")
    for name in tensors:
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in delta:
            tensors[name] = tensors[name] + scale * delta[f"{stem}.lora_B.weight"] @ delta[f"{stem}.lora_A.weight"]
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((model / "config.json").read_text())
    return folder


def load(model: Path, kernels: str = "auto", dtype: str = "float32", **adapters: Path) -> Model:
    return load_model(
        str(model), LoadOptions(dtype, kernels=kernels, adapters={name: str(path) for name, path in adapters.items()})
    )


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize(
    ("changes", "scale"),
    [({}, 2.5), ({"use_rslora": True}, 5.0), ({"targets": ("v", "down")}, 2.5), ({"rank": 70, "lora_alpha": 35}, 0.5)],
)
def test_as_if_merged(kernels: str, changes: dict[str, Any], scale: float, tmp_path: Path) -> None:
    model = base(tmp_path / "base")
    lora = adapter(model, tmp_path / "lora", 1, **changes)
    want = Rows(load(merged(model, lora, tmp_path / "merged", scale), kernels), 1, 16)
    plain = Rows(load(model, kernels), 1, 16)
    rows, ids = Rows(load(model, kernels, tuned=lora), 1, 16), prompt(40)
    for start, stop in ((0, 30), (30, 31), (31, 40)):
        got = rows.step({0: ids[start:stop]}, adapters={0: 1})
        expected = want.step({0: ids[start:stop]})
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(got.argmax(-1), expected.argmax(-1))
        assert (expected - plain.step({0: ids[start:stop]})).abs().max() > 0.1, "an adapter that does nothing"


@pytest.mark.parametrize("dtype", OWN_PRODUCTS)
def test_each_row_has_its_own_whoever_else_is_in_the_step(dtype: str, tmp_path: Path) -> None:
    """Rows with either of two adapters and with none, in one step, have the bits that they have alone; and those with
    none the bits of a model that knows of no adapters."""
    model = base(tmp_path / "base")
    first = adapter(model, tmp_path / "a", 1)
    second = adapter(model, tmp_path / "b", 2, targets=("q", "gate"), rank=8)
    both = load(model, dtype=dtype, a=first, b=second)
    assert isinstance(both, AdaptedModel)
    chosen = {0: 2, 1: 0, 2: 1, 3: 0, 4: 2}
    ids = {row: prompt(12 + row, seed=row) for row in chosen}
    mixed = Rows(both, 5, 16)
    alone = {row: Rows(load(model, dtype=dtype) if not slot else both, 1, 16) for row, slot in chosen.items()}
    for start, stop in ((0, 9), (9, 10), (10, 11)):
        got = mixed.step({row: ids[row][start:stop] for row in chosen}, adapters=chosen)
        parts = got.split([stop - start] * len(chosen))
        for (row, slot), part in zip(chosen.items(), parts, strict=True):
            assert torch.equal(part, alone[row].step({0: ids[row][start:stop]}, adapters={0: slot}))


def test_only_the_wanted_rows(tmp_path: Path) -> None:
    model = base(tmp_path / "base")
    tuned = load(model, a=adapter(model, tmp_path / "a", 1))
    ids = {0: prompt(8, 1), 1: prompt(8, 2)}
    whole = Rows(tuned, 2, 16).step(ids, adapters={0: 0, 1: 1})
    some = Rows(tuned, 2, 16).step(ids, wanted=[12, 3, 15], adapters={0: 0, 1: 1})
    torch.testing.assert_close(some, whole[[12, 3, 15]], atol=1e-5, rtol=1e-5)
    assert Rows(tuned, 2, 16).step(ids, wanted=[], adapters={0: 0, 1: 1}).shape == (0, VOCAB)


def test_digests_are_those_of_the_contents(tmp_path: Path) -> None:
    model = base(tmp_path / "base")
    one, same, other = (adapter(model, tmp_path / name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    spec = load(model, x=one, y=same, z=other).spec
    digests = [own.digest for own in spec.adapters]
    assert [own.name for own in spec.adapters] == ["x", "y", "z"]
    assert digests[0] == digests[1] != digests[2]
    assert spec.weights_hash == load(model).spec.weights_hash


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"r": 7}, "r is 7"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], named: str, tmp_path: Path) -> None:
    model = base(tmp_path / "base")
    lora = adapter(model, tmp_path / "a", 1)
    (lora / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    with pytest.raises(ConfigError, match=named):
        load(model, a=lora)


@pytest.mark.parametrize(
    ("name", "shape", "named"),
    [
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", (128,), "lora_magnitude_vector"),
        ("model.embed_tokens.lora_embedding_A", (4, 97), "lora_embedding_A"),
        ("model.layers.7.self_attn.q_proj.lora_A.weight", (4, 128), "no q_proj in layer 7"),
        ("model.layers.1.self_attn.q_proj.lora_A.weight", (4, 64), "needs"),
        ("model.layers.1.self_attn.v_proj.lora_A.weight", (4, 128), "only half"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(name: str, shape: tuple[int, ...], named: str, tmp_path: Path) -> None:
    model = base(tmp_path / "base")
    lora = adapter(model, tmp_path / "a", 1, targets=("q",))
    path = lora / "adapter_model.safetensors"
    save_file(load_file(path) | {f"base_model.model.{name}": torch.zeros(shape)}, path)
    with pytest.raises(ConfigError, match=named):
        load(model, a=lora)


def test_experts_have_no_adapters(tmp_path: Path) -> None:
    sizes = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    save_random(transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes)), tmp_path / "moe")
    lora = adapter(tmp_path / "moe", tmp_path / "a", 1, targets=("q", "o"))
    assert Rows(load(tmp_path / "moe", a=lora), 1, 16).step({0: prompt(5)}, adapters={0: 1}).shape == (5, VOCAB)
    path = lora / "adapter_model.safetensors"
    extra = {f"base_model.model.model.layers.0.mlp.up_proj.lora_{half}.weight": torch.zeros(4, 4) for half in "AB"}
    save_file(load_file(path) | extra, path)
    with pytest.raises(ConfigError, match="no up_proj in layer 0 to adapt"):
        load(tmp_path / "moe", a=lora)


@pytest.mark.parametrize("kernels", ["torch", "separate", "auto"])
def test_an_adapter_put_later_gives_the_bits_of_the_start(kernels: str, tmp_path: Path) -> None:
    model = base(tmp_path / "base")
    folders = [adapter(model, tmp_path / name, seed) for seed, name in enumerate("ab")]
    later = load_model(str(model), LoadOptions("float32", kernels=kernels, lora_slots=2))
    bank = bank_of(later)
    assert bank is not None
    for folder in (*folders, folders[0]):
        read = bank.read(folder)
        begun = load(model, kernels, tuned=folder)
        assert read.digest == begun.spec.adapters[0].digest
        bank.put(2, read)
        want = Rows(begun, 1, 16).step({0: prompt(9)}, adapters={0: 1})
        assert torch.equal(Rows(later, 1, 16).step({0: prompt(9)}, adapters={0: 2}), want)
        bank.clear(2)
    plain = Rows(load(model, kernels), 1, 16).step({0: prompt(9)})
    assert torch.equal(Rows(later, 1, 16).step({0: prompt(9)}, adapters={0: 2}), plain), "of an ended request"


def test_only_a_cpu_model_with_slots_takes_adapters_later(tmp_path: Path) -> None:
    model = load(base(tmp_path / "base"))
    assert bank_of(model) is None
    on_gpu = LoraBank((), 2, model.config, torch.float32, torch.device("meta"), PlainLinear)  # type: ignore[attr-defined]
    assert on_gpu.num_spare == 0 and on_gpu.adapters == []


def test_an_adapter_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = base(tmp_path / "base")
    folder = adapter(model, tmp_path / "a", 1)
    bank = bank_of(load_model(str(model), LoadOptions("float32", lora_slots=1)))
    monkeypatch.setattr("shared.model.llama.lora.host_memory", lambda: (1 << 40, 3 * 1024))
    with pytest.raises(ConfigError, match="may need"):
        bank.read(folder)  # type: ignore[union-attr]


def test_a_folder_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise these weights would be served under the digest of others."""
    model = base(tmp_path / "base")
    folder, other = (adapter(model, tmp_path / name, seed) for seed, name in enumerate("ab"))
    bank = bank_of(load_model(str(model), LoadOptions("float32", lora_slots=1)))
    assert isinstance(bank, LoraBank)
    load_weights = bank._load

    def replaced(read: LoraFolder) -> Adapter:
        shutil.copy(other / "adapter_model.safetensors", folder)
        return load_weights(read)

    monkeypatch.setattr(bank, "_load", replaced)
    with pytest.raises(ConfigError, match="changed while it was read"):
        bank.read(folder)


def test_an_adapter_in_use_does_not_change_with_its_file(tmp_path: Path) -> None:
    model = base(tmp_path / "base")
    folder, other = (adapter(model, tmp_path / name, seed) for seed, name in enumerate("ab"))
    tuned = load(model, "torch", tuned=folder)
    before = Rows(tuned, 1, 16).step({0: prompt(9)}, adapters={0: 1})
    with (folder / "adapter_model.safetensors").open("r+b") as file:
        file.write((other / "adapter_model.safetensors").read_bytes())
    assert torch.equal(Rows(tuned, 1, 16).step({0: prompt(9)}, adapters={0: 1}), before)
