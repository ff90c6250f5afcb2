"""Run the draft head's layer on a CPU as one program of compiled tasks, in one call without the GIL.

Results equal SeparateMidlayer's on the same kernels, bit for bit. All tasks work on N slots:

    embed, norm -> left half of x | norm -> right half of x | qkv, write pages, attend, out
    norm, gate and up, silu *, down, add
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shared.kernel import attention_numba as attention
from shared.kernel import attention_words, product
from shared.kernel import blocks_numba as blocks
from shared.kernel.attention import AttentionInputs
from shared.kernel.block_product import BlockTileLinear
from shared.kernel.bounds import check_range
from shared.kernel.jit import NUM_ROWS, NUM_SHARES
from shared.kernel.program import Program
from shared.kernel.scratch import Scratch
from shared.kernel.shares import cut
from shared.kernel.team import Team
from shared.model.config import LlamaConfig
from shared.model.eagle_head import EagleWeights
from shared.model.kernels import attention_shape
from shared.model.llama_compiled import NO_POOL, NUM_WORDS, SCRATCH_WORDS, TaskLinear, as_task

EMBED, EMBED_NORM, FEATURE_NORM, QKV, WRITE, ATTEND, OUT, MLP_NORM, GATE_UP, GATE, DOWN, ADD = range(12)
ATTENTION = np.array((WRITE, ATTEND))


def fits(config: LlamaConfig, weights: EagleWeights) -> bool:
    """Return whether our kernels can run the layer without padding its products."""
    linears = (weights.qkv, weights.out, weights.gate_up, weights.down)
    return attention.supports(attention_shape(config)) and all(
        isinstance(linear, TaskLinear) and linear.is_whole for linear in linears
    )


class CompiledMidlayer:
    """A Midlayer. It runs one call at a time, because calls share buffers."""

    def __init__(self, config: LlamaConfig, weights: EagleWeights, team: Team) -> None:
        self._config, self._weights, self._team = config, weights, team
        self._step = attention.AttentionStep(attention_shape(config), weights.rope, team.size)
        self._scratch = Scratch(team.size)
        tasks = self._make_tasks()
        self._words = np.zeros((len(tasks), NUM_WORDS), np.int64)
        self._program = Program(team, tasks, self._words)
        self._fill_weights()
        self._capacity = 0
        self._rows_filled, self._pool_filled = -1, NO_POOL

    def add_to(
        self, residual: torch.Tensor, next_ids: torch.Tensor, view: AttentionInputs, plane: torch.Tensor
    ) -> None:
        self._run(residual, next_ids, view, plane, ADD + 1)

    def write(self, features: torch.Tensor, next_ids: torch.Tensor, view: AttentionInputs, plane: torch.Tensor) -> None:
        self._run(features, next_ids, view, plane, WRITE + 1)

    def _run(
        self, residual: torch.Tensor, next_ids: torch.Tensor, view: AttentionInputs, plane: torch.Tensor, stop: int
    ) -> None:
        check_range("next ids", next_ids, self._config.vocab_size)
        ids, words = next_ids.contiguous(), self._words
        self._step.begin(view, plane)
        num_rows = ids.shape[0]
        self._reserve(num_rows)
        if self._rows_filled != num_rows:
            self._rows_filled = num_rows
            words[:, NUM_ROWS] = num_rows
            for task, linear in self._products:
                words[task, product.DEALT] = num_rows, *cut(linear.work, num_rows, self._team.size)
        words[ATTEND, NUM_SHARES] = self._step.num_shares
        words[EMBED, blocks.SOURCE] = ids.data_ptr()
        words[[FEATURE_NORM, MLP_NORM, ADD], blocks.SOURCE] = residual.data_ptr()
        if self._pool_filled != self._step.pool:
            self._pool_filled = self._step.pool
            self._step.fill(words, ATTENTION, np.zeros(2, np.int64))
        self._program.run(stop)

    def _make_tasks(self) -> list[Any]:
        config, is_half = self._config, self._weights.embed.dtype == torch.bfloat16
        hidden, eps = config.hidden_size, config.rms_eps
        half_of_x = blocks.make_norm(hidden, eps, is_half, 2 * hidden)
        qkv, out, gate_up, down = (linear.task for linear in self._linears())
        write, attend = attention.make_tasks(attention_shape(config), self._weights.embed.dtype)
        front = [blocks.make_embed(hidden, is_half), half_of_x, half_of_x, qkv, write, attend, out]
        inner = [blocks.make_norm(hidden, eps, is_half), gate_up, blocks.make_gate(config.intermediate_size, is_half)]
        return [*front, *inner, down, blocks.make_add(hidden, is_half)]

    def _linears(self) -> list[TaskLinear]:
        weights = self._weights
        return [as_task(linear) for linear in (weights.qkv, weights.out, weights.gate_up, weights.down)]

    def _fill_weights(self) -> None:
        words, weights = self._words, self._weights
        words[EMBED, blocks.WEIGHT] = weights.embed.data_ptr()
        norms = (weights.embed_norm, weights.feature_norm, weights.mlp_norm)
        words[[EMBED_NORM, FEATURE_NORM, MLP_NORM], blocks.WEIGHT] = [norm.data_ptr() for norm in norms]
        self._products = list(zip((QKV, OUT, GATE_UP, DOWN), self._linears(), strict=True))
        for task, linear in self._products:
            linear.fill(words[task])

    def _reserve(self, num_rows: int) -> None:
        if num_rows <= self._capacity:
            return
        self._capacity = num_rows
        config, dtype = self._config, self._weights.embed.dtype
        hidden, inner = config.hidden_size, config.intermediate_size
        self._embedded = torch.empty(num_rows, hidden)
        self._x = torch.empty(num_rows, 2 * hidden, dtype=dtype)
        self._qkv = torch.empty(num_rows, config.q_size + 2 * config.kv_size, dtype=dtype)
        self._attended = torch.empty(num_rows, config.q_size, dtype=dtype)
        self._normed = torch.empty(num_rows, hidden, dtype=dtype)
        self._change = torch.empty(num_rows, hidden, dtype=dtype)
        self._gate_up = torch.empty(num_rows, 2 * inner, dtype=dtype)
        self._inner = torch.empty(num_rows, inner, dtype=dtype)
        self._scratch.reserve(max(linear.scratch_bytes(num_rows) for _, linear in self._products))
        self._connect()

    def _connect(self) -> None:
        words, x = self._words, self._x.data_ptr()
        words[EMBED, blocks.OUT] = words[EMBED_NORM, blocks.SOURCE] = self._embedded.data_ptr()
        words[EMBED_NORM, blocks.OUT] = words[QKV, product.X] = x
        words[FEATURE_NORM, blocks.OUT] = x + self._config.hidden_size * self._x.itemsize
        words[QKV, product.OUT] = words[ATTENTION, attention_words.QKV] = self._qkv.data_ptr()
        words[ATTENTION, attention_words.OUT] = words[OUT, product.X] = self._attended.data_ptr()
        change = self._change.data_ptr()
        words[[OUT, DOWN], product.OUT] = words[[MLP_NORM, ADD], blocks.DELTA] = change
        words[MLP_NORM, blocks.OUT] = words[GATE_UP, product.X] = self._normed.data_ptr()
        words[GATE_UP, product.OUT] = words[GATE, blocks.SOURCE] = self._gate_up.data_ptr()
        words[GATE, blocks.OUT] = words[DOWN, product.X] = self._inner.data_ptr()
        for task, linear in self._products:
            if isinstance(linear, BlockTileLinear):
                words[task, SCRATCH_WORDS] = self._scratch.words
