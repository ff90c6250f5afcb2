"""Run the Llama family's forward on a CPU as one program of compiled tasks, in one call without the GIL.

Results equal LlamaModel's on the same kernels, bit for bit. Tasks, in order (T tokens, E outputs):

    0              embed -> residual (T)
    1 + 9 l        norm, qkv, write pages, attend, | out, norm, gate and up, silu *, down        of layer l
    Gemma 3        two more tasks in each layer normalize the results of `out` and `down` in place
    last layer     after attention two tasks copy the E wanted rows; later tasks use only these
    end            norm -> hidden (E), head -> logits (E)

A pipeline stage is a program, too. Only the first has task 0, and only the last has "last layer" and "end".
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shared.core.held_result import release
from shared.kernel.attention import attention_numba as attention
from shared.kernel.attention.attention_step import AttentionStep
from shared.kernel.code import attention_words
from shared.kernel.code.bounds import check_range
from shared.kernel.code.jit import NUM_ROWS, NUM_SHARES
from shared.kernel.code.quantized import DTYPES
from shared.kernel.code.scratch import Scratch
from shared.kernel.product import block_product, product
from shared.kernel.product import blocks_numba as blocks
from shared.kernel.product.block_product import BlockTileLinear
from shared.kernel.product.product import TileLinear
from shared.kernel.team.program import Program
from shared.kernel.team.shares import MOST_ROWS, TILE_COLUMNS, ProductWork, cut, shares_of
from shared.kernel.team.team import Team
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.llama.llama import KV_PLANE, SCALE_PLANE, capped, check_layers, embed_scale, kv_planes
from shared.model.math.config import LlamaConfig
from shared.model.math.interface import Carried, LayerMarks, ModelInputs, ModelOutput, ModelSpec
from shared.model.math.kernels import attention_shape, is_gelu
from shared.model.math.span import Span, all_layers
from shared.model.math.weights import LayerWeights, LlamaWeights

NO_POOL = (0, 0, 0)
SCRATCH_WORDS = [block_product.SCRATCH, block_product.SCRATCH_BYTES]
BEFORE, TAKEN = 4, 2  # numbers of tasks: each layer's up to attention, and the copies of wanted rows
BACK = ("out", "mlp_norm", "gate_up", "gate", "down")  # tasks after attention
GEMMA_BACK = ("out", "out_post", "mlp_norm", "gate_up", "gate", "down", "down_post")
NUM_WORDS = max(words.NUM_WORDS for words in (attention_words, blocks, product, block_product))
PADDED = f"a product's columns are no multiple of {TILE_COLUMNS}"
TaskLinear = TileLinear | BlockTileLinear
Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ProgramLayout:
    """The tasks' numbers; in an array, one per layer."""

    norm: Index
    qkv: Index
    write: Index
    attend: Index
    out: Index
    mlp_norm: Index
    gate_up: Index
    gate: Index
    down: Index
    _: KW_ONLY
    out_post: Index | None  # out_post and down_post: only in Gemma 3
    down_post: Index | None
    take_residual: int
    take_attended: int
    last_norm: int
    head: int


def make_layout(span: Span, has_posts: bool = False) -> ProgramLayout:
    """Number the tasks. Layers count from the span's first layer."""
    num_layers, taken = span.end - span.first, TAKEN * span.is_last
    names = GEMMA_BACK if has_posts else BACK
    front = span.is_first + (BEFORE + len(names)) * np.arange(num_layers)
    back = front + BEFORE
    back[-1] += taken
    end = int(back[-1])
    tasks = {name: back + n for n, name in enumerate(names)}
    return ProgramLayout(
        *(front + n for n in range(BEFORE)),
        *(tasks[name] for name in BACK),
        out_post=tasks.get("out_post"),
        down_post=tasks.get("down_post"),
        take_residual=end - taken,
        take_attended=end - taken + 1,
        last_norm=end + len(names),
        head=end + len(names) + 1,
    )


def obstacle(config: LlamaConfig, weights: LlamaWeights) -> str | None:
    """Return why a network can't be one program, or None.

    All products must use our kernels and pad no columns, because one task's output is the next task's input.
    """
    if reason := obstacle_of_kind(config):
        return reason
    linears = [linear for layer in weights.layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    if not all(isinstance(linear, TaskLinear) for linear in (*linears, weights.head)):
        return "not every product has a kernel here"
    if not all(isinstance(linear, TaskLinear) and linear.is_whole for linear in linears):
        return PADDED
    return None


def obstacle_of_kind(config: LlamaConfig) -> str:
    """Return why a network can't be one program with any weights; "" for none."""
    if config.experts is not None:
        return "its experts are chosen while it computes"
    if not attention.supports(attention_shape(config)):
        return f"no kernel for heads of {config.head_dim}"
    columns = (config.q_size + 2 * config.kv_size, config.hidden_size, 2 * config.intermediate_size)
    return PADDED if any(size % TILE_COLUMNS for size in columns) else ""


def as_task(linear: object) -> TaskLinear:
    assert isinstance(linear, TaskLinear)
    return linear


class CompiledLlama:
    """A Model or, with a `span`, a pipeline stage. Forwards run one at a time, because they share buffers."""

    is_program = True

    def __init__(
        self, config: LlamaConfig, spec: ModelSpec, weights: LlamaWeights, team: Team, span: Span | None = None
    ) -> None:
        self.config, self.spec = config, spec
        self._span = span or all_layers(config)
        self._layers = np.arange(self._span.first, self._span.end)
        self._weights = weights
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._team = team
        self._scratch = Scratch(team.size)
        self._step = AttentionStep(attention_shape(config), weights.rope, team.size, weights.local_rope)
        self.embed = weights.embed
        self.capture_aux(())

    def capture_aux(self, layers: tuple[int, ...]) -> None:
        check_layers(layers, self.config.num_layers)
        self._captured = self._span.own(layers)
        self._at = make_layout(self._span, self.config.style.post_norms)
        tasks = self._make_tasks()
        self._words = np.zeros((len(tasks), NUM_WORDS), np.int64)
        self._program = Program(self._team, tasks, self._words)
        self._fill_weights()
        self._capacity = 0
        self._rows_filled, self._pool_filled = (-1, -1), NO_POOL

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        return kv_planes(self.config, self.spec, page_size)

    def forward(self, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        output = self.run(inputs, None, kv)
        assert isinstance(output, ModelOutput)
        return output

    def run(self, inputs: ModelInputs, carried: Carried | None, kv: KVPool) -> Carried | ModelOutput:
        num_tokens, num_outputs = inputs.input_ids.shape[0], inputs.logits_idx.shape[0]
        check_range("input ids", inputs.input_ids, self.config.vocab_size)
        check_range("logits_idx", inputs.logits_idx, num_tokens)
        scales = None if self.spec.kv_dtype == "auto" else kv.plane(SCALE_PLANE)
        self._step.begin(inputs.for_attention(), kv.plane(KV_PLANE), scales)
        self._reserve(max(num_tokens, num_outputs))
        self._fill_step(num_tokens, num_outputs if self._span.is_last else num_tokens)
        ids = inputs.input_ids.contiguous()
        if carried is None:
            self._words[0, blocks.SOURCE] = ids.data_ptr()
        else:
            self._residual[0, :num_tokens] = carried.values
        own = self._fill_aux(num_tokens)
        if not self._span.is_last:
            self._run(None, inputs.layers)
            values = self._residual[0, :num_tokens] + self._change[:num_tokens]
            return Carried(values, _with_own(carried, own))
        output = self._run_to_end(inputs.logits_idx.contiguous(), inputs.layers)
        output.aux = _with_own(carried, own)
        return output

    def _run_to_end(self, wanted: torch.Tensor, layers: LayerMarks | None) -> ModelOutput:
        at, words, head = self._at, self._words, as_task(self._weights.head)
        num_wanted = wanted.shape[0]
        hidden, logits = torch.empty(num_wanted, self.config.hidden_size, dtype=self._dtype), head.empty(num_wanted)
        words[at.take_residual, blocks.WEIGHT] = words[at.take_attended, blocks.WEIGHT] = wanted.data_ptr()
        words[at.last_norm, blocks.OUT] = words[at.head, product.X] = hidden.data_ptr()
        words[at.head, product.OUT] = logits.data_ptr()
        self._run(None if num_wanted else at.take_residual, layers)
        return ModelOutput(logits=capped(head.cut(logits), self.config.style.logit_cap), hidden=hidden)

    def _run(self, stop: int | None, layers: LayerMarks | None) -> None:
        """Release the held result. Run the tasks before `stop`, or all tasks if it is None.

        With `layers`, pause and signal after the KV write of the layer that completes each mark's slots.
        """
        release()
        if layers is None:
            self._program.run(stop)
            return
        start = 0
        for end in layers.ends:
            written = int(self._at.write[self.config.groups.last_layer(end)]) + 1
            self._program.run(written, start)
            layers.reached(end)
            start = written
        self._program.run(stop, start)

    def _fill_aux(self, num_tokens: int) -> torch.Tensor | None:
        if not self._captured:
            return None
        row = self.config.hidden_size
        aux = torch.empty(num_tokens, len(self._captured) * row, dtype=self._dtype)
        tasks, starts = self._at.norm[list(self._captured)], np.arange(len(self._captured)) * row * aux.itemsize
        self._words[tasks, blocks.KEPT] = aux.data_ptr() + starts
        return aux

    def _fill_step(self, num_tokens: int, num_last: int) -> None:
        at, words = self._at, self._words
        if self._rows_filled != (num_tokens, num_last):
            self._rows_filled = num_tokens, num_last
            self._fill_rows(num_tokens, num_last)
        words[at.attend, NUM_SHARES] = self._step.num_shares
        if self._pool_filled != self._step.pool:
            self._pool_filled = self._step.pool
            for tasks in (at.write, at.attend):
                self._step.fill(words, tasks, self._layers)

    def _fill_rows(self, num_tokens: int, num_last: int) -> None:
        words, split, threads = self._words, self._at.take_residual, self._team.size
        for part, num_rows in ((slice(split), num_tokens), (slice(split, None), num_last)):
            words[part, NUM_ROWS], words[part, NUM_SHARES] = num_rows, shares_of(num_rows, MOST_ROWS, threads)
        for (work, is_last), tasks in self._same_work.items():
            num_rows = num_last if is_last else num_tokens
            words[np.ix_(tasks, product.DEALT)] = num_rows, *cut(work, num_rows, threads)

    def _make_tasks(self) -> list[Any]:
        config, is_half = self.config, self._dtype == torch.bfloat16
        norm = keeping = blocks.make_norm(config.hidden_size, config.rms_eps, is_half)
        if self._captured:
            kept_width = len(self._captured) * config.hidden_size
            keeping = blocks.make_norm(config.hidden_size, config.rms_eps, is_half, kept_width=kept_width)
        gate = blocks.make_gate(config.intermediate_size, is_half, is_gelu(config))
        post = [blocks.make_rows_norm(config.hidden_size, config.rms_eps, is_half)] * config.style.post_norms
        attend = attention.make_tasks(attention_shape(config), self._dtype, DTYPES.get(self.spec.kv_dtype))
        layers = [self._weights.layers[layer] for layer in self._layers]
        fronts = [
            [keeping if index in self._captured else norm, as_task(layer.qkv).task, *attend]
            for index, layer in enumerate(layers)
        ]
        backs = [
            [as_task(layer.out).task, *post, norm, as_task(layer.gate_up).task, gate, as_task(layer.down).task, *post]
            for layer in layers
        ]
        take = [blocks.make_take(config.hidden_size * 4), blocks.make_take(config.q_size * self._dtype.itemsize)]
        inner = [task for front, back in zip(fronts[:-1], backs[:-1], strict=True) for task in front + back]
        end = [norm, as_task(self._weights.head).task]
        embed = blocks.make_embed(config.hidden_size, is_half, embed_scale(config, self._dtype))
        last = [*fronts[-1], *take, *backs[-1], *end] if self._span.is_last else [*fronts[-1], *backs[-1]]
        return [*[embed] * self._span.is_first, *inner, *last]

    def _fill_weights(self) -> None:
        at, words, weights = self._at, self._words, self._weights
        if self._span.is_first:
            words[0, blocks.WEIGHT] = weights.embed.data_ptr()
        for index, layer in enumerate(self._layers):
            self._fill_layer(index, weights.layers[layer])
        self._same_work: dict[
            tuple[ProductWork, bool], list[int]
        ] = {}  # tasks of products with equal work and numbers of rows
        for task, linear in self._products():
            linear.fill(words[task])
            self._same_work.setdefault((linear.work, task >= at.take_residual), []).append(task)
        if not self._span.is_last:
            return
        words[at.last_norm, blocks.WEIGHT] = weights.norm.data_ptr()

    def _products(self) -> list[tuple[int, TaskLinear]]:
        at = self._at
        found = [
            (int(tasks[index]), as_task(linear))
            for index, layer in enumerate(self._weights.layers[layer] for layer in self._layers)
            for tasks, linear in (
                (at.qkv, layer.qkv), (at.out, layer.out), (at.gate_up, layer.gate_up), (at.down, layer.down)
            )
        ]  # fmt: skip
        return [*found, (at.head, as_task(self._weights.head))] if self._span.is_last else found

    def _fill_layer(self, index: int, layer: LayerWeights) -> None:
        at, words = self._at, self._words
        words[at.norm[index], blocks.WEIGHT] = layer.attn_norm.data_ptr()
        words[at.mlp_norm[index], blocks.WEIGHT] = layer.mlp_norm.data_ptr()
        for tasks, weight in ((at.out_post, layer.attn_post_norm), (at.down_post, layer.mlp_post_norm)):
            if tasks is not None and weight is not None:
                words[tasks[index], blocks.WEIGHT] = weight.data_ptr()
        for task in (at.write[index], at.attend[index]):
            words[task, attention_words.Q_NORM] = 0 if layer.q_norm is None else layer.q_norm.data_ptr()
            words[task, attention_words.K_NORM] = 0 if layer.k_norm is None else layer.k_norm.data_ptr()

    def _reserve(self, num_rows: int) -> None:
        """Grow the buffers, which layers use in turn, and set the buffers' addresses in all tasks."""
        if num_rows <= self._capacity:
            return
        self._capacity = num_rows
        config, dtype = self.config, self._dtype
        hidden, inner = config.hidden_size, config.intermediate_size
        # index 0 is for all tokens, 1 for the wanted tokens
        self._residual = torch.empty(2, num_rows, hidden)
        self._attended = torch.empty(2, num_rows, config.q_size, dtype=dtype)
        self._normed = torch.empty(num_rows, hidden, dtype=dtype)
        self._change = torch.empty(num_rows, hidden, dtype=dtype)
        self._qkv = torch.empty(num_rows, config.q_size + 2 * config.kv_size, dtype=dtype)
        self._gate_up = torch.empty(num_rows, 2 * inner, dtype=dtype)
        self._inner = torch.empty(num_rows, inner, dtype=dtype)
        self._scratch.reserve(max(linear.scratch_bytes(num_rows) for _, linear in self._products()))
        self._connect()

    def _connect(self) -> None:
        at, words = self._at, self._words
        residual, wanted = (part.data_ptr() for part in self._residual)
        attended, wanted_attended = (part.data_ptr() for part in self._attended)
        change, normed = self._change.data_ptr(), self._normed.data_ptr()
        if self._span.is_first:
            words[0, blocks.OUT] = residual
        words[at.norm, blocks.SOURCE], words[at.norm, blocks.OUT] = residual, normed
        words[at.norm[1:], blocks.DELTA] = change
        words[at.qkv, product.X], words[at.qkv, product.OUT] = normed, self._qkv.data_ptr()
        for task in (at.write, at.attend):
            words[task, attention_words.QKV], words[task, attention_words.OUT] = self._qkv.data_ptr(), attended
        words[at.out, product.X], words[at.out, product.OUT] = attended, change
        words[at.mlp_norm, blocks.SOURCE], words[at.mlp_norm, blocks.OUT] = residual, normed
        words[at.mlp_norm, blocks.DELTA] = change
        for tasks in (at.out_post, at.down_post):
            if tasks is not None:
                words[tasks, blocks.SOURCE] = words[tasks, blocks.OUT] = change
        words[at.gate_up, product.X], words[at.gate_up, product.OUT] = normed, self._gate_up.data_ptr()
        words[at.gate, blocks.SOURCE], words[at.gate, blocks.OUT] = self._gate_up.data_ptr(), self._inner.data_ptr()
        for place, linear in self._products():
            if isinstance(linear, BlockTileLinear):
                words[place, SCRATCH_WORDS] = self._scratch.words
        words[at.down, product.X], words[at.down, product.OUT] = self._inner.data_ptr(), change
        if not self._span.is_last:
            return
        words[at.take_residual, [blocks.SOURCE, blocks.OUT]] = residual, wanted
        words[at.take_attended, [blocks.SOURCE, blocks.OUT]] = attended, wanted_attended
        words[at.out[-1], product.X] = wanted_attended
        words[at.mlp_norm[-1], blocks.SOURCE] = wanted
        words[at.last_norm, [blocks.SOURCE, blocks.DELTA]] = wanted, change


def _with_own(carried: Carried | None, own: torch.Tensor | None) -> torch.Tensor | None:
    before = None if carried is None else carried.aux
    return own if before is None else before if own is None else torch.cat((before, own), dim=-1)
