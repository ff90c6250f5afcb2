"""Models whose weights are mapped from a packed file: the bits of those that pack their own."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from shared.kernel.product.product import supports
from shared.model.formats.opened import LoadOptions, OpenedModel, open_named
from shared.model.formats.packed_folder import PackedFolder, PackedKey
from shared.model.loading import packed_weights
from shared.model.loading.load import load_model
from shared.model.loading.packed_weights import key_of
from shared.model.loading.pipeline import load_pipeline
from shared.model.math.interface import Model
from shared.model.math.kernels import Formats
from tests.support.models import tiny_gguf
from tests.support.models.tiny_families import save
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.models.tiny_models import Rows

pytestmark = pytest.mark.skipif(not supports(64, torch.float32), reason="nothing is packed on this processor")
BIG = 1 << 40
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def logits(model: Model) -> torch.Tensor:
    return Rows(model, 1, 16).step({0: [i % model.spec.vocab_size for i in IDS]})


def packed_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "packed").glob("*.packed"))


def packed_in(tmp_path: Path) -> PackedFolder:
    return PackedFolder(tmp_path / "packed", BIG)


def loaded_twice(name: Path, options: LoadOptions, tmp_path: Path) -> None:
    """Plain, into the file, and out of it."""
    want = logits(load_model(str(name), options))
    for _ in range(2):
        folder = packed_in(tmp_path)
        model = load_model(str(name), replace(options, packed=folder))
        assert folder.mapped_bytes == packed_files(tmp_path)[-1].stat().st_size
        assert torch.equal(logits(model), want)


@pytest.mark.parametrize(
    ("weights", "dtype"), [("auto", "float32"), ("auto", "bfloat16"), ("int8", "bfloat16"), ("fp8", "float32")]
)
def test_the_bits_of_a_model_that_packs_its_own(dtype: str, weights: str, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    loaded_twice(model, LoadOptions(dtype, formats=Formats(weights=weights)), tmp_path)


@pytest.mark.parametrize(
    "family", ["qwen2, yarn, tied", "qwen3, biases", "qwen3-moe, every second layer", "gemma3, whole", "gemma3, untied"]
)
def test_families(family: str, tmp_path: Path) -> None:
    save(family, tmp_path / "model")
    loaded_twice(tmp_path / "model", LoadOptions("float32"), tmp_path)


@pytest.mark.parametrize(("kind", "form"), [(Kind.Q4_1, "file"), (Kind.Q4_0, "codes"), (Kind.Q8_0, "file")])
def test_a_file_s_own_blocks(kind: Kind, form: str, tmp_path: Path) -> None:
    names = ("attn_q", "attn_k", "ffn_down")
    blocks = {
        f"blk.0.{name}.weight": gguf.quants.quantize(tiny_gguf.network("llama")[f"blk.0.{name}.weight"][0], kind)
        for name in names
    }
    path = tiny_gguf.write(tmp_path / "m.gguf", {name: (value, kind) for name, value in blocks.items()})
    loaded_twice(path, LoadOptions("bfloat16", formats=Formats(weights=form)), tmp_path)


def test_stages_and_single_kernels_map_the_same_file(tmp_path: Path) -> None:
    name, options = str(write_tiny_llama(tmp_path / "model")), LoadOptions("float32")
    want = logits(load_model(name, options))
    for _ in range(2):
        staged, _ = load_pipeline(name, replace(options, packed=packed_in(tmp_path)), 2)
        assert torch.equal(logits(staged), want)
    separate = load_model(name, replace(options, kernels="separate", packed=packed_in(tmp_path)))
    assert torch.equal(logits(separate), want) and len(packed_files(tmp_path)) == 1


def test_products_that_no_kernel_takes_come_from_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.kernel.product.product.supports", lambda num_inputs, dtype: num_inputs != 192)
    model = write_tiny_llama(tmp_path / "model")
    loaded_twice(model, LoadOptions("float32"), tmp_path)


def key_of_model(found: OpenedModel) -> PackedKey:
    return key_of(found, found.spec().weights_hash)


def opened(name: Path, **changes: object) -> OpenedModel:
    found = open_named(str(name), replace(LoadOptions("float32"), **changes))  # type: ignore[arg-type]
    assert isinstance(found, OpenedModel)
    return found


def test_the_key_has_all_that_changes_a_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = write_tiny_llama(tmp_path / "one"), write_tiny_llama(tmp_path / "two", layers=2)
    same = key_of_model(opened(model))
    assert key_of_model(opened(model, max_context=64, threads=2)) == same
    others = [key_of_model(opened(other)), key_of_model(opened(model, dtype="bfloat16"))]
    others += [key_of_model(opened(model, formats=Formats(weights=form))) for form in ("int8", "fp8")]
    monkeypatch.setattr(packed_weights, "processor", lambda: "another")
    others.append(key_of_model(opened(model)))
    assert len({key.slot for key in [same, *others]}) == 6
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert key_of_model(opened(model)).slot not in {key.slot for key in [same, *others]}


def test_the_code_is_what_packs_and_what_it_is_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = packed_weights.code_digest.__wrapped__
    before = found()
    for name in ("product.py", "block_product.py", "quantized_product.py", "quantized.py", "block_weights.py"):
        assert any(packed_weights.CODE[0].rglob(name))
    for name in ("weights.py", "gguf_file.py", "gguf_blocks.py", "safetensors_folder.py", "packed_file.py"):
        assert any(packed_weights.CODE[1].rglob(name))
    monkeypatch.setattr(packed_weights, "CODE", (tmp_path,))
    empty = found()
    (tmp_path / "pack.py").write_text("LAYOUT = 1")
    first = found()
    (tmp_path / "pack.py").write_text("LAYOUT = 2")
    assert len({before, empty, first, found()}) == 4
    monkeypatch.setattr("importlib.metadata.version", lambda name: "another")
    assert found() not in {before, empty, first}


def test_another_layout_packs_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = str(write_tiny_llama(tmp_path / "model")), LoadOptions("float32", packed=packed_in(tmp_path))
    load_model(model, options)
    (old,) = packed_files(tmp_path)
    monkeypatch.setattr(packed_weights, "code_digest", lambda: "another layout")
    load_model(model, options)
    (new,) = [path for path in packed_files(tmp_path) if path != old]
    assert new.name.split("-")[0] == old.name.split("-")[0]


def test_files_that_change_while_they_are_read_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_tiny_llama(tmp_path / "model")
    read = packed_weights.read_product

    def read_and_change(*given: object) -> object:
        (model / "generation_config.json").write_text("{}")
        return read(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(packed_weights, "read_product", read_and_change)
    with caplog.at_level(logging.WARNING):
        load_model(str(model), LoadOptions("float32", packed=packed_in(tmp_path)))
    assert packed_files(tmp_path) == [] and "changed while they were read" in caplog.text


def test_plain_kernels_keep_nothing(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    load_model(str(model), LoadOptions("float32", kernels="torch", packed=packed_in(tmp_path)))
    assert not (tmp_path / "packed").exists()
