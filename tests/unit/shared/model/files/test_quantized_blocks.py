"""Quantised folders in blocks that our kernels multiply: by a flag, and where widened weights would not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.core.errors import ConfigError
from shared.device.gpu import MemoryInfo
from shared.model.formats.opened import LoadOptions, OpenedModel, open_model, open_named, settled
from shared.model.formats.safetensors_folder import SafetensorsFolder
from shared.model.loading.load import load_model
from shared.model.math.kernels import Formats
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.models.tiny_models import Rows, prompt
from tests.support.models.tiny_quantized import FORMATS, write_quantised

BYTES = {  # per weight of a matrix in blocks of 32; None: blocks can't hold the format's weights
    "AWQ": 0.75,
    "GPTQ": 0.75,
    "GPTQ, 8 bits": 1.25,
    "W4A16": 0.625,
    "W4A16, zero points": 0.75,
    "W8A8, int8": 1.125,
    "W8A16": 1.125,
    "GPTQ, act order": None,
    "W4A16, act order": None,
    "compressed MXFP4": None,
    "fp8, ragged blocks": None,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    plain, made = write_tiny_llama(tmp_path_factory.mktemp("plain"), layers=1, heads=4, kv_heads=2), {}
    for form in BYTES:
        made[form] = tmp_path_factory.mktemp("quantised") / "model"
        write_quantised(plain, made[form], form)
    return made


def opened(folder: Path, options: LoadOptions) -> OpenedModel:
    found = open_named(str(folder), options)
    assert isinstance(found, OpenedModel)
    return found


@pytest.mark.parametrize("form", BYTES)
def test_blocks_hold_the_weights_without_rounding(form: str, folders: dict[str, Path]) -> None:
    source = open_model(folders[form])
    blocks, weight = source.blocks("layers.0.gate"), source.tensor("layers.0.gate")
    assert source.blocks("layers.0.attn_norm") is source.blocks("embed") is None
    if BYTES[form] is None:
        assert blocks is None
        return
    assert blocks is not None and blocks.format.bytes_per_weight == BYTES[form]
    assert int(blocks.numbers.max()) < 1 << blocks.format.bits
    scales = blocks.scales.double().repeat_interleave(32, 1)
    values = (blocks.numbers.double() - blocks.format.zero) * scales
    if blocks.lows is not None:
        values += blocks.lows.double().repeat_interleave(32, 1)
    assert torch.equal(values.float(), weight)


@pytest.mark.parametrize(
    ("form", "weights"), [("AWQ", "file"), ("AWQ", "int8"), ("W4A16", "codes"), ("W8A8, int8", "codes")]
)
def test_logits_in_blocks_stay_near_the_widened_ones(form: str, weights: str, folders: dict[str, Path]) -> None:
    wide, packed = (
        Rows(load_model(str(folders[form]), LoadOptions("float32", formats=Formats(weights=own))), 1, 16)
        for own in ("auto", weights)
    )
    ids = prompt(40)
    ours, theirs = packed.step({0: ids}), wide.step({0: ids})
    assert packed.model.spec.weights_hash != wide.model.spec.weights_hash
    assert ((ours - theirs).norm() / theirs.norm()).item() < 0.05


def test_a_folder_without_blocks_can_t_be_served_in_them(folders: dict[str, Path]) -> None:
    for form in ("fp8, ragged blocks", "GPTQ, act order"):
        with pytest.raises(ConfigError, match="has plain numbers: take auto or int8"):
            opened(folders[form], LoadOptions("bfloat16", formats=Formats(weights="file")))


@pytest.mark.parametrize(("form", "weights"), [("AWQ", "file"), ("fp8, ragged blocks", "int8")])
def test_auto_packs_what_the_machine_can_t_hold(
    form: str, weights: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.model.formats.opened.has_amx", lambda: False)
    monkeypatch.setattr("shared.model.formats.opened.multiplies_bytes_best", lambda: False)
    source, free = open_model(folders[form]), 1
    assert isinstance(source, SafetensorsFolder)
    need = opened(folders[form], LoadOptions("bfloat16")).weights_bytes(source.config)
    for total, wanted in ((need, "auto"), (need - 1, weights)):
        found = settled(LoadOptions("auto", memory=MemoryInfo(free, total)), source)
        assert (found.dtype, found.formats.weights) == ("bfloat16", wanted)
    by_name = LoadOptions("bfloat16", memory=MemoryInfo(free, need - 1))
    assert settled(by_name, source) is by_name


def test_a_plain_folder_is_never_packed_by_itself(folders: dict[str, Path], tmp_path: Path) -> None:
    source = open_model(write_tiny_llama(tmp_path / "plain", layers=1))
    assert settled(LoadOptions("auto", memory=MemoryInfo(1, 1)), source).formats == Formats()


def test_blocks_are_counted_in_the_memory_that_is_needed(folders: dict[str, Path]) -> None:
    wide, packed = (
        opened(folders["W4A16"], LoadOptions("bfloat16", formats=Formats(weights=own))) for own in ("auto", "file")
    )
    assert wide.source.stored() == packed.source.stored() and wide.source.stored()[0] == FORMATS["W4A16"].name
    assert packed.weights_bytes(packed.source.config) < 0.8 * wide.weights_bytes(wide.source.config)
