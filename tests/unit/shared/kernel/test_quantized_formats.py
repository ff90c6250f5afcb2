"""KV and weights of one byte per number: what is lost is bounded, and nothing else changes a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shared.config.settings.settings import ModelConfig
from shared.core.errors import ConfigError
from shared.kernel.code.quantized import DTYPES, dequantize, quantize
from shared.kernel.product.linear import QuantizedLinear
from shared.kernel.product.product import supports
from shared.kernel.product.quantized_product import QuantizedTileLinear, pack
from shared.kernel.team.team import Team
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.model.math.interface import Model
from shared.model.math.kernels import Formats
from shared.node.assembly.fingerprint import difference, make_fingerprint
from tests.support.models.tiny_models import VOCAB, Rows, prompt, save_random
from tests.support.virtual_gpu.device import make_device

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
HALF_STEP = {"int8": 0.5 / 127, "fp8": 2.0**-4}  # of the largest in the row; of the number itself
needs_tiles = pytest.mark.skipif(not supports(1, torch.float32), reason="our products don't run on this processor")


@pytest.mark.parametrize("name", DTYPES)
def test_what_a_byte_loses(name: str) -> None:
    values = torch.randn(200, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 200)[:, None]
    values[3] = 0.0
    back = dequantize(*quantize(values, DTYPES[name]))
    largest = values.abs().amax(dim=-1, keepdim=True)
    bound = HALF_STEP[name] * (largest if name == "int8" else values.abs().maximum(largest / 448 / 64))
    assert ((back - values).abs() <= bound * 1.001).all()
    assert (back[3] == 0).all()
    torch.testing.assert_close(back.abs().amax(dim=-1), largest[:, 0])


@pytest.mark.parametrize("name", DTYPES)
def test_a_gpu_makes_the_cpu_s_bytes(name: str) -> None:
    """A node quantizes the weights that it loads, and its partner's must be the same. An H100 made other scales."""
    values = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    there = values.to(make_device("eager").device)
    for host, device in zip(quantize(values, DTYPES[name]), quantize(there, DTYPES[name]), strict=True):
        assert torch.equal(device.cpu().float(), host.float())


@needs_tiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(128, 192), (33, 70), (1, 64)])
def test_our_product_is_the_library_s(dtype: torch.dtype, num_inputs: int, num_outputs: int) -> None:
    generator = torch.Generator().manual_seed(num_inputs)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    bias = torch.randn(num_outputs, generator=generator).to(dtype)
    x = torch.randn(17, num_inputs, generator=generator).to(dtype)
    for offset in (bias, None):
        want = QuantizedLinear(weight, offset, DTYPES["fp8"])(x)
        ours = QuantizedTileLinear(pack(weight, offset), Team(2))
        got = ours(x)
        assert got.dtype == dtype and got.shape == want.shape
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5 if dtype == torch.float32 else 1e-2)
        for count in range(1, 17):
            assert torch.equal(ours(x[:count]), got[:count]), "the same bits however many rows there are"


@needs_tiles
def test_every_fp8_number_is_read_as_it_is() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = codes[codes.isfinite()]
    linear = QuantizedTileLinear(pack(finite[None].repeat(3, 1), None), Team(1))
    got = linear(torch.eye(len(finite)))
    assert torch.equal(got, finite[:, None].repeat(1, 3))


def load(folder: Path, kernels: str = "auto", dtype: str = "float32", **formats: str) -> Model:
    return load_model(str(folder), LoadOptions(dtype, kernels=kernels, formats=Formats(**formats)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_random(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)), path)
    return path


@pytest.mark.parametrize(
    ("formats", "most", "dtypes"),  # random weights have no outliers, so int8's long blocks cost them precision
    [
        ({"kv": "int8"}, 0.03, {"auto": "bfloat16", "torch": "float32"}),
        ({"kv": "fp8"}, 0.15, {"auto": "float32", "torch": "bfloat16"}),
        ({"weights": "int8"}, 0.035, {"auto": "bfloat16", "torch": "float32"}),
        ({"weights": "fp8"}, 0.15, {"auto": "float32", "torch": "bfloat16"}),
    ],
)
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_logits_stay_near(
    folder: Path, formats: dict[str, str], most: float, dtypes: dict[str, str], kernels: str
) -> None:
    ids = prompt(40)
    exact = Rows(load(folder), 1, 16).step({0: ids})
    rows = Rows(load(folder, kernels, dtypes[kernels], **formats), 1, 16)
    ours = torch.cat([rows.step({0: ids[:30]}), *(rows.step({0: [i]}) for i in ids[30:])])
    error = (ours - exact).abs().mean() / exact.abs().mean()
    assert 0 < error < most


@pytest.mark.parametrize(
    ("mine", "other", "named"),
    [
        ({}, {"kv": "int8"}, "page_layout differs"),
        ({"kv": "fp8"}, {"kv": "int8"}, "page_layout differs"),
        ({"weights": "fp8"}, {"weights": "int8"}, "weights differs"),
        ({"weights": "fp8"}, {}, "weights differs"),
        ({"kv": "int8", "weights": "fp8"}, {"kv": "int8", "weights": "fp8"}, ""),
    ],
)
def test_unequal_nodes_refuse_to_pair(folder: Path, mine: dict[str, str], other: dict[str, str], named: str) -> None:
    ours, theirs = (
        make_fingerprint(model.spec, model.kv_planes(16), 16, None, "")
        for model in (load(folder, **mine), load(folder, **other))
    )
    assert difference(ours, theirs).startswith(named) and bool(difference(ours, theirs)) == bool(named)


def test_the_integer_model_has_no_such_formats() -> None:
    with pytest.raises(ConfigError, match="--kv-dtype"):
        load_model("hashlm", LoadOptions(formats=Formats(kv="int8")))
    with pytest.raises(ConfigError, match="--weight-dtype is 'int4'"):
        ModelConfig(weight_dtype="int4")
