"""Norm and gate on the CPU, one pass over memory each. Same interface as the torch form; addresses go in, see jit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shared.kernel.jit import compile_task, exp32, floats_at, inlined, load, next_ticket, store
from shared.kernel.team import Team

_f32 = np.float32

# The words of a task's arguments.
TICKET, NUM_ROWS, NUM_THREADS, SOURCE, DELTA, WEIGHT, OUT = range(7)
NUM_WORDS = 7


class NumbaBlocks:
    """BlockKernels for CPU tensors."""

    def __init__(self, hidden_size: int, inner_size: int, eps: float, dtype: torch.dtype, team: Team) -> None:
        self._dtype, self._inner, self._team = dtype, inner_size, team
        is_half = dtype == torch.bfloat16
        self._norm, self._gate = make_norm(hidden_size, eps, is_half), make_gate(inner_size, is_half)
        self._words = np.zeros(NUM_WORDS, np.int64)
        self._words[NUM_THREADS] = team.size

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty(residual.shape, dtype=self._dtype)
        self._words[DELTA] = 0 if delta is None else delta.data_ptr()
        self._words[WEIGHT] = weight.data_ptr()
        self._run(self._norm, residual, out)
        return out

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = torch.empty((len(gate_up), self._inner), dtype=self._dtype)
        self._run(self._gate, gate_up, out)
        return out

    def _run(self, task: Any, source: torch.Tensor, out: torch.Tensor) -> None:
        words = self._words
        words[TICKET], words[NUM_ROWS] = 0, len(source)
        words[SOURCE], words[OUT] = source.data_ptr(), out.data_ptr()
        self._team.run(task.address, words.ctypes.data)


def make_norm(hidden_size: int, eps: float, is_half: bool) -> Any:
    """residual float32 += delta if there is one; out = its RMS norm times weight."""
    item = 2 if is_half else 4

    def norm(words: Any) -> None:
        for row in range(next_ticket(words), words[NUM_ROWS], words[NUM_THREADS]):
            at = words[SOURCE] + row * hidden_size * 4
            if words[DELTA] != 0:
                _add(at, words[DELTA] + row * hidden_size * item, hidden_size, is_half)
            _norm_row(at, words[WEIGHT], eps, words[OUT] + row * hidden_size * item, hidden_size, is_half)

    return compile_task(norm)


def make_gate(inner_size: int, is_half: bool) -> Any:
    """out = silu(first half) * second half."""
    item = 2 if is_half else 4

    def gate(words: Any) -> None:
        for row in range(next_ticket(words), words[NUM_ROWS], words[NUM_THREADS]):
            source = words[SOURCE] + row * 2 * inner_size * item
            _gate_row(source, source + inner_size * item, words[OUT] + row * inner_size * item, inner_size, is_half)

    return compile_task(gate)


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
