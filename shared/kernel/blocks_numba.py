"""Norm and gate on the CPU, one pass over memory each. Same interface as the torch form; addresses go in, see jit."""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import torch
from numba import prange

from shared.kernel.jit import exp32, floats_at, inlined, kernel, load, store

_f32 = np.float32
Kernel = Callable[..., None]
PARALLEL_MIN_ROWS = 4  # below it waking the other threads takes longer than the work


class NumbaBlocks:
    """BlockKernels for CPU tensors."""

    def __init__(self, hidden_size: int, inner_size: int, eps: float, dtype: torch.dtype, threads: int) -> None:
        self._eps, self._dtype, self._threads = eps, dtype, threads
        self._hidden, self._inner = hidden_size, inner_size
        is_half = dtype == torch.bfloat16
        self._norm, self._gate = (make_norm(hidden_size, is_half, False), make_gate(inner_size, is_half, False))
        self._wide = self._norm, self._gate
        if threads > 1:
            self._wide = (make_norm(hidden_size, is_half, True), make_gate(inner_size, is_half, True))

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty(residual.shape, dtype=self._dtype)
        run = self._pick(0, len(residual))
        run(
            len(residual),
            residual.data_ptr(),
            0 if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            self._eps,
            out.data_ptr(),
        )
        return out

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = torch.empty((len(gate_up), self._inner), dtype=self._dtype)
        self._pick(1, len(gate_up))(len(gate_up), gate_up.data_ptr(), out.data_ptr())
        return out

    def _pick(self, which: int, num_rows: int) -> Kernel:
        if self._threads == 1 or num_rows < PARALLEL_MIN_ROWS:
            return (self._norm, self._gate)[which]
        numba.set_num_threads(min(self._threads, numba.config.NUMBA_NUM_THREADS))
        return self._wide[which]


def make_norm(hidden_size: int, is_half: bool, parallel: bool) -> Kernel:
    def norm(num_rows: int, residual: int, delta: int, weight: int, eps: float, out: int) -> None:
        item = 2 if is_half else 4
        for row in prange(num_rows):
            at = residual + row * hidden_size * 4
            if delta != 0:
                _add(at, delta + row * hidden_size * item, hidden_size, is_half)
            _norm_row(at, weight, eps, out + row * hidden_size * item, hidden_size, is_half)

    return kernel(parallel=parallel)(norm)


def make_gate(inner_size: int, is_half: bool, parallel: bool) -> Kernel:
    def gate(num_rows: int, gate_up: int, out: int) -> None:
        item = 2 if is_half else 4
        for row in prange(num_rows):
            source = gate_up + row * 2 * inner_size * item
            _gate_row(source, source + inner_size * item, out + row * inner_size * item, inner_size, is_half)

    return kernel(parallel=parallel)(gate)


@inlined
def _add(residual: int, delta: int, length: int, is_half: bool) -> None:
    x = floats_at(residual)
    for d in range(length):
        x[d] += load(delta, d, is_half)


@inlined
def _norm_row(source: int, weight: int, eps: float, out: int, length: int, is_half: bool) -> None:
    x, w = floats_at(source), floats_at(weight)
    total = _f32(0.0)
    for d in range(length):
        total += x[d] * x[d]
    scale = _f32(1.0) / np.sqrt(total / _f32(length) + _f32(eps))
    for d in range(length):
        store(out, d, x[d] * scale * w[d], is_half)


@inlined
def _gate_row(gate: int, up: int, out: int, length: int, is_half: bool) -> None:
    """silu(g) = g / (1 + exp(-g)); where exp would overflow the quotient is 0 all the same."""
    for d in range(length):
        g = load(gate, d, is_half)
        store(out, d, g / (_f32(1.0) + exp32(min(-g, _f32(87.0)))) * load(up, d, is_half), is_half)
