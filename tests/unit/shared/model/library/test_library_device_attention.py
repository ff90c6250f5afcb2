"""The library's attention where the host knows only bounds of lengths, on torch and on our kernels: the results of the
attention that knows them, in steps of every kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.model.library.attend.attention import PagedAttention
from shared.model.library.attend.device_attention import DeviceAttention
from shared.model.library.model import LibraryModel
from tests.support.kernels.library_steps import LAYERS, PLAIN, STEPS, attended
from tests.support.models.library_families import load, save

interpreter = pytest.importorskip("tests.support.kernels.interpreter", exc_type=ImportError)
kernel_attention = pytest.importorskip("shared.model.library.attend.kernel_attention")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", LAYERS)
def test_bounds_of_lengths_change_no_result(name: str, step: str) -> None:
    layers = [LAYERS[name]]
    wanted = attended(PagedAttention(layers), name, STEPS[step], "auto", exact=True).out
    got = attended(DeviceAttention(layers, use_kernels=False), name, STEPS[step], "auto", exact=False).out
    torch.testing.assert_close(got, wanted, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("name", "step", "kv"),
    [
        ("plain", "decode", "auto"), ("window", "verify", "auto"), ("window", "trees", "auto"),
        ("shared keys", "chunks and decode", "auto"), ("plain", "chunks and decode", "int8"),
        ("window", "trees", "fp8"), ("softcap", "decode", "auto"), ("softcap", "trees", "int8"),
        ("sinks, window", "trees", "auto"), ("sinks, window", "chunks and decode", "auto"),
        ("sinks, softcap", "decode", "auto"), ("sinks, softcap", "chunks and decode", "fp8"),
    ],
)  # fmt: skip
def test_our_kernels_read_the_library_s_pages(name: str, step: str, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [LAYERS[name]]
    own = DeviceAttention(layers, kv, use_kernels=True)
    assert not own.gathers
    wanted = attended(PagedAttention(layers, kv), name, STEPS[step], kv, exact=True).out
    for split_keys in (16, 256) if name.startswith("sinks") else (16,):  # of one split there is no merge
        monkeypatch.setattr(interpreter.kernels("paged_attention"), "SPLIT_KEYS", split_keys)
        got = attended(own, name, STEPS[step], kv, exact=False).out
        torch.testing.assert_close(got, wanted, atol=2e-5 if kv == "auto" else 2e-4, rtol=2e-5)


def test_what_kernels_lack_is_left_to_torch() -> None:
    known = {name for name, layer in LAYERS.items() if kernel_attention.kernels_know(layer)}
    assert known == LAYERS.keys() - {"chunks", "narrow values", "latents"}
    assert not kernel_attention.kernels_know(replace(PLAIN, key_size=512, value_size=512))
    assert not kernel_attention.kernels_know(replace(LAYERS["latents"], value_size=24))
    assert DeviceAttention([PLAIN, LAYERS["narrow values"]], use_kernels=True).gathers
    assert DeviceAttention([PLAIN], use_kernels=False).gathers


@pytest.mark.parametrize(("family", "gathers"), [("deepseek_v2", True), ("gemma2", False), ("llama", False)])
def test_a_model_says_whether_it_gathers(family: str, gathers: bool, tmp_path: Path) -> None:
    """The kernels are interpreted, also in the check at load."""
    save(family, tmp_path, num_hidden_layers=2)
    model = load(tmp_path, kernels="triton")
    assert isinstance(model, LibraryModel) and model.gathers is gathers
    assert not model.spec.needs_cpu_seq_lens
