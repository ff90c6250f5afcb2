"""Implements BlockKernels on the CPU, and tasks that copy or add rows in a compiled step."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from shared.kernel.code.jit import (
    NUM_ROWS,
    compile_task,
    exp32,
    floats_at,
    halves_at,
    inlined,
    load,
    longs_at,
    rows_of,
    store,
)
from shared.kernel.code.sums import sum_of
from shared.kernel.product.linear import Linear
from shared.kernel.team.program import Program
from shared.kernel.team.team import Team

_f32 = np.float32

# A task's words.
SOURCE, DELTA, WEIGHT, OUT, KEPT = range(2, 7)
NUM_WORDS = 7


class NumbaBlocks:
    def __init__(
        self, hidden_size: int, inner_sizes: tuple[int, ...], eps: float, dtype: torch.dtype, team: Team, is_gelu: bool
    ) -> None:
        """`inner_sizes`: the values of I with which `gate` is called."""
        self._dtype = dtype
        is_half = dtype == torch.bfloat16
        self._norm = Program(team, [make_norm(hidden_size, eps, is_half)], np.zeros((1, NUM_WORDS), np.int64))
        self._rows_norm = Program(team, [make_rows_norm(hidden_size, eps, is_half)], np.zeros((1, NUM_WORDS), np.int64))
        self._gates = {
            inner: Program(team, [make_gate(inner, is_half, is_gelu)], np.zeros((1, NUM_WORDS), np.int64))
            for inner in inner_sizes
        }

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty(residual.shape, dtype=self._dtype)
        self._norm.words[0, DELTA] = 0 if delta is None else delta.data_ptr()
        self._norm.words[0, WEIGHT] = weight.data_ptr()
        self._run_program(self._norm, residual, out)
        return out

    def norm(self, delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty(delta.shape, dtype=self._dtype)
        self._rows_norm.words[0, WEIGHT] = weight.data_ptr()
        self._run_program(self._rows_norm, delta.contiguous(), out)
        return out

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        inner = gate_up.shape[1] // 2
        out = torch.empty((len(gate_up), inner), dtype=self._dtype)
        self._run_program(self._gates[inner], gate_up, out)
        return out

    def gated(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        return self.gate(linear(x))

    def _run_program(self, program: Program, source: torch.Tensor, out: torch.Tensor) -> None:
        words = program.words[0]
        words[NUM_ROWS], words[SOURCE], words[OUT] = len(source), source.data_ptr(), out.data_ptr()
        program.run()


@functools.cache
def make_norm(hidden_size: int, eps: float, is_half: bool, out_width: int = 0, kept_width: int = 0) -> Any:
    """Add DELTA, if any, to the float32 residual SOURCE. OUT = WEIGHT * (RMS norm of SOURCE).

    OUT's rows have room for `out_width` numbers; 0 means `hidden_size`. With `kept_width`, KEPT = the new SOURCE in the
    model's dtype, in rows of `kept_width` numbers.
    """
    item = 2 if is_half else 4
    out_bytes, kept_bytes = (out_width or hidden_size) * item, kept_width * item

    def norm(words: Any, share: int, worker: int) -> None:
        first, end = rows_of(words, share)
        for row in range(first, end):
            at = words[SOURCE] + row * hidden_size * 4
            if words[DELTA] != 0:
                _add(at, words[DELTA] + row * hidden_size * item, hidden_size, is_half)
            if kept_bytes:
                _keep(at, words[KEPT] + row * kept_bytes, hidden_size, is_half)
            _norm_row(at, words[WEIGHT], eps, words[OUT] + row * out_bytes, hidden_size, is_half)

    return compile_task(norm)


@functools.cache
def make_rows_norm(hidden_size: int, eps: float, is_half: bool) -> Any:
    """OUT = WEIGHT * (RMS norm of SOURCE). OUT and SOURCE have the model's dtype, and may be the same rows."""
    row_bytes = hidden_size * (2 if is_half else 4)

    def rows_norm(words: Any, share: int, worker: int) -> None:
        weight = floats_at(words[WEIGHT])
        first, end = rows_of(words, share)
        for row in range(first, end):
            source, out = words[SOURCE] + row * row_bytes, words[OUT] + row * row_bytes
            total = sum_of(source, hidden_size, is_half, True)
            scale = _f32(1.0) / np.sqrt(total / _f32(hidden_size) + _f32(eps))
            for d in range(hidden_size):
                store(out, d, load(source, d, is_half) * scale * weight[d], is_half)

    return compile_task(rows_norm)


@functools.cache
def make_gate(inner_size: int, is_half: bool, is_gelu: bool = False) -> Any:
    """OUT = silu or gelu of SOURCE's first half, times its second half."""
    item = 2 if is_half else 4

    def gate(words: Any, share: int, worker: int) -> None:
        first, end = rows_of(words, share)
        for row in range(first, end):
            source = words[SOURCE] + row * 2 * inner_size * item
            up, out = source + inner_size * item, words[OUT] + row * inner_size * item
            if is_gelu:
                _gelu_row(source, up, out, inner_size, is_half)
            else:
                _gate_row(source, up, out, inner_size, is_half)

    return compile_task(gate)


@functools.cache
def make_embed(hidden_size: int, is_half: bool, scale: float = 1.0) -> Any:
    """OUT (NUM_ROWS, H) float32 = scale * rows of the table (WEIGHT) at int64 ids (SOURCE)."""
    item = 2 if is_half else 4

    def embed(words: Any, share: int, worker: int) -> None:
        first, end = rows_of(words, share)
        for row in range(first, end):
            source = words[WEIGHT] + longs_at(words[SOURCE])[row] * hidden_size * item
            for d in range(hidden_size):
                floats_at(words[OUT] + row * hidden_size * 4)[d] = load(source, d, is_half) * _f32(scale)

    return compile_task(embed)


@functools.cache
def make_take(row_bytes: int) -> Any:
    """OUT (NUM_ROWS, row) = rows of SOURCE at int64 indices (WEIGHT). Rows consist of 2-byte items."""

    def take(words: Any, share: int, worker: int) -> None:
        first, end = rows_of(words, share)
        for row in range(first, end):
            source = words[SOURCE] + longs_at(words[WEIGHT])[row] * row_bytes
            for d in range(row_bytes // 2):
                halves_at(words[OUT] + row * row_bytes)[d] = halves_at(source)[d]

    return compile_task(take)


@inlined
def _add(residual: int, delta: int, length: int, is_half: bool) -> None:
    x = floats_at(residual)
    for d in range(length):
        x[d] += load(delta, d, is_half)


@inlined
def _keep(residual: int, out: int, length: int, is_half: bool) -> None:
    x = floats_at(residual)
    for d in range(length):
        store(out, d, x[d], is_half)


@inlined
def _norm_row(source: int, weight: int, eps: float, out: int, length: int, is_half: bool) -> None:
    x, w = floats_at(source), floats_at(weight)
    total = sum_of(source, length, False, True)
    scale = _f32(1.0) / np.sqrt(total / _f32(length) + _f32(eps))
    for d in range(length):
        store(out, d, x[d] * scale * w[d], is_half)


@inlined
def _gate_row(gate: int, up: int, out: int, length: int, is_half: bool) -> None:
    """Where exp would overflow, silu is 0 anyway."""
    for d in range(length):
        g = load(gate, d, is_half)
        store(out, d, g / (_f32(1.0) + exp32(min(-g, _f32(87.0)))) * load(up, d, is_half), is_half)


@inlined
def _gelu_row(gate: int, up: int, out: int, length: int, is_half: bool) -> None:
    """Use gelu's tanh form, as g / (1 + exp(-2 u))."""
    for d in range(length):
        g = load(gate, d, is_half)
        twice = _f32(1.5957691216) * (g + _f32(0.044715) * g * g * g)
        store(out, d, g / (_f32(1.0) + exp32(min(-twice, _f32(87.0)))) * load(up, d, is_half), is_half)
