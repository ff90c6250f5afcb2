"""Our matrix product: against float64, and the same bits for any number of rows and threads."""

from __future__ import annotations

import pytest
import torch

from shared.kernel.linear import FloatHead, PlainLinear
from shared.kernel.product import TileLinear, pack, supports
from shared.kernel.team import Team

DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(not supports(64, dtype), reason="not on this processor"))
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize(("columns", "inputs", "threads"), [(128, 64, 1), (100, 34, 1), (320, 64, 3), (64, 2, 2)])
def test_equals_float64(
    columns: int, inputs: int, threads: int, dtype: torch.dtype, out_dtype: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(columns, inputs).to(dtype), torch.randn(20, inputs).to(dtype)
    for bias in (None, torch.randn(columns).to(dtype)):
        linear = TileLinear(weight, bias, Team(threads), out_dtype)
        want = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
        whole = linear(x)
        assert whole.dtype == (out_dtype or dtype) and whole.is_contiguous()
        tolerance = 1e-2 if whole.dtype == torch.bfloat16 else 5e-5
        torch.testing.assert_close(whole.double(), want, atol=tolerance, rtol=tolerance)
        for rows in range(1, 20):
            assert torch.equal(linear(x[:rows]), whole[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounds_as_torch_does(dtype: torch.dtype) -> None:
    if dtype == torch.float32:
        pytest.skip("nothing is rounded")
    torch.manual_seed(1)
    weight, x = torch.randn(64, 48).bfloat16(), torch.randn(9, 48).bfloat16()
    exact = TileLinear(weight, None, Team(1), torch.float32)(x)
    assert torch.equal(TileLinear(weight, None, Team(1))(x), exact.bfloat16())


def test_packing_puts_the_pairs_of_a_tile_together() -> None:
    weight = torch.arange(128 * 6, dtype=torch.float32).view(128, 6).bfloat16()
    packed = pack(weight)
    assert packed.shape == (2, 3, 64, 2) and packed.is_contiguous()
    assert torch.equal(packed[1, 1, 37], weight[64 + 37, 2:4])
    assert pack(weight[:100]).shape == packed.shape and not pack(weight[:100])[1, :, 36:].any()
    assert torch.equal(pack(weight.float())[1, 4, 37], weight.float()[64 + 37, 4:5])


def test_float_head_takes_any_dtype() -> None:
    weight, x = torch.randn(8, 4), torch.randn(2, 4).bfloat16()
    out = FloatHead(PlainLinear(weight))(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, x.float() @ weight.T)
