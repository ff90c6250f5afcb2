"""Run the draft head on a CPU as one program of compiled tasks, in one call without the GIL.

Results equal SeparateHead's on the same kernels, bit for bit. Tasks, in order (T slots, N wanted slots):

    T   project the target's features (only in `extend` and `write`)
        embed, norm -> left half of x | add what was projected, norm -> right half of x | qkv, write pages, attend
    N   copy the wanted slots
        out, norm, gate and up, silu *, down, norm -> hidden, head -> logits

`write` stops after the pages are written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shared.kernel.attention import attention_numba as attention
from shared.kernel.attention.attention import AttentionInputs
from shared.kernel.attention.attention_step import AttentionStep
from shared.kernel.code import attention_words
from shared.kernel.code.bounds import check_range
from shared.kernel.code.jit import NUM_ROWS, NUM_SHARES
from shared.kernel.code.scratch import Scratch
from shared.kernel.product import blocks_numba as blocks
from shared.kernel.product import product
from shared.kernel.product.block_product import BlockTileLinear
from shared.kernel.team.program import Program
from shared.kernel.team.shares import MOST_ROWS, cut, shares_of
from shared.kernel.team.team import Team
from shared.model.llama.eagle_head import EagleWeights
from shared.model.llama.llama_compiled import NO_POOL, NUM_WORDS, SCRATCH_WORDS, TaskLinear, as_task
from shared.model.math.config import LlamaConfig
from shared.model.math.draft_head import DraftOutput
from shared.model.math.kernels import attention_shape

PROJECT, EMBED, EMBED_NORM, FEATURE_NORM, QKV, WRITE, ATTEND = range(7)
TAKE_FEATURES, TAKE_ATTENDED, OUT, MLP_NORM, GATE_UP, GATE, DOWN, LAST_NORM, HEAD = range(7, 16)
ATTENTION = np.array((WRITE, ATTEND))


def fits(config: LlamaConfig, weights: EagleWeights) -> bool:
    """Return whether our kernels can run the head without padding the products whose results it reads itself."""
    linears = (weights.fc, weights.qkv, weights.out, weights.gate_up, weights.down)
    whole = all(isinstance(linear, TaskLinear) and linear.is_whole for linear in linears)
    return whole and isinstance(weights.head, TaskLinear) and attention.supports(attention_shape(config))


class CompiledHead:
    """A HeadNetwork. It runs one call at a time, because calls share buffers."""

    def __init__(self, config: LlamaConfig, weights: EagleWeights, team: Team) -> None:
        self._config, self._weights, self._team = config, weights, team
        self._head = as_task(weights.head)
        self._step = AttentionStep(attention_shape(config), weights.rope, team.size)
        self._scratch = Scratch(team.size)
        tasks = self._make_tasks()
        self._words = np.zeros((len(tasks), NUM_WORDS), np.int64)
        self._program = Program(team, tasks, self._words)
        self._fill_weights()
        self._capacity = 0
        self._rows_filled, self._pool_filled = (-1, -1), NO_POOL

    def extend(
        self,
        next_ids: torch.Tensor,
        aux: torch.Tensor,
        view: AttentionInputs,
        plane: torch.Tensor,
        wanted: torch.Tensor | None,
    ) -> DraftOutput:
        if wanted is not None:
            check_range("wanted slots", wanted, len(next_ids))
        self._begin(next_ids, view, plane, len(next_ids if wanted is None else wanted))
        return self._run(self._take(aux), wanted, PROJECT)

    def write(self, next_ids: torch.Tensor, aux: torch.Tensor, view: AttentionInputs, plane: torch.Tensor) -> None:
        self._begin(next_ids, view, plane, 0)
        self._take(aux)
        self._program.run(WRITE + 1)

    def forward(
        self, next_ids: torch.Tensor, features: torch.Tensor, view: AttentionInputs, plane: torch.Tensor
    ) -> DraftOutput:
        self._begin(next_ids, view, plane, len(next_ids))
        self._words[FEATURE_NORM, [blocks.SOURCE, blocks.DELTA]] = features.data_ptr(), 0
        return self._run(features, None, EMBED)

    def _take(self, aux: torch.Tensor) -> torch.Tensor:
        """Let the program project `aux`. Return where the features will be."""
        if aux.dtype != self._weights.embed.dtype:
            raise TypeError(f"features are {aux.dtype}; this head is for {self._weights.embed.dtype}")
        features = self._features[: len(aux)].zero_()
        self._words[PROJECT, product.X] = aux.data_ptr()
        self._words[FEATURE_NORM, [blocks.SOURCE, blocks.DELTA]] = features.data_ptr(), self._projected.data_ptr()
        return features

    def _run(self, features: torch.Tensor, wanted: torch.Tensor | None, start: int) -> DraftOutput:
        words, places = self._words, self._all if wanted is None else wanted.contiguous()
        num_wanted = features.shape[0] if wanted is None else wanted.shape[0]
        hidden, logits = torch.empty(num_wanted, self._config.hidden_size), self._head.empty(num_wanted)
        words[TAKE_FEATURES, blocks.SOURCE] = features.data_ptr()
        words[[TAKE_FEATURES, TAKE_ATTENDED], blocks.WEIGHT] = places.data_ptr()
        words[TAKE_FEATURES, blocks.OUT] = hidden.data_ptr()
        words[[MLP_NORM, LAST_NORM], blocks.SOURCE] = hidden.data_ptr()
        words[HEAD, product.OUT] = logits.data_ptr()
        self._program.run(start=start)
        return DraftOutput(hidden, self._head.cut(logits))

    def _begin(self, next_ids: torch.Tensor, view: AttentionInputs, plane: torch.Tensor, num_wanted: int) -> None:
        check_range("next ids", next_ids, self._config.vocab_size)
        self._ids, words, num_slots = next_ids.contiguous(), self._words, next_ids.shape[0]
        self._step.begin(view, plane)
        self._reserve(num_slots)
        if self._rows_filled != (num_slots, num_wanted):
            self._rows_filled = num_slots, num_wanted
            self._fill_rows(num_slots, num_wanted)
        words[ATTEND, NUM_SHARES] = self._step.num_shares
        words[EMBED, blocks.SOURCE] = self._ids.data_ptr()
        if self._pool_filled != self._step.pool:
            self._pool_filled = self._step.pool
            self._step.fill(words, ATTENTION, np.zeros(2, np.int64))

    def _fill_rows(self, num_slots: int, num_wanted: int) -> None:
        words, threads = self._words, self._team.size
        for part, num_rows in ((slice(TAKE_FEATURES), num_slots), (slice(TAKE_FEATURES, None), num_wanted)):
            words[part, NUM_ROWS], words[part, NUM_SHARES] = num_rows, shares_of(num_rows, MOST_ROWS, threads)
        for task, linear in self._products:
            num_rows = num_slots if task < TAKE_FEATURES else num_wanted
            words[task, product.DEALT] = num_rows, *cut(linear.work, num_rows, threads)

    def _make_tasks(self) -> list[Any]:
        config, is_half = self._config, self._weights.embed.dtype == torch.bfloat16
        hidden, eps = config.hidden_size, config.rms_eps
        norm, half_of_x = (blocks.make_norm(hidden, eps, is_half, width) for width in (0, 2 * hidden))
        fc, qkv, out, gate_up, down, head = (linear.task for linear in self._linears())
        write, attend = attention.make_tasks(attention_shape(config), self._weights.embed.dtype)
        take = [blocks.make_take(hidden * 4), blocks.make_take(config.q_size * self._weights.embed.itemsize)]
        gate = blocks.make_gate(config.intermediate_size, is_half)
        front = [fc, blocks.make_embed(hidden, is_half), half_of_x, half_of_x, qkv, write, attend]
        return [*front, *take, out, norm, gate_up, gate, down, norm, head]

    def _linears(self) -> list[TaskLinear]:
        weights = self._weights
        return [
            as_task(linear)
            for linear in (weights.fc, weights.qkv, weights.out, weights.gate_up, weights.down, weights.head)
        ]

    def _fill_weights(self) -> None:
        words, weights = self._words, self._weights
        words[EMBED, blocks.WEIGHT] = weights.embed.data_ptr()
        norms = (weights.embed_norm, weights.feature_norm, weights.mlp_norm, weights.norm)
        words[[EMBED_NORM, FEATURE_NORM, MLP_NORM, LAST_NORM], blocks.WEIGHT] = [norm.data_ptr() for norm in norms]
        self._products = list(zip((PROJECT, QKV, OUT, GATE_UP, DOWN, HEAD), self._linears(), strict=True))
        for task, linear in self._products:
            linear.fill(words[task])

    def _reserve(self, num_rows: int) -> None:
        if num_rows <= self._capacity:
            return
        self._capacity = num_rows
        config, dtype = self._config, self._weights.embed.dtype
        hidden, inner = config.hidden_size, config.intermediate_size
        self._all = torch.arange(num_rows)
        self._projected = torch.empty(num_rows, hidden, dtype=dtype)
        self._features = torch.empty(num_rows, hidden)
        self._embedded = torch.empty(num_rows, hidden)
        self._x = torch.empty(num_rows, 2 * hidden, dtype=dtype)
        self._qkv = torch.empty(num_rows, config.q_size + 2 * config.kv_size, dtype=dtype)
        self._attended = torch.empty(2, num_rows, config.q_size, dtype=dtype)
        self._normed = torch.empty(num_rows, hidden, dtype=dtype)
        self._change = torch.empty(num_rows, hidden, dtype=dtype)
        self._gate_up = torch.empty(num_rows, 2 * inner, dtype=dtype)
        self._inner = torch.empty(num_rows, inner, dtype=dtype)
        self._scratch.reserve(max(linear.scratch_bytes(num_rows) for _, linear in self._products))
        self._connect()

    def _connect(self) -> None:
        words, x = self._words, self._x.data_ptr()
        attended, wanted_attended = (part.data_ptr() for part in self._attended)
        words[PROJECT, product.OUT] = self._projected.data_ptr()
        words[EMBED, blocks.OUT] = words[EMBED_NORM, blocks.SOURCE] = self._embedded.data_ptr()
        words[EMBED_NORM, blocks.OUT] = words[QKV, product.X] = x
        words[FEATURE_NORM, blocks.OUT] = x + self._config.hidden_size * self._x.itemsize
        words[QKV, product.OUT] = words[ATTENTION, attention_words.QKV] = self._qkv.data_ptr()
        words[ATTENTION, attention_words.OUT] = words[TAKE_ATTENDED, blocks.SOURCE] = attended
        words[TAKE_ATTENDED, blocks.OUT] = words[OUT, product.X] = wanted_attended
        words[[OUT, DOWN], product.OUT] = words[[MLP_NORM, LAST_NORM], blocks.DELTA] = self._change.data_ptr()
        words[[MLP_NORM, LAST_NORM], blocks.OUT] = words[[GATE_UP, HEAD], product.X] = self._normed.data_ptr()
        words[GATE_UP, product.OUT] = words[GATE, blocks.SOURCE] = self._gate_up.data_ptr()
        words[GATE, blocks.OUT] = words[DOWN, product.X] = self._inner.data_ptr()
        for task, linear in self._products:
            if isinstance(linear, BlockTileLinear):
                words[task, SCRATCH_WORDS] = self._scratch.words
