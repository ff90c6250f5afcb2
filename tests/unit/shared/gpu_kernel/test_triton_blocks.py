"""The residual sum, norm and gate in Triton, interpreted, against plain torch."""

from __future__ import annotations

import pytest
import torch

from shared.core.errors import KernelRefused
from shared.kernel.product.blocks import BlockKernels, TorchBlocks

interpreter = pytest.importorskip("tests.support.kernels.interpreter", exc_type=ImportError)
blocks = interpreter.kernels("blocks")

EPS = 1e-5
NAN = float("nan")
# The interpreter is exact in float32 and rounds float16 once, as torch does.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def both(dtype: torch.dtype, is_gelu: bool = False) -> tuple[BlockKernels, BlockKernels]:
    return blocks.TritonBlocks(EPS, dtype, is_gelu), TorchBlocks(EPS, dtype, is_gelu)


def framed(x: torch.Tensor) -> torch.Tensor:
    """Return x as a contiguous view with NaN before and behind it."""
    held = torch.full((x.numel() + 64,), NAN, dtype=x.dtype)
    view = held[32 : 32 + x.numel()].view(x.shape)
    return view.copy_(x)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 576), (2, 1025), (1, 16384)])
def test_add_norm(rows: int, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows * columns)
    residual, delta = torch.randn(rows, columns) * 3, framed(torch.randn(rows, columns).to(dtype))
    weight = framed(torch.randn(columns))
    ours, plain = both(dtype)
    for change in (None, delta):
        changed, expected = framed(residual), residual.clone()
        with interpreter.shuffled(rows):
            got = ours.add_norm(changed, change, weight)
        want = plain.add_norm(expected, change, weight)
        torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert got.dtype == dtype and torch.equal(changed, expected)
    torch.testing.assert_close(
        ours.norm(delta, weight), plain.norm(delta, weight), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("is_gelu", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "inner"), [(1, 1), (2, 1023)])
def test_gate(rows: int, inner: int, dtype: torch.dtype, is_gelu: bool) -> None:
    torch.manual_seed(rows)
    gate_up = framed((torch.randn(rows, 2 * inner) * 10).to(dtype))
    gate_up.view(-1)[: min(4, inner)] = torch.tensor([-300.0, 300.0, -88.5, 0.0])[:inner].to(dtype)
    ours, plain = both(dtype, is_gelu)
    with interpreter.shuffled(inner):
        got = ours.gate(gate_up)
    assert got.dtype == dtype and got.shape == (rows, inner)
    torch.testing.assert_close(got, plain.gate(gate_up), atol=4 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_row_has_the_same_bits_in_any_batch_and_any_order() -> None:
    torch.manual_seed(0)
    residual, delta, weight = torch.randn(7, 200), torch.randn(7, 200), torch.randn(200)
    gate_up = torch.randn(7, 90)
    ours, _ = both(torch.float32)
    with interpreter.shuffled(1):
        together = ours.add_norm(residual.clone(), delta, weight), ours.gate(gate_up)
    with interpreter.shuffled(2):
        again = ours.add_norm(residual.clone(), delta, weight), ours.gate(gate_up)
    alone = ours.add_norm(residual[3:4].clone(), delta[3:4], weight), ours.gate(gate_up[3:4])
    for one, other, row in zip(together, again, alone, strict=True):
        assert torch.equal(one, other) and torch.equal(one[3:4], row)


def test_views_are_taken_and_a_stream_that_is_one_is_refused() -> None:
    torch.manual_seed(0)
    ours, plain = both(torch.float32)
    wide = torch.randn(3, 40)
    torch.testing.assert_close(ours.gate(wide[:, :20]), plain.gate(wide[:, :20]))
    weight, delta = torch.randn(10), wide[:, :10]
    torch.testing.assert_close(ours.norm(delta, weight), plain.norm(delta, weight))
    torch.testing.assert_close(
        ours.add_norm(torch.zeros(3, 10), delta, weight), plain.add_norm(torch.zeros(3, 10), delta, weight)
    )
    with pytest.raises(KernelRefused, match="in place"):
        ours.add_norm(delta, None, weight)
