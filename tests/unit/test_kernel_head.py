"""The vocabulary product with float32 results: against float64, and the same bits for any number of rows."""

from __future__ import annotations

import pytest
import torch

from shared.kernel import head_half
from shared.kernel.head_half import HalfHead, pack
from shared.kernel.linear import FloatHead, PlainLinear
from shared.kernel.team import Team

needs_avx512_bf16 = pytest.mark.skipif(not head_half.supports(64), reason="no bfloat16 products on this processor")


@needs_avx512_bf16
@pytest.mark.parametrize(("columns", "inputs", "threads"), [(128, 64, 1), (100, 34, 1), (320, 64, 3), (64, 2, 2)])
def test_equals_float64(columns: int, inputs: int, threads: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(columns, inputs).bfloat16(), torch.randn(15, inputs).bfloat16()
    head = HalfHead(weight, Team(threads))
    want = x.double() @ weight.double().T
    whole = head(x)
    assert whole.dtype == torch.float32 and whole.is_contiguous()
    torch.testing.assert_close(whole.double(), want, atol=1e-4, rtol=1e-5)
    for rows in range(1, 15):
        assert torch.equal(head(x[:rows]), whole[:rows])


def test_packing_puts_pairs_of_sixteen_columns_together() -> None:
    weight = torch.arange(64 * 6, dtype=torch.float32).view(64, 6).bfloat16()
    packed = pack(weight)
    assert packed.shape == (4, 3, 16, 2)
    assert torch.equal(packed[2, 1, 5], weight[2 * 16 + 5, 2:4])
    assert pack(weight[:50]).shape == packed.shape and not pack(weight[:50])[3, :, 2:].any()


def test_float_head_takes_any_dtype() -> None:
    weight, x = torch.randn(8, 4), torch.randn(2, 4).bfloat16()
    out = FloatHead(PlainLinear(weight))(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, x.float() @ weight.T)
