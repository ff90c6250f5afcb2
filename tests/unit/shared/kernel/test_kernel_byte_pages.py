"""Compiled attention over pages of bytes: the plain reference's bits in the pages, and its numbers read from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shared.kernel.attention.attention import AttentionInputs, AttentionShape, TorchAttention
from shared.kernel.code.quantized import DTYPES, dequantize, quantize
from shared.kernel.code.step_layout import Layout
from tests.support.kernels.paged_attention import SHAPE, SHAPES, Paged, numba_backend, tables

WINDOW = SHAPES["sliding window"]
SHAPES_AND_DTYPES = [
    ("gqa", "int8"),
    ("mha", "fp8"),
    ("8 lanes", "int8"),
    ("4 lanes", "fp8"),
    ("sliding window", "int8"),
    # a minute each to compile
    pytest.param("one kv head, odd group", "fp8", marks=pytest.mark.long),
    pytest.param("large group and head", "int8", marks=pytest.mark.long),
]


def bytes_of(paged: Paged) -> torch.Tensor:
    return paged.kv.view(torch.uint8)


def scale_bits(paged: Paged) -> torch.Tensor:
    assert paged.scales is not None
    return paged.scales.view(torch.int32)


def numba_and_torch(shape: AttentionShape, name: str, dtype: torch.dtype, page_size: int) -> tuple[Paged, Paged]:
    fields: dict[str, Any] = {"shape": shape, "page_size": page_size, "dtype": dtype, "pages": DTYPES[name]}
    ours = Paged(numba_backend(shape, dtype, pages=DTYPES[name]), **fields)
    return ours, Paged(TorchAttention(shape, tables(shape)), **fields)


@pytest.mark.parametrize(
    ("heads", "page_size", "dtype", "name"),
    [
        ("gqa", 16, torch.float32, "int8"),
        ("8 lanes", 1, torch.bfloat16, "fp8"),
        ("4 lanes", 4, torch.float32, "fp8"),
        ("sliding window", 64, torch.bfloat16, "int8"),
    ],
)
def test_pages_hold_the_reference_s_bits(heads: str, page_size: int, dtype: torch.dtype, name: str) -> None:
    """Pages travel between nodes with and without kernels. What lies beside a token's own bytes stays as it was."""
    ours, reference = numba_and_torch(SHAPES[heads], name, dtype, page_size)
    for paged in (ours, reference):
        paged.qkv *= torch.logspace(-30, 30, paged.qkv.shape[1])[None, :, None].to(dtype)
        paged.step({0: (0, 60), 1: (0, 3)})
        paged.step({1: (3, 20), 0: (60, 61)})
    assert torch.equal(bytes_of(ours), bytes_of(reference))
    assert torch.equal(scale_bits(ours), scale_bits(reference))


@pytest.mark.parametrize("name", DTYPES)
def test_rows_of_nothing_and_of_no_number_are_the_reference_s(name: str) -> None:
    """A scale of 0, one that is no normal number, infinity, and NaN, which may not get lost."""
    ours, reference = numba_and_torch(SHAPE, name, torch.float32, 16)
    for paged in (ours, reference):
        paged.qkv[0, 1] = 0.0
        paged.qkv[0, 2] *= 1e-37
        paged.qkv[0, 3, ::32] = float("inf")
        paged.qkv[0, 4, 5::32] = float("nan")
        paged.step({0: (0, 6)})
    want, got = (dequantize(paged.kv, paged.scales)[paged.table[0, 0], 1, 1, :, :6] for paged in (reference, ours))
    assert torch.equal(got.isnan(), want.isnan()) and got[:, 3:5].isnan().any(dim=-1).all()
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
    assert torch.equal(got[:, 1], torch.zeros_like(got[:, 1])) and (got[:, 2] != 0).any()


@pytest.mark.parametrize("name", DTYPES)
def test_normed_keys_are_the_reference_s_but_for_a_step(name: str) -> None:
    """The mean of squares has another order of sums there."""
    ours, reference = numba_and_torch(SHAPE, name, torch.float32, 16)
    for paged in (ours, reference):
        paged.step({0: (0, 60)}, norms=True)
    far = (bytes_of(ours).int() - bytes_of(reference).int()).abs()
    assert far.max() <= 1 and (far > 0).float().mean() < 1e-3
    torch.testing.assert_close(ours.scales, reference.scales, atol=0, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", DTYPES)
def test_every_byte_is_read_as_it_is(name: str) -> None:
    """One key alone: its value comes out, to the bit of fp8. The weight of int8 is rounded with a scale."""
    codes = torch.arange(256).to(torch.uint8).view(DTYPES[name]).float()
    shape = AttentionShape(1, 1, 256, 1e-5)
    paged = Paged(numba_backend(shape, pages=DTYPES[name]), shape, pages=DTYPES[name])
    values = codes.nan_to_num() if name == "fp8" else codes.clamp(min=-127)
    for scale in (1.0, 0.37, -3e-9):
        paged.qkv[0, 0, 512:] = values * scale
        got, want = paged.step({0: (0, 1)})[0], dequantize(*quantize(values * scale, DTYPES[name]))
        torch.testing.assert_close(got, want, atol=0, rtol=1e-6 if name == "int8" else 0)


@pytest.mark.parametrize(("heads", "name"), SHAPES_AND_DTYPES)
def test_results_are_near_the_reference_s(heads: str, name: str) -> None:
    ours, reference = numba_and_torch(SHAPES[heads], name, torch.float32, 16)
    for spans in ({0: (0, 70)}, {1: (0, 1)}, {0: (70, 71), 1: (1, 30)}, {0: (71, 90)}):
        torch.testing.assert_close(ours.step(spans), reference.step(spans), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("heads", "name", "dtype"),
    [
        ("gqa", "int8", torch.bfloat16),
        ("sliding window", "int8", torch.float32),
        ("gqa", "fp8", torch.float32),
    ],
)
def test_same_bits_for_any_cut_batch_page_size_and_team(heads: str, name: str, dtype: torch.dtype) -> None:
    shape, pages = SHAPES[heads], DTYPES[name]
    whole = Paged(numba_backend(shape, dtype, pages=pages), shape, dtype=dtype, pages=pages).step({0: (0, 100)})
    for page_size, threads in ((16, 1), (1, 1), (64, 1), (16, 2), (4, 3)):
        paged = Paged(numba_backend(shape, dtype, threads, pages), shape, page_size, dtype=dtype, pages=pages)
        parts = [paged.step({0: (0, 37), 1: (0, 5)})[:37]]
        parts += [paged.step({1: (at - 32, at - 31), 0: (at, at + 1)})[1:] for at in range(37, 60)]
        parts += [paged.step({0: (at, at + size)}) for at, size in ((60, 3), (63, 16), (79, 7))]
        parts.append(paged.step({0: (86, 100), 1: (28, 30)})[:14])
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(("heads", "name"), SHAPES_AND_DTYPES)
def test_a_run_over_bytes_has_the_bits_of_each_token_alone(heads: str, name: str) -> None:
    """A key that one query reads is not widened as one is that many read."""
    shape, pages = SHAPES[heads], DTYPES[name]
    whole = Paged(numba_backend(shape, pages=pages), shape, pages=pages).step({0: (0, 120)})
    paged = Paged(numba_backend(shape, pages=pages), shape, pages=pages)
    assert torch.equal(torch.cat([paged.step({0: (at, at + 1)}) for at in range(120)]), whole)


@pytest.mark.parametrize("name", DTYPES)
def test_no_number_of_a_later_token_reaches_an_earlier_one(name: str) -> None:
    """Nor what lies before its window: 0 times NaN is NaN, so no weight of 0 may hide it."""
    whole = Paged(numba_backend(WINDOW, pages=DTYPES[name]), WINDOW, pages=DTYPES[name]).step({0: (0, 100)})
    for lost in (37, 48, 63):
        paged = Paged(numba_backend(WINDOW, pages=DTYPES[name]), WINDOW, pages=DTYPES[name])
        paged.qkv[0, lost] = float("inf")
        got = paged.step({0: (0, 100)})
        assert torch.equal(got[:lost], whole[:lost]) and torch.equal(got[lost + 21 :], whole[lost + 21 :])
        assert not got[lost].isfinite().any()


@pytest.mark.parametrize(
    ("pages", "dtype", "has_scales", "told"),
    [
        (torch.int8, torch.float32, False, "pages of torch.float32; these kernels are for torch.int8"),
        (torch.int8, torch.float8_e4m3fn, True, "pages of torch.float8_e4m3fn; these kernels are for torch.int8"),
        (torch.int8, torch.int8, False, "pages of torch.int8 without scales"),
        (torch.float32, torch.float32, True, "pages of torch.float32 with scales"),
    ],
)
def test_other_pages_are_refused(pages: torch.dtype, dtype: torch.dtype, has_scales: bool, told: str) -> None:
    backend, paged = numba_backend(SHAPE, pages=pages), Paged(numba_backend(SHAPE), SHAPE)
    layout = Layout(torch.tensor([0, 2], dtype=torch.int32), (paged.table[:1],), 2, 2)
    inputs = AttentionInputs(torch.arange(2), layout)
    with pytest.raises(TypeError, match=told):
        backend.begin(inputs, paged.kv.to(dtype), paged.kv[..., 0] if has_scales else None)
