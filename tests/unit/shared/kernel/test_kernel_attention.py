"""The numba attention kernel: against plain arithmetic, and the same bits however a row is cut up."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared.kernel.attention import attention
from shared.kernel.attention.attend_numba import MOST_SCRATCH, most_run_tokens, run_bytes, score_row
from shared.kernel.attention.attention import AttentionInputs, AttentionShape, TorchAttention
from shared.kernel.code.step_layout import HostLengths, Layout
from tests.support.kernels.paged_attention import CPU, MAX_LEN, SHAPE, SHAPES, Paged, numba_backend, tables
from tests.support.virtual_gpu.device import make_device

HALVES = [(name, "bfloat16") for name in ("gqa", "one kv head, odd group", "sliding window")]
EXACT = [*((name, "float32") for name in SHAPES), *HALVES]
FEW = [("gqa", "float32"), ("sliding window", "float32"), ("gqa", "bfloat16")]


def by_hand(shape: AttentionShape, qkv: torch.Tensor) -> torch.Tensor:
    """(n, heads * D) of one row: the textbook, in float64, with complex numbers for the rotation."""
    heads = qkv.double().view(len(qkv), -1, shape.head_dim)
    q, k, v = heads.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
    angles = torch.outer(
        torch.arange(len(qkv)).double(),
        10000.0 ** -(torch.arange(0, shape.head_dim, 2).double() / shape.head_dim),
    )
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        turned = torch.complex(*x.chunk(2, dim=-1)) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    group = shape.num_heads // shape.num_kv_heads
    q, k, v = rotate(q), rotate(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (shape.scale or 1 / math.sqrt(shape.head_dim))
    age = torch.arange(len(qkv))[:, None] - torch.arange(len(qkv))
    hidden = (age < 0) | (age >= (max(shape.windows, default=0) or len(qkv)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v).flatten(1).float()


@pytest.mark.parametrize("make", [numba_backend, lambda shape: TorchAttention(shape, tables(shape))])
@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_textbook(name: str, make) -> None:
    shape = SHAPES[name]
    paged = Paged(make(shape), shape)
    got = torch.cat([paged.step({1: (0, 50)}), paged.step({1: (50, 51)}), paged.step({1: (51, 90)})])
    torch.testing.assert_close(got, by_hand(shape, paged.qkv[1, :90]), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_for_any_cut_batch_page_size_and_team(dtype: torch.dtype) -> None:
    whole = Paged(numba_backend(SHAPE, dtype), SHAPE, dtype=dtype).step({0: (0, 100)})
    for page_size, threads in ((16, 1), (1, 1), (64, 1), (16, 2), (4, 3)):
        paged = Paged(numba_backend(SHAPE, dtype, threads), SHAPE, page_size, dtype=dtype)
        parts = [paged.step({0: (0, 37), 1: (0, 5)})[:37]]
        parts += [paged.step({1: (at - 32, at - 31), 0: (at, at + 1)})[1:] for at in range(37, 60)]
        parts.append(paged.step({0: (60, 100), 1: (28, 30)})[:40])
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(("name", "kind"), EXACT)
def test_a_run_of_tokens_has_the_bits_of_each_alone(name: str, kind: str) -> None:
    shape, dtype = SHAPES[name], getattr(torch, kind)
    whole = Paged(numba_backend(shape, dtype), shape, dtype=dtype).step({0: (0, 120)})
    paged = Paged(numba_backend(shape, dtype), shape, dtype=dtype)
    assert torch.equal(torch.cat([paged.step({0: (at, at + 1)}) for at in range(120)]), whole)


@pytest.mark.parametrize(
    "name",
    ["gqa", "mha", "one kv head, odd group", "4 lanes", "sliding window", "8 lanes, with room for a vector of pairs"],
)
def test_bfloat16_is_near_the_textbook(name: str) -> None:
    shape = SHAPES.get(name) or AttentionShape(4, 2, 40, 1e-5)
    paged = Paged(numba_backend(shape, torch.bfloat16), shape, dtype=torch.bfloat16)
    got = torch.cat([paged.step({1: (0, 50)}), paged.step({1: (50, 51)}), paged.step({1: (51, 90)})])
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), by_hand(shape, paged.qkv[1, :90]), atol=0.03, rtol=0.03)


@pytest.mark.parametrize(("name", "kind"), FEW)
def test_what_a_later_token_holds_does_not_reach_an_earlier_one(name: str, kind: str) -> None:
    """Nor what lies before its window: 0 times infinity is no number, so no weight of 0 may hide it."""
    shape, dtype = SHAPES[name], getattr(torch, kind)
    whole = Paged(numba_backend(shape, dtype), shape, dtype=dtype).step({0: (0, 100)})
    for lost in (36, 37, 48, 63):
        paged = Paged(numba_backend(shape, dtype), shape, dtype=dtype)
        paged.qkv[0, lost] = float("inf")
        got = paged.step({0: (0, 100)})
        window = shape.windows[1] if shape.windows else 100
        assert torch.equal(got[:lost], whole[:lost]) and torch.equal(got[lost + window :], whole[lost + window :])
        assert not got[lost].isfinite().any()


def test_tokens_of_two_rows_are_no_run() -> None:
    """Not even where the slots of one follow those of the other."""
    spans = {0: (3, 7), 1: (7, 9)}
    paged = Paged(numba_backend(SHAPE), SHAPE)
    for row, (start, _) in spans.items():
        paged.step({row: (0, start)})
    alone = torch.cat([paged.step({row: span}) for row, span in spans.items()])
    assert torch.equal(paged.step(spans), alone)


@pytest.mark.parametrize("num_keys", [1, 500, 1500, 8192, 100_000])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 20), (3, 64), (8, 128)])
def test_the_scratch_of_a_run_is_bounded(num_keys: int, group: int, head_dim: int) -> None:
    row = score_row(num_keys, head_dim)
    tokens = most_run_tokens(row, group, head_dim)
    assert tokens in (1, 2, 4, 8, 16) and row >= num_keys + 4
    assert tokens == 1 or run_bytes(tokens, row, group, head_dim) <= MOST_SCRATCH
    assert tokens == 16 or run_bytes(2 * tokens, row, group, head_dim) > MOST_SCRATCH


@pytest.mark.parametrize("page_size", [1, 16])
def test_writes_what_the_reference_writes(page_size: int) -> None:
    """Pages travel between nodes, so both backends must fill them alike; nothing else may be touched."""
    reference = Paged(TorchAttention(SHAPE, tables(SHAPE)), SHAPE, page_size)
    paged = Paged(numba_backend(SHAPE), SHAPE, page_size)
    for spans in ({0: (0, 20)}, {1: (0, 3), 0: (20, 21)}):
        want, got = reference.step(spans, norms=True), paged.step(spans, norms=True)
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(paged.kv, reference.kv, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_a_huge_score_is_no_overflow() -> None:
    paged = Paged(numba_backend(SHAPE), SHAPE)
    paged.qkv *= 50.0
    got = paged.step({0: (0, 30)})
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, by_hand(SHAPE, paged.qkv[0, :30]), atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("wrong", ["position", "max_seq_len", "table", "page", "negative page"])
def test_a_wrong_plan_fails_before_anything_is_written(wrong: str) -> None:
    paged = Paged(numba_backend(SHAPE), SHAPE)
    positions, table, max_seq_len = torch.arange(20), paged.table[:1], 20
    match wrong:
        case "position":
            positions, max_seq_len = positions + MAX_LEN - 10, 2 * MAX_LEN
        case "max_seq_len":
            max_seq_len = 19
        case "table":
            table = table[:, :1]
        case "page" | "negative page":
            table = table.clone()
            table[0, 1] = len(paged.kv) if wrong == "page" else -1
    layout = Layout(torch.tensor([0, 20], dtype=torch.int32), (table,), 20, max_seq_len)
    with pytest.raises(IndexError, match="pages" if "page" in wrong else "positions"):
        paged.backend.begin(AttentionInputs(positions, layout), paged.kv)


RAGGED = {"cpu": 5, "virtual GPU": 5}


def host_lengths(spans: dict[int, tuple[int, int]], num_running: int, exact: bool) -> HostLengths:
    starts = np.asarray([start for start, _ in spans.values()], np.int64)
    bounds = np.cumsum([0, *(stop - start for start, stop in spans.values())], dtype=np.int32)
    return HostLengths(bounds, starts if exact else None, num_running)


@pytest.mark.parametrize("device", ["cpu", "virtual GPU"])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", ["gqa", "sliding window"])
@pytest.mark.parametrize(
    ("spans", "num_running", "num_alone"),
    [
        ({0: (10, 40), 1: (3, 9), 2: (50, 52), 3: (47, 49)}, 2, {"cpu": 4, "virtual GPU": 2}),  # with a chunk
        ({0: (10, 12), 1: (3, 5), 2: (50, 52)}, 3, {}),
        ({0: (10, 40), 1: (3, 9)}, 0, {"cpu": 2, "virtual GPU": 2}),
        ({0: (1, 2), 1: (3, 4), 2: (2, 3), 3: (4, 5), 4: (119, 120)}, 5, RAGGED),  # hardly a key but the last row's
    ],
)
def test_rows_alone_and_padded_equal_rows_computed_separately(
    name: str,
    spans: dict[int, tuple[int, int]],
    num_running: int,
    num_alone: dict[str, int],
    exact: bool,
    device: str,
) -> None:
    """Chunks run each for itself, and the decode tail as one batch, but on a CPU. Where the host knows the lengths,
    rows of very different ones run alone too. Bounds of rows are the host's: no device is asked."""
    shape, where = SHAPES[name], CPU if device == "cpu" else make_device().device
    paged = Paged(TorchAttention(shape, tables(shape, where)), shape, num_rows=5, device=where)
    for row, (start, _) in spans.items():
        paged.step({row: (0, start)})
    before = paged.kv.clone()
    wanted = torch.cat([paged.step({row: span}) for row, span in spans.items()])
    paged.kv = before
    paged.host = host_lengths(spans, num_running, exact)
    got = paged.step(spans)
    torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1e-5)
    is_known = exact or num_alone is not RAGGED
    assert paged.backend._num_alone == (num_alone.get(device, 0) if is_known else 0)


class Gathering(TorchAttention):
    """Notes how many pages of how many rows it gathers at a time."""

    def begin(self, *args: Any) -> None:
        super().begin(*args)
        self.tables: list[tuple[int, ...]] = []

    def _gather(self, layer: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.tables.append(tuple(table.shape))
        return super()._gather(layer, table)


@pytest.mark.parametrize("exact", [True, False])
def test_a_row_alone_gathers_its_own_pages_only(exact: bool) -> None:
    """The step's longest row has nothing to do with it, where the host knows the lengths."""
    spans = {0: (90, 120), 1: (3, 9), 2: (16, 32), 3: (32, 33)}
    paged = Paged(Gathering(SHAPE, tables(SHAPE)), SHAPE, num_rows=4)
    for row, (start, _) in spans.items():
        paged.step({row: (0, start)})
    paged.host = host_lengths(spans, 1, exact)
    paged.step(spans)
    assert paged.backend.tables == [(1, width) for width in ((8, 1, 2, 3) if exact else (8, 8, 8, 8))]


class Masked(TorchDispatchMode):
    """Notes how many scores or values are masked at a time."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.masked_fill:
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("name", ["gqa", "sliding window"])
@pytest.mark.parametrize(
    ("spans", "num_running", "most"),
    [
        ({0: (10, 120)}, 0, 6 * 128 * 40),  # a chunk: 40 of its queries at a time
        ({row: (50 + row, 52 + row) for row in range(5)}, 5, 6 * 64 * 32 * 2),  # two rows at a time
    ],
    ids=["chunk", "decode rows"],
)
def test_the_scores_of_a_step_do_not_grow_with_it(
    name: str, spans: dict[int, tuple[int, int]], num_running: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's memory is planned for them: a long prompt's scores would take all of it."""
    shape = SHAPES[name]
    found = []
    for limit in (attention.MOST_NUMBERS, most):
        monkeypatch.setattr(attention, "MOST_NUMBERS", limit)
        paged = Paged(TorchAttention(shape, tables(shape)), shape, num_rows=5)
        for row, (start, _) in spans.items():
            paged.step({row: (0, start)})
        paged.host = host_lengths(spans, num_running, exact=True)
        with Masked() as seen:
            found.append(paged.step(spans))
    torch.testing.assert_close(found[1], found[0], atol=2e-6, rtol=1e-5)
    assert seen.largest <= most
