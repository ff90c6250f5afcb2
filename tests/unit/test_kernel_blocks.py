"""Norm, gate, linear and rope kernels against plain torch; the team against a task that counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shared.kernel.blocks import BlockKernels, TorchBlocks
from shared.kernel.blocks_numba import NumbaBlocks
from shared.kernel.jit import compile_task, exp32, floats_at, next_ticket, store
from shared.kernel.linear import PackedFactory, PackedLinear, PlainLinear, pick_linear
from shared.kernel.rope import inverse_frequencies
from shared.kernel.team import Team

HIDDEN, INNER, EPS = 72, 40, 1e-5


def both(dtype: torch.dtype, threads: int = 1) -> tuple[BlockKernels, BlockKernels]:
    return NumbaBlocks(HIDDEN, INNER, EPS, dtype, Team(threads)), TorchBlocks(EPS, dtype)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_add_norm(rows: int, dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(rows)
    residual, delta = torch.randn(rows, HIDDEN) * 3, torch.randn(rows, HIDDEN).to(dtype)
    weight = torch.randn(HIDDEN)
    ours, plain = both(dtype, threads)
    for change in (None, delta):
        changed, expected = residual.clone(), residual.clone()
        got = ours.add_norm(changed, change, weight)
        want = plain.add_norm(expected, change, weight)
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-2 if dtype.itemsize == 2 else 1e-5)
        assert got.dtype == dtype and torch.equal(changed, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(5, 2 * INNER) * 10).to(dtype)
    gate_up[0, :4] = torch.tensor([-300.0, 300.0, -88.5, 0.0])
    ours, plain = both(dtype)
    got = ours.gate(gate_up)
    assert got.dtype == dtype
    torch.testing.assert_close(got, plain.gate(gate_up), atol=1e-6, rtol=1e-2 if dtype.itemsize == 2 else 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_torchs(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(1)
    weight, shift = torch.randn(48, 80).to(dtype), torch.randn(48).to(dtype) if bias else None
    for make in (pick_linear(torch.device("cpu"), dtype), PlainLinear):
        linear = make(weight, shift)
        assert (linear.in_features, linear.out_features) == (80, 48)
        for rows in (1, 2, 7):
            x = torch.randn(rows, 80).to(dtype)
            want = torch.nn.functional.linear(x.double(), weight.double(), None if shift is None else shift.double())
            tolerance = 0.1 if dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(linear(x).double(), want, atol=tolerance, rtol=0.02)


def test_one_row_has_the_bits_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the library's single-row kernel adds in another order, the row is doubled."""
    make = pick_linear(torch.device("cpu"), torch.float32)
    if not isinstance(make, PackedFactory):
        pytest.skip("torch has no packed products here")
    seen: list[int] = []
    real = PackedLinear.product

    def fickle(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return real(self, x) + (1e-6 if len(x) == 1 else 0.0)

    monkeypatch.setattr(PackedLinear, "product", fickle)
    linear = make(torch.randn(32, 32), None)
    x = torch.randn(3, 32)
    whole = linear(x)
    seen.clear()
    assert torch.equal(linear(x[:1]), whole[:1]) and seen == [2]


def test_llama3_rope_stretches_slow_waves_only() -> None:
    plain = inverse_frequencies(64, 500000.0)
    stretched = inverse_frequencies(64, 500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    assert torch.equal(stretched[:8], plain[:8])
    torch.testing.assert_close(stretched[-1], plain[-1] / 8)
    torch.testing.assert_close(inverse_frequencies(64, 1e4, "linear", 4.0), inverse_frequencies(64, 1e4) / 4)


def test_exp32_and_bfloat16_rounding() -> None:
    def task(words: Any) -> None:
        for i in range(words[1]):
            floats_at(words[3])[i] = exp32(floats_at(words[2])[i])
            store(words[4], i, floats_at(words[2])[i], True)

    x = torch.cat((torch.linspace(-87, 80, 5000), torch.tensor([0.0, -1e4, 1e-8, float("nan")])))
    exps, halves = torch.empty_like(x), torch.empty(len(x), dtype=torch.bfloat16)
    compiled = compile_task(task)
    words = np.array([0, len(x), x.data_ptr(), exps.data_ptr(), halves.data_ptr()], np.int64)
    Team(1).run(compiled.address, words.ctypes.data)
    torch.testing.assert_close(exps[:-1], x[:-1].double().clamp(min=-87).exp().float(), rtol=5e-7, atol=0)
    assert torch.equal(halves[:-1], x[:-1].to(torch.bfloat16)) and halves[-1].isnan()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_thread_of_a_team_runs_the_task_once(size: int) -> None:
    def task(words: Any) -> None:
        words[1 + next_ticket(words)] += 1

    compiled = compile_task(task)
    team = Team(size)
    words = np.zeros(1 + size, np.int64)
    for runs in range(1, 4):
        words[0] = 0
        team.run(compiled.address, words.ctypes.data)
        assert words[0] == team.size and words[1 : 1 + team.size].tolist() == [runs] * team.size
