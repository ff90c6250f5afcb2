r"""The EAGLE-3 draft head (arXiv 2503.01840): one decoder layer over the target's embedding and hidden states.

    slot j:   token j + 1 -> embed -> norm \\
              f_j                  -> norm  > x (2H) -> q, k, v -> rotate at j, attend to slots 0..j -> out
              g_j = f_j + attention + mlp             logits = lm_head(norm(g_j)) predict token j + 2

f_j is fc(three of the target's hidden states at j). At slots that the target has not reached, f_j is the head's own
g_(j-1). Slot j's KV depends on token j + 1, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from shared.kernel.attention.attention import AttentionBackend, AttentionInputs
from shared.kernel.product.block_weights import int8_format, quantize_weight
from shared.kernel.product.blocks import BlockKernels
from shared.kernel.product.linear import Head, HeadFactory, Linear, Weight, WeightFactory
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.llama.eagle_file import HeadConfig, HeadFit, HeadFolder
from shared.model.math.config import LlamaConfig
from shared.model.math.draft_head import DraftOutput
from shared.model.math.interface import ModelSpec
from shared.model.math.weights import rope_tables_of

EAGLE_PLANE = "eagle"


class DraftTarget(Protocol):
    spec: ModelSpec

    @property
    def config(self) -> HeadFit: ...

    @property
    def embed(self) -> torch.Tensor:
        """(vocab, H) in the model's dtype"""
        ...

    def capture_aux(self, layers: tuple[int, ...]) -> None:
        """Make later steps store the residual before each of `layers` in ModelOutput.aux."""
        ...


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """Shapes without a note are as in LayerWeights and LlamaWeights. Norm weights are float32."""

    embed: torch.Tensor  # (vocab, H), the target's embedding
    fc: Linear  # 3H -> H
    embed_norm: torch.Tensor
    feature_norm: torch.Tensor
    qkv: Linear  # 2H -> heads * D + 2 * kv_heads * D
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    norm: torch.Tensor
    head: Head  # (M, H) in the model's dtype -> (M, Vd) float32
    rope: tuple[torch.Tensor, torch.Tensor]


def load_eagle_weights(
    source: HeadFolder,
    embed: torch.Tensor,
    max_context: int,
    make: WeightFactory,
    make_head: HeadFactory,
    in_blocks: bool = False,
) -> EagleWeights:
    """Load weights in the embedding's dtype, on its device.

    `in_blocks`: whether weights become int8 blocks if their inputs fill whole blocks. That changes drafts, but never
    the emitted tokens.
    """

    def get(*names: str) -> Weight:
        weight = torch.cat([source.tensor(f"{name}.weight").to(embed.device, embed.dtype) for name in names])
        form = int8_format(weight.shape[1]) if in_blocks else None
        return weight if form is None else quantize_weight(weight, form)

    def norm(name: str) -> torch.Tensor:
        return source.tensor(f"{name}.weight").to(embed.device, torch.float32)

    attn, mlp = "midlayer.self_attn", "midlayer.mlp"
    return EagleWeights(
        embed=embed,
        fc=make(get("fc"), None),
        embed_norm=norm("midlayer.input_layernorm"),
        feature_norm=norm("midlayer.hidden_norm"),
        qkv=make(get(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"), None),
        out=make(get(f"{attn}.o_proj"), None),
        mlp_norm=norm("midlayer.post_attention_layernorm"),
        gate_up=make(get(f"{mlp}.gate_proj", f"{mlp}.up_proj"), None),
        down=make(get(f"{mlp}.down_proj"), None),
        norm=norm("norm"),
        head=make_head(get("lm_head")),
        rope=_rope(source.config.layer, max_context, embed.device),
    )


def _rope(layer: LlamaConfig, max_context: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rope_tables_of(layer.head_dim, layer.rope, max_context)
    return cos.to(device), sin.to(device)


class HeadNetwork(Protocol):
    """Runs the head for T > 0 slots. `plane`: the plane EAGLE_PLANE of the KV pool. Other arguments as in DraftHead."""

    def extend(
        self,
        next_ids: torch.Tensor,
        aux: torch.Tensor,
        view: AttentionInputs,
        plane: torch.Tensor,
        wanted: torch.Tensor | None,
    ) -> DraftOutput: ...

    def write(self, next_ids: torch.Tensor, aux: torch.Tensor, view: AttentionInputs, plane: torch.Tensor) -> None: ...

    def forward(
        self, next_ids: torch.Tensor, features: torch.Tensor, view: AttentionInputs, plane: torch.Tensor
    ) -> DraftOutput: ...


class EagleHead:
    """A DraftHead for one call at a time. Features and hidden states are float32.

    A slot's results depend neither on other rows nor on the division of slots among calls. All calls raise ValueError
    unless ids, features and positions are equally many.
    """

    hidden_dtype = torch.float32

    def __init__(self, source: HeadFolder, embed: torch.Tensor, network: HeadNetwork) -> None:
        self.config: HeadConfig = source.config
        self.hidden_size = self.config.layer.hidden_size
        self.hidden_shape: tuple[int, ...] = (self.hidden_size,)
        self.draft_vocab_size = self.config.draft_vocab_size
        self.aux_layers = self.config.aux_layers
        self.weights_hash = source.content_hash()
        self.d2t = source.draft_ids.to(embed.device)
        self.dtype = embed.dtype
        self.network = network

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        layer = self.config.layer
        return (PlaneSpec(EAGLE_PLANE, (1, 2, layer.num_kv_heads, page_size, layer.head_dim), self.dtype),)

    def extend(
        self,
        next_ids: torch.Tensor,
        aux: torch.Tensor,
        view: AttentionInputs,
        kv: KVPool,
        wanted: torch.Tensor | None = None,
    ) -> DraftOutput:
        check_lengths(next_ids, aux, view)
        num_wanted = len(next_ids) if wanted is None else len(wanted)
        if num_wanted == 0:
            self.write(next_ids, aux, view, kv)
            return self._no_output(aux)
        return self.network.extend(next_ids, aux.contiguous(), view, kv.plane(EAGLE_PLANE), wanted)

    def write(self, next_ids: torch.Tensor, aux: torch.Tensor, view: AttentionInputs, kv: KVPool) -> None:
        check_lengths(next_ids, aux, view)
        if len(next_ids):
            self.network.write(next_ids, aux.contiguous(), view, kv.plane(EAGLE_PLANE))

    def forward(self, next_ids: torch.Tensor, features: torch.Tensor, view: AttentionInputs, kv: KVPool) -> DraftOutput:
        check_lengths(next_ids, features, view)
        if not len(next_ids):
            return self._no_output(features)
        return self.network.forward(next_ids, features.float().contiguous(), view, kv.plane(EAGLE_PLANE))

    def _no_output(self, like: torch.Tensor) -> DraftOutput:
        sizes = self.hidden_size, self.draft_vocab_size
        return DraftOutput(*(like.new_empty((0, size), dtype=torch.float32) for size in sizes))


def check_lengths(next_ids: torch.Tensor, features: torch.Tensor, view: AttentionInputs) -> None:
    if not len(next_ids) == len(features) == len(view.positions):
        raise ValueError(f"{len(next_ids)} ids, {len(features)} features, {len(view.positions)} positions")


class SeparateHead:
    """Runs the head kernel by kernel, on any device."""

    def __init__(self, weights: EagleWeights, attention: AttentionBackend, blocks: BlockKernels) -> None:
        self._weights = weights
        self._attention = attention
        self._blocks = blocks

    def extend(
        self,
        next_ids: torch.Tensor,
        aux: torch.Tensor,
        view: AttentionInputs,
        plane: torch.Tensor,
        wanted: torch.Tensor | None,
    ) -> DraftOutput:
        features = self._weights.fc(aux).float()
        attended = self._attend(next_ids, features, view, plane)
        if wanted is not None:
            features, attended = features[wanted], attended[wanted]
        return self._finish(features, attended)

    def write(self, next_ids: torch.Tensor, aux: torch.Tensor, view: AttentionInputs, plane: torch.Tensor) -> None:
        """Attend, too: attention can't write alone."""
        self._attend(next_ids, self._weights.fc(aux).float(), view, plane)

    def forward(
        self, next_ids: torch.Tensor, features: torch.Tensor, view: AttentionInputs, plane: torch.Tensor
    ) -> DraftOutput:
        return self._finish(features.clone(), self._attend(next_ids, features, view, plane))

    def _attend(
        self, next_ids: torch.Tensor, features: torch.Tensor, view: AttentionInputs, plane: torch.Tensor
    ) -> torch.Tensor:
        weights, blocks = self._weights, self._blocks
        self._attention.begin(view, plane)
        hidden = features.shape[1]
        x = torch.empty((len(features), 2 * hidden), dtype=weights.embed.dtype, device=features.device)
        x[:, :hidden] = blocks.add_norm(weights.embed[next_ids].float(), None, weights.embed_norm)
        x[:, hidden:] = blocks.add_norm(features, None, weights.feature_norm)
        return self._attention.attend(0, weights.qkv(x), None, None)

    def _finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> DraftOutput:
        """Turn features (N, H) into hidden states in place."""
        weights, blocks = self._weights, self._blocks
        normed = blocks.add_norm(hidden, weights.out(attended), weights.mlp_norm)
        last = blocks.add_norm(hidden, weights.down(blocks.gated(weights.gate_up, normed)), weights.norm)
        return DraftOutput(hidden, weights.head(last))
