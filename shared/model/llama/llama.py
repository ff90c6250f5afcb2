"""Run the Llama family's forward over paged KV.

residual (T, H) float32
  per layer:  norm -> qkv -> rotate -> write pages, attend -> out -> add
              norm -> gate, up -> silu(gate) * up -> down -> add (or the experts that each token chooses)
rows logits_idx:  norm -> head -> logits float32
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared.core.errors import ConfigError
from shared.kernel.attention.attention import AttentionBackend, PlansGraphs
from shared.kernel.code.quantized import DTYPES
from shared.kernel.code.step_layout import HostLengths
from shared.kernel.product.blocks import BlockKernels
from shared.kernel.product.linear import Columns
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.llama.lora import DOWN, GATE_UP, OUT, QKV, Adapter, AdapterRows
from shared.model.math.config import LlamaConfig
from shared.model.math.interface import Carried, ModelInputs, ModelOutput, ModelSpec
from shared.model.math.span import Span, all_layers
from shared.model.math.weights import LayerWeights, LlamaWeights

KV_PLANE, SCALE_PLANE = "kv", "kv_scale"


def kv_planes(config: LlamaConfig, spec: ModelSpec, page_size: int) -> tuple[PlaneSpec, ...]:
    groups = config.groups
    shape = (groups.num_slots, 2, config.num_kv_heads, page_size, config.head_dim)
    if spec.kv_dtype == "auto":
        return (PlaneSpec(KV_PLANE, shape, getattr(torch, spec.dtype), windows=groups.windows),)
    scales = PlaneSpec(SCALE_PLANE, shape[:-1], torch.float32, slot_dim=-1, windows=groups.windows)
    return PlaneSpec(KV_PLANE, shape, DTYPES[spec.kv_dtype], windows=groups.windows), scales


class LlamaModel:
    """A Model or, with a `span`, a pipeline stage. It runs one forward at a time.

    Kernels own scratch memory, so each stage needs its own kernels.
    """

    def __init__(
        self,
        config: LlamaConfig,
        spec: ModelSpec,
        weights: LlamaWeights,
        attention: AttentionBackend,
        blocks: BlockKernels,
        adapters: Sequence[Adapter] = (),
        all_columns: Columns = lambda own: own,
        span: Span | None = None,
    ) -> None:
        """`all_columns` joins all ranks' columns, if weights, attention and adapters return only this rank's."""
        self.config = config
        self._span = span or all_layers(config)
        self.spec = spec
        self._weights = weights
        self._attention = attention
        self._planner = attention if isinstance(attention, PlansGraphs) else None
        self._blocks = blocks
        self._adapters = adapters  # not a copy: a LoraBank may fill more slots
        self._all_columns = all_columns
        self.embed = weights.embed
        self._captured: tuple[int, ...] = ()
        self._embed_scale = embed_scale(config, weights.embed.dtype)

    @property
    def gathers(self) -> bool:
        """Whether a step gets slower when only the upper bound of its rows' lengths grows."""
        return self._attention.gathers

    def plan_graph(self, fixed: ModelInputs, host: HostLengths | None, page_size: int) -> None:
        """Prepare the next run of a graph: see PlansGraphs."""
        if self._planner is not None:
            self._planner.plan_graph(fixed.for_attention(), host, page_size)

    def capture_aux(self, layers: tuple[int, ...]) -> None:
        check_layers(layers, self.config.num_layers)
        self._captured = layers

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        return kv_planes(self.config, self.spec, page_size)

    def forward(self, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        output = self.run(inputs, None, kv)
        assert isinstance(output, ModelOutput)
        return output

    def run(self, inputs: ModelInputs, carried: Carried | None, kv: KVPool) -> Carried | ModelOutput:
        scales = None if self.spec.kv_dtype == "auto" else kv.plane(SCALE_PLANE)
        self._attention.begin(inputs.for_attention(), kv.plane(KV_PLANE), scales)
        residual, aux = self._begin(inputs, carried)
        delta: torch.Tensor | None = None
        rows = None if inputs.adapters is None else AdapterRows(self._adapters, inputs.adapters)
        for index in self._span.whole_layers:
            layer = self._weights.layers[index]
            attended = self._attend(index, layer, residual, delta, aux, rows)
            delta = self._mlp(index, layer, residual, attended, rows)
            # ranks exchanged columns after writing this layer's KV, so every rank has written its part
            if inputs.layers is not None:
                inputs.layers.reached(self.config.groups.layers[index].num_whole)
        if not self._span.is_last:
            assert delta is not None
            return Carried(residual.add_(delta), torch.cat(aux, dim=-1) if aux else None)
        last = self._weights.layers[-1]
        attended = self._attend(self._span.end - 1, last, residual, delta, aux, rows)
        wanted = inputs.logits_idx
        output = self._finish(
            last, residual[wanted], attended[wanted], None if rows is None else rows.take_tokens(wanted)
        )
        output.aux = torch.cat(aux, dim=-1) if aux else None
        return output

    def _begin(self, inputs: ModelInputs, carried: Carried | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the residual (T, H) float32, to which layers write, and residuals that earlier stages captured."""
        if carried is None:
            return self._weights.embed[inputs.input_ids].float() * self._embed_scale, []
        return carried.values, [] if carried.aux is None else [carried.aux]

    def _finish(
        self, last: LayerWeights, residual: torch.Tensor, attended: torch.Tensor, rows: AdapterRows | None
    ) -> ModelOutput:
        """Finish the step for the E wanted rows. All KV is written, so the other rows are not needed."""
        if len(residual) == 0:
            empty = residual.new_empty(0, self.config.vocab_size)
            return ModelOutput(logits=empty, hidden=residual.to(self.embed.dtype))
        delta = self._mlp(self.config.num_layers - 1, last, residual, attended, rows)
        hidden = self._blocks.add_norm(residual, delta, self._weights.norm)
        return ModelOutput(logits=capped(self._weights.head(hidden), self.config.style.logit_cap), hidden=hidden)

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        aux: list[torch.Tensor],
        rows: AdapterRows | None,
    ) -> torch.Tensor:
        """Return the attention's output, (T, own heads * D)."""
        normed = self._blocks.add_norm(residual, delta, layer.attn_norm)
        if index in self._captured:
            aux.append(residual.to(self.embed.dtype, copy=True))
        qkv = _adapted(rows, index, QKV, normed, layer.qkv(normed))
        return self._attention.attend(index, qkv, layer.q_norm, layer.k_norm)

    def _mlp(
        self,
        index: int,
        layer: LayerWeights,
        residual: torch.Tensor,
        attended: torch.Tensor,
        rows: AdapterRows | None,
    ) -> torch.Tensor:
        """Return the layer's last addition to the residual, (M, H). `attended`: (M, own heads * D)."""
        whole = self._all_columns
        attended = whole(attended)
        delta = whole(_adapted(rows, index, OUT, attended, layer.out(attended)))
        delta = self._post(delta, layer.attn_post_norm)
        normed = self._blocks.add_norm(residual, delta, layer.mlp_norm)
        if layer.experts is not None:
            return self._post(layer.experts(normed, self._blocks.gated, whole), layer.mlp_post_norm)
        assert layer.gate_up is not None and layer.down is not None
        if rows is None:
            inner = whole(self._blocks.gated(layer.gate_up, normed))
        else:
            inner = whole(self._blocks.gate(rows.add(index, GATE_UP, normed, layer.gate_up(normed))))
        return self._post(whole(_adapted(rows, index, DOWN, inner, layer.down(inner))), layer.mlp_post_norm)

    def _post(self, delta: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        return delta if norm is None else self._blocks.norm(delta, norm)


def _adapted(rows: AdapterRows | None, layer: int, product: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y if rows is None else rows.add(layer, product, x, y)


def embed_scale(config: LlamaConfig, dtype: torch.dtype) -> float:
    return float(torch.tensor(config.style.embed_scale).to(dtype))


def capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    return logits if cap == 0.0 else torch.tanh(logits / cap) * cap


def check_layers(layers: tuple[int, ...], num_layers: int) -> None:
    """Raise ConfigError unless `layers` are layers of the model and ascend, as a draft head's `fc` expects."""
    if list(layers) != sorted({*layers}) or any(not 0 <= layer < num_layers for layer in layers):
        raise ConfigError(f"auxiliary layers {layers} of a model with {num_layers}: take ascending numbers below that")
