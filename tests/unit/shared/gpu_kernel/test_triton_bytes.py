"""Products with a weight in bytes, in Triton's interpreter: the library's numbers, and bits that no batch changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shared.kernel.code.quantized import DTYPES
from shared.kernel.product.blocks import TorchBlocks
from shared.kernel.product.linear import QuantizedLinear
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.model.math.kernels import Formats, pick_kernels
from tests.support.gpus.cuda_core import folder_of
from tests.support.models.tiny_models import Rows, prompt

interpreter = pytest.importorskip("tests.support.kernels.interpreter", exc_type=ImportError)
products = interpreter.kernels("product")

FP8 = DTYPES["fp8"]
# Rounded once, at the end. The library widens rows to float32 as well.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2}


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter.grids.interpreter_builder, "options", interpreter.UNCHECKED)


def both(inputs: int, outputs: int, has_bias: bool, is_fixed: bool = False) -> tuple[object, QuantizedLinear]:
    torch.manual_seed(inputs)
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs) if has_bias else None
    weight[0], weight[-1] = weight[0] * 1e-6, 0.0  # a small scale, and none
    return products.ByteLinear(weight, bias, FP8, is_fixed=is_fixed), QuantizedLinear(weight, bias, FP8)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 64), (67, 200, 131), (2, 7, 2)])
def test_equals_the_library(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    for has_bias in (False, True):
        ours, library = both(inputs, outputs, has_bias)
        x, found = torch.randn(rows, inputs).to(dtype), []
        for seed in (1, 2):
            with interpreter.shuffled(seed):
                found.append(ours(x))  # type: ignore[operator]
        assert torch.equal(*found) and found[0].dtype == dtype
        torch.testing.assert_close(found[0], library(x), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_every_byte_counts_what_it_is() -> None:
    """Products with 1 alone: what comes out is the byte's number, times the scale."""
    codes = torch.arange(256).to(torch.uint8).view(FP8)
    numbers = codes.float().nan_to_num(0.0)
    weight = torch.stack((numbers, torch.full((256,), 448.0)), dim=1)  # the largest byte: every scale is 1
    ours = products.ByteLinear(weight, None, FP8)
    assert torch.equal(ours(torch.tensor([[1.0, 0.0]]))[0], numbers)


def spied(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[tuple[str, int]]:
    """Return a list that gets these functions' names and rows with each call."""
    calls: list[tuple[str, int]] = []

    def spy(name: str, real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def called(x: torch.Tensor, *given: object, **named: object) -> torch.Tensor:
            calls.append((name, len(x)))
            return real(x, *given, **named)

        return called

    for name in names:
        monkeypatch.setattr(products, name, spy(name, getattr(products, name)))
    return calls


def test_many_rows_use_the_library_s_product_of_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they are fixed: then no batch changes their kernel."""
    monkeypatch.setattr(products, "FEW_ROWS", 3)
    launched = spied(monkeypatch, "product")
    for is_fixed, wanted in ((False, [("product", 3)]), (True, [("product", 3), ("product", 4)])):
        ours, library = both(40, 9, True, is_fixed)
        for rows in (3, 4):
            x = torch.randn(rows, 40)
            torch.testing.assert_close(ours(x), library(x), atol=2e-5, rtol=2e-5)  # type: ignore[operator]
        assert launched == wanted
        launched.clear()


def test_many_rows_are_gated_by_a_launch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library multiplied them."""
    monkeypatch.setattr(products, "FEW_ROWS", 3)
    launched = spied(monkeypatch, "product", "gate")
    ours, plain = interpreter.kernels("blocks").TritonBlocks(1e-5, torch.float32), TorchBlocks(1e-5, torch.float32)
    for is_fixed, wanted in ((False, [("product", 3), ("gate", 4)]), (True, [("product", 3), ("product", 4)])):
        linear, library = both(40, 18, True, is_fixed)
        for rows in (3, 4):
            x = torch.randn(rows, 40)
            torch.testing.assert_close(ours.gated(linear, x), plain.gated(library, x), atol=2e-4, rtol=2e-5)
            torch.testing.assert_close(ours.gated(library, x), plain.gated(library, x), atol=2e-4, rtol=2e-5)
        assert launched == wanted
        launched.clear()


def logits(kernels: str, weights: str) -> torch.Tensor:
    model = load_model(
        str(folder_of("qwen3")), LoadOptions("float32", kernels=kernels, formats=Formats(weights=weights))
    )
    rows = Rows(model, 2, 4)
    return torch.cat([rows.step(step) for step in ({0: prompt(9, 1)}, {1: prompt(3, 2), 0: [5]})])


def test_a_model_has_the_library_s_logits() -> None:
    """And with weights in bytes others than without: its products are these."""
    wanted = logits("torch", "fp8")
    for kernels in ("triton", "fixed"):
        torch.testing.assert_close(logits(kernels, "fp8"), wanted, atol=1e-4, rtol=1e-4)
    assert (logits("triton", "auto") - wanted).abs().max() > 1e-3


def test_a_gpu_takes_them_for_the_products_of_layers() -> None:
    config = load_model(str(folder_of("qwen3")), LoadOptions("float32", kernels="torch")).config  # type: ignore[attr-defined]
    picked = pick_kernels(config, torch.bfloat16, torch.device("cuda"), None, formats=Formats(weights="fp8"))  # type: ignore[arg-type]
    assert isinstance(picked.make_weight(torch.ones(4, 8), None), products.ByteLinear)
    assert not isinstance(picked.make_linear(torch.ones(4, 8), None), products.ByteLinear)
