"""Attention over int8 pages with integer products: its definition, and the same bits however a row is cut up."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch

from shared.kernel.attention.attend_bytes import fixed_bytes, most_run_tokens, run_bytes, run_sizes, score_row
from shared.kernel.attention.attend_numba import MOST_RUN_TOKENS, MOST_SCRATCH
from shared.kernel.attention.attention import AttentionShape, TorchAttention, page_hadamard
from shared.kernel.attention.attention_numba import page_items
from shared.kernel.code.items import Items
from shared.kernel.code.quantized import dequantize, quantize
from shared.kernel.product.byte_tiles import BLOCK
from tests.support.kernels.paged_attention import Paged, numba_backend, tables
from tests.support.machine.processors import run_python

SHAPES = {"64": AttentionShape(6, 2, 64, 1e-5), "128, one kv head": AttentionShape(5, 1, 128, 1e-5, scale=0.2)}
SPANS = ({0: (0, 70)}, {1: (0, 1)}, {0: (70, 71), 1: (1, 64)}, {0: (71, 150), 1: (64, 65)})


def paged(name: str, dtype: torch.dtype = torch.float32, page_size: int = 16, threads: int = 1) -> Paged:
    shape = SHAPES[name]
    backend = numba_backend(shape, dtype, threads, torch.int8)
    return Paged(backend, shape, page_size, dtype=dtype, pages=torch.int8)


def in_bytes(x: torch.Tensor) -> torch.Tensor:
    return dequantize(*quantize(x, torch.int8))


class Defined(TorchAttention):
    """The definition in float64: what is rounded, and to what."""

    def _masked(
        self, layer: int, q: torch.Tensor, slots: torch.Tensor, visible: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        group, num_keys = self._shape.num_heads // self._shape.num_kv_heads, k.shape[2]
        numbers, units = quantize(v.nan_to_num(), torch.int8)
        k, numbers = (x.nan_to_num().double().repeat_interleave(group, dim=1) for x in (k, numbers))
        units = units.double().repeat_interleave(group, dim=1)
        scores = torch.matmul(in_bytes(q).transpose(1, 2).double(), k.transpose(2, 3)) * self._shape.score_scale
        hidden = torch.arange(num_keys) > slots[..., None]
        scores = scores.masked_fill(hidden[:, None], float("-inf"))
        shares = (scores - scores.amax(-1, keepdim=True)).exp()
        weights = torch.nn.functional.pad(shares * units[:, :, None], (0, -num_keys % BLOCK)).unflatten(-1, (-1, BLOCK))
        rounded = in_bytes(weights).double().flatten(-2)[..., :num_keys]
        found = torch.matmul(rounded, numbers) / shares.sum(-1, keepdim=True)
        return found.transpose(1, 2).float()


@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_definition(name: str) -> None:
    """Few numbers lie so near the middle between two bytes that float32 rounds them to the other one."""
    shape = SHAPES[name]
    ours, defined = paged(name), Paged(Defined(shape, tables(shape)), shape, pages=torch.int8)
    for spans in SPANS:
        far = (ours.step(spans) - defined.step(spans)).abs()
        assert far.max() < 0.01 and far.median() < 1e-6


@pytest.mark.parametrize("name", SHAPES)
def test_is_near_attention_without_rounded_queries_and_weights(name: str) -> None:
    """Measured: 0.9 to 1.3 %."""
    shape = SHAPES[name]
    ours, exact = paged(name), Paged(TorchAttention(shape, tables(shape)), shape, pages=torch.int8)
    for spans in SPANS:
        want = exact.step(spans)
        assert (ours.step(spans) - want).norm() < 0.02 * want.norm()
    assert torch.equal(ours.kv.view(torch.uint8), exact.kv.view(torch.uint8)), "pages travel between nodes"
    assert torch.equal(ours.scales.view(torch.int32), exact.scales.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_same_bits_for_any_cut_batch_page_size_and_team(name: str, dtype: torch.dtype) -> None:
    whole = paged(name, dtype).step({0: (0, 150)})
    for page_size, threads in ((16, 1), (1, 2), (64, 1), (4, 3)):
        rows = paged(name, dtype, page_size, threads)
        parts = [rows.step({0: (0, 37), 1: (0, 5)})[:37]]
        parts += [rows.step({1: (at - 32, at - 31), 0: (at, at + 1)})[1:] for at in range(37, 67)]
        parts += [rows.step({0: (at, at + size)}) for at, size in ((67, 3), (70, 16), (86, 7))]
        parts.append(rows.step({0: (93, 150), 1: (35, 37)})[:57])
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("span", [(60, 65), (63, 66), (62, 69), (57, 71), (125, 131), (1, 150)])
def test_a_run_across_blocks_has_the_bits_of_tokens_alone(span: tuple[int, int]) -> None:
    """Its length is not a power of two."""
    rows, alone = paged("64"), paged("64")
    rows.step({0: (0, span[0])})
    alone.step({0: (0, span[0])})
    assert torch.equal(rows.step({0: span}), torch.cat([alone.step({0: (at, at + 1)}) for at in range(*span)]))


@pytest.mark.parametrize("name", SHAPES)
def test_a_later_token_does_not_reach_an_earlier_one(name: str) -> None:
    whole = paged(name).step({0: (0, 100)})
    for lost in (0, 36, 63, 64):
        rows = paged(name)
        rows.qkv[0, lost] = float("inf")
        got = rows.step({0: (0, 100)})
        assert torch.equal(got[:lost], whole[:lost]) and not got[lost].isfinite().any()


@pytest.mark.parametrize("factor", [0.0, 1e-37, 50.0])
def test_extreme_numbers(factor: float) -> None:
    """Queries and values of nothing, numbers that are hardly normal, and scores that exp can't take."""
    rows = paged("64")
    rows.qkv[0, 5:] *= factor
    got, values = rows.step({0: (0, 80)}), rows.qkv[0, :80].view(80, -1, 64)[:, -2:]
    assert got.isfinite().all() and got.abs().max() < 1.01 * values.abs().max()


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [
        (SHAPES["64"], torch.int8, 64),
        (SHAPES["128, one kv head"], torch.int8, 64),
        (SHAPES["64"], torch.float8_e4m3fn, 1),
        (SHAPES["64"], torch.bfloat16, 1),
        (replace(SHAPES["64"], head_dim=192), torch.int8, 1),  # a matrix would span a head's halves
        (replace(SHAPES["64"], windows=(0, 20)), torch.int8, 1),  # a window would cut blocks
    ],
)
def test_which_pages_are_mixed_and_multiplied_as_integers(shape: AttentionShape, dtype: torch.dtype, size: int) -> None:
    assert page_hadamard(shape, dtype) == size
    assert (page_items(shape, dtype) == Items.INTEGERS) == (size > 1)


@pytest.mark.parametrize("num_keys", [1, 500, 1500, 8192, 100_000])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 64), (8, 128)])
def test_a_run_s_scratch_is_bounded(num_keys: int, group: int, head_dim: int) -> None:
    row = score_row(num_keys)
    tokens = most_run_tokens(row, group, head_dim)
    assert all(BLOCK % run_sizes(num_keys, count, group, head_dim).most_tokens == 0 for count in (1, 3, 5, 16, 500))
    assert tokens in (1, 2, 4, 8, 16) and row % BLOCK != 0 and row > num_keys
    assert tokens == 1 or run_bytes(tokens, row, group, head_dim) <= MOST_SCRATCH + 16 * 4 * (row + head_dim)
    assert tokens == MOST_RUN_TOKENS or run_bytes(2 * tokens, row, group, head_dim) > MOST_SCRATCH


@pytest.mark.parametrize(("tokens", "group"), [(1, 3), (16, 3), (2, 9)])
def test_a_run_s_scratch_holds_whole_registers(tokens: int, group: int) -> None:
    """AMX reads 16 rows of weights, also behind the last one."""
    registers = -(-tokens * group // 16)
    row = score_row(500)
    assert run_bytes(tokens, row, group, 64) - fixed_bytes(row, 64) >= 16 * registers * 4 * row


def digests() -> str:
    found = [paged(name, dtype).step({0: (0, 150)}) for name in SHAPES for dtype in (torch.float32, torch.bfloat16)]
    return " ".join(hashlib.sha256(part.float().numpy().tobytes()).hexdigest()[:16] for part in found)


@pytest.mark.parametrize("processor", ["haswell", pytest.param("skylake-avx512", marks=pytest.mark.long)])
def test_older_processors_compute_the_same_bits(processor: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """This one may have VNNI or AMX."""
    there = run_python(
        processor, tmp_path, "-c", "from tests.unit.shared.kernel.test_attend_bytes import digests; print(digests())"
    )
    assert there.stdout.strip() == digests(), there.stderr
