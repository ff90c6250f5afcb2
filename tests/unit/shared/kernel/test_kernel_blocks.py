"""Norm and gate against plain torch; programs against tasks that count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba.core.caching import FunctionCache

from shared.kernel.attention.rope import inverse_frequencies
from shared.kernel.code.atomics import exchange, look_at
from shared.kernel.code.jit import NUM_ROWS, NUM_SHARES, compile_task, longs_at
from shared.kernel.code.scratch import Scratch
from shared.kernel.product.blocks import BlockKernels, TorchBlocks
from shared.kernel.product.blocks_numba import NumbaBlocks
from shared.kernel.product.linear import PackedFactory, PackedLinear, pick_linear
from shared.kernel.team.program import Program
from shared.kernel.team.team import Team

HIDDEN, INNER, EPS = 72, 40, 1e-5


def both(dtype: torch.dtype, threads: int = 1) -> tuple[BlockKernels, BlockKernels]:
    return NumbaBlocks(HIDDEN, (INNER,), EPS, dtype, Team(threads), is_gelu=False), TorchBlocks(EPS, dtype)


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


def test_rope_frequencies_never_change() -> None:
    """The numerics version of the fingerprint stands for these bits: change both or none."""
    bits = inverse_frequencies(128, 1e6).view(torch.int32)[[1, 37, 63]]
    assert bits.tolist() == [0x3F4E4BAD, 0x39B229FA, 0x35A68E4C]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_program_runs_every_share_once_and_tasks_in_order(size: int) -> None:
    """Task i copies what task i - 1 wrote, from the other end, so a share that starts early reads an old value."""
    length, num_tasks = 64, 20

    def task(words: Any, share: int, worker: int) -> None:
        source, target = longs_at(words[2]), longs_at(words[3])
        for i in range(share, words[NUM_ROWS], words[NUM_SHARES]):
            target[i] = source[words[NUM_ROWS] - 1 - i] + 1

    compiled = compile_task(task)
    values = np.zeros((num_tasks + 1, length), np.int64)
    words = np.zeros((num_tasks, 4), np.int64)
    words[:, NUM_ROWS] = length
    words[:, 2] = values.ctypes.data + values.strides[0] * np.arange(num_tasks)
    words[:, 3] = words[:, 2] + values.strides[0]
    program = Program(Team(size), [compiled] * num_tasks, words)
    for first in (0, 100, 200):
        values[0] = first
        program.run()
        assert (values == first + np.arange(num_tasks + 1)[:, None]).all()
    values[:] = 0
    program.run(stop=3)
    assert (values[3] == 3).all() and (values[4] == 0).all()


@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_each_task_has_as_many_shares_as_its_words_say(size: int) -> None:
    def task(words: Any, share: int, worker: int) -> None:
        longs_at(words[2])[share] += 1

    wanted = (1, 2, 40, 5, 0)
    counts = np.zeros((len(wanted), 50), np.int64)
    words = np.array([[0, 0, row.ctypes.data] for row in counts], np.int64)
    program = Program(Team(size), [compile_task(task)] * len(wanted), words)
    words[:, NUM_SHARES] = wanted
    program.run()
    assert (counts == (np.arange(50) < np.array(wanted)[:, None])).all()


def test_each_thread_has_scratch_of_its_own() -> None:
    """Each share writes its number to its part again and again, and looks whether another one's stands there."""
    scratch, num_shares = Scratch(3), 3000
    scratch.reserve(100)
    clashes = np.zeros(num_shares, np.int64)

    def task(words: Any, share: int, worker: int) -> None:
        place = words[2] + worker * words[3]
        for _ in range(200):
            exchange(place, share)
            longs_at(words[4])[share] += look_at(place) != share

    words = np.array([[0, 0, *scratch.words, clashes.ctypes.data]], np.int64)
    program = Program(Team(3), [compile_task(task)], words)
    words[0, NUM_SHARES] = num_shares
    program.run()
    assert not clashes.any()


def test_where_nothing_can_be_kept_on_disk_kernels_still_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def task(words: Any, share: int, worker: int) -> None:
        words[2] += share + 5

    monkeypatch.setattr(FunctionCache._impl_class, "_locator_classes", [])  # numba: no folder can be written
    words = np.zeros((1, 3), np.int64)
    Program(Team(1), [compile_task(task)], words).run()
    assert words[0, 2] == 5 and "can't be kept on disk" in caplog.text
