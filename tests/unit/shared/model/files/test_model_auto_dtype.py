"""The dtype "auto": what it stands for, by file and kind of device."""

from __future__ import annotations

import functools
from pathlib import Path

import gguf
import pytest
import torch

from shared.config.models.model_path import bundled_gguf
from shared.kernel.code import jit
from shared.kernel.product import libraries, product
from shared.kernel.product.libraries import multiplies_bytes_best
from shared.model.formats.opened import LoadOptions, OpenedModel, open_model, open_named, settled
from shared.model.math.kernels import Formats
from shared.model.math.weights import TensorSource
from shared.node.assembly.fingerprint import make_fingerprint
from shared.wire.fitting import misfit
from shared.wire.messages import Fingerprint
from tests.support.gpus.cuda_core import folder_of, new_folder
from tests.support.models import tiny_gguf
from tests.support.models.draft_head import save_target

GGUF = str(bundled_gguf())


@functools.cache
def files() -> dict[str, str]:
    """Made once a process, in folders of other names in the next one."""
    wide = new_folder()
    save_target(wide, head_dim=64)
    path, weight = wide / "eight.gguf", tiny_gguf.network("llama")["blk.0.attn_q.weight"][0]
    eight = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
    tiny_gguf.write(path, {"blk.0.attn_q.weight": (eight, gguf.GGMLQuantizationType.Q8_0)})
    return {"gguf": GGUF, "folder": str(folder_of("draft target")), "wide heads": str(wide), "eight bits": str(path)}


def source_of(name: str) -> TensorSource:
    return open_model(Path(name))


def opened(name: str, options: LoadOptions, device: str = "cpu") -> OpenedModel:
    found = open_named(name, options, device)
    assert isinstance(found, OpenedModel)
    return found


@pytest.mark.parametrize(
    ("name", "device", "asked", "settles"),
    [
        ("gguf", "cpu", Formats(), Formats("int8", "file")),
        ("gguf", "cpu, AMX", Formats(), Formats("int8", "codes")),
        ("eight bits", "cpu, AMX", Formats(), Formats("int8", "file")),
        ("gguf", "cpu, bytes", Formats(), Formats("int8", "int8")),
        ("gguf", "cpu, bytes", Formats(weights="file"), Formats("int8", "file")),
        ("folder", "cpu, bytes", Formats(), Formats()),
        ("gguf", "cpu, AMX", Formats(weights="file"), Formats("int8", "file")),
        ("gguf", "cpu", Formats(weights="codes"), Formats("int8", "codes")),
        ("gguf", "cuda", Formats(), Formats()),  # blocks have no kernel there
        ("folder", "cpu", Formats(), Formats()),
        ("gguf", "cpu", Formats(weights="int8"), Formats("int8", "int8")),
        ("gguf", "cpu", Formats(weights="fp8"), Formats(weights="fp8")),
        ("gguf", "cpu", Formats("fp8"), Formats("fp8", "file")),
        ("folder", "cpu", Formats(weights="int8"), Formats(weights="int8")),  # heads too small for integer attention
        ("wide heads", "cpu", Formats(weights="int8"), Formats("int8", "int8")),
        ("wide heads", "cuda", Formats(weights="int8"), Formats(weights="int8")),
    ],
    ids=str,
)
def test_auto_is_bfloat16_and_on_a_cpu_the_blocks_of_a_file(
    name: str, device: str, asked: Formats, settles: Formats, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, _, best = device.partition(", ")
    monkeypatch.setattr("shared.model.formats.opened.has_amx", lambda: best == "AMX")
    monkeypatch.setattr("shared.model.formats.opened.multiplies_bytes_best", lambda: best == "bytes")
    found = settled(LoadOptions("auto", formats=asked), source_of(files()[name]), device)
    assert (found.dtype, found.formats) == ("bfloat16", settles)


@pytest.mark.parametrize(
    ("features", "is_best"),
    [
        ({"avx512vnni": True}, True),
        ({"avx512vnni": True, "avx512bf16": True}, False),
        ({"avxvnni": True}, False),
        ({}, False),
    ],
    ids=str,
)
def test_bytes_are_best_with_vnni_alone(
    features: dict[str, bool], is_best: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.kernel.code.jit.processor_features", lambda: features)
    monkeypatch.setattr("shared.kernel.product.libraries.has_amx", lambda: False)
    assert multiplies_bytes_best.__wrapped__() is is_best


@pytest.mark.parametrize("best", ["has_amx", "multiplies_bytes_best"])
def test_plain_torch_keeps_the_blocks(best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"shared.model.formats.opened.{best}", lambda: True)
    assert settled(LoadOptions("auto", kernels="torch"), source_of(GGUF)).formats.weights == "file"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_dtype_by_name_is_exact(dtype: str) -> None:
    options = LoadOptions(dtype)
    assert settled(options, source_of(GGUF), "cpu") is options


@pytest.mark.parametrize(("has_amx", "form"), [(False, "file"), (True, "codes")])
def test_auto_and_the_blocks_asked_for_are_one_fingerprint(
    has_amx: bool, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.model.formats.opened.has_amx", lambda: has_amx)
    monkeypatch.setattr("shared.model.formats.opened.multiplies_bytes_best", lambda: False)
    auto, by_name = opened(GGUF, LoadOptions("auto")), opened(GGUF, LoadOptions(formats=Formats("int8", form)))
    assert auto.spec() == by_name.spec()
    others = [opened(GGUF, LoadOptions(formats=Formats("int8", other))) for other in ("auto", "file", "codes")]
    assert len({other.spec().weights_hash for other in (auto, *others)}) == 3, "nodes of unlike formats must not pair"


def fingerprint(device: str) -> Fingerprint:
    spec = opened(files()["folder"], LoadOptions("float32"), device).spec(device=torch.device(device))
    return make_fingerprint(spec, [], 16, None, "some build")


@pytest.mark.skipif(not libraries.has_fused_products(), reason="this processor has no compiled products")
def test_a_node_of_plain_torch_pairs_with_its_like_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processor fuses no product and sum, and torch sums in another order than compiled kernels. A GPU's node has
    the fingerprint it had."""
    compiled, on_gpu = fingerprint("cpu"), fingerprint("cuda")
    for module in (jit, product):
        monkeypatch.setattr(module, "processor_features", dict)
    plain = fingerprint("cpu")
    assert misfit(compiled, plain) == misfit(plain, compiled) == "weights"
    assert misfit(plain, fingerprint("cpu")) is None and fingerprint("cuda") == on_gpu


def test_codes_need_less_memory_than_bytes() -> None:
    """Of 134.5 million weights 106.2 million have 4 bits in the file."""
    in_file, in_codes = (opened(GGUF, LoadOptions(formats=Formats(weights=form))) for form in ("file", "codes"))
    (_, file_bytes), (_, code_bytes) = in_file._bytes_per_weight(), in_codes._bytes_per_weight()
    assert 0.67 < code_bytes < file_bytes < 0.73
