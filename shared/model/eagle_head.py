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

from shared.kernel.attention import AttentionBackend, AttentionInputs
from shared.kernel.block_weights import int8_format, quantize_weight
from shared.kernel.blocks import BlockKernels
from shared.kernel.linear import Head, HeadFactory, Linear, Weight, WeightFactory
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.config import LlamaConfig
from shared.model.eagle_file import HeadConfig, HeadFolder
from shared.model.interface import ModelSpec
from shared.model.weights import rope_tables_of

EAGLE_PLANE = "eagle"


class DraftTarget(Protocol):
    """The model for which a head drafts."""

    config: LlamaConfig
    spec: ModelSpec
    embed: torch.Tensor  # (vocab, H) in the model's dtype

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


class Midlayer(Protocol):
    def add_to(
        self, residual: torch.Tensor, next_ids: torch.Tensor, view: AttentionInputs, plane: torch.Tensor
    ) -> None:
        """Turn f into g in place: residual (N, H) float32, contiguous, N > 0.

        Writes draft KV of all N slots, then attends.
        """
        ...

    def write(self, features: torch.Tensor, next_ids: torch.Tensor, view: AttentionInputs, plane: torch.Tensor) -> None:
        """Only write the draft KV. Arguments as in `add_to`."""
        ...


class EagleHead:
    """A DraftHead for one call at a time. Features and hidden states are float32.

    A slot's results depend neither on other rows nor on the division of slots among calls.
    """

    hidden_dtype = torch.float32

    def __init__(
        self, source: HeadFolder, spec: ModelSpec, weights: EagleWeights, midlayer: Midlayer, blocks: BlockKernels
    ) -> None:
        self.config: HeadConfig = source.config
        self.hidden_size = self.config.layer.hidden_size
        self.hidden_shape: tuple[int, ...] = (self.hidden_size,)
        self.draft_vocab_size = self.config.draft_vocab_size
        self.aux_layers = self.config.aux_layers
        self.weights_hash = source.content_hash()
        self.d2t = source.draft_ids.to(weights.embed.device)
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._weights = weights
        self.midlayer = midlayer
        self._blocks = blocks

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        layer = self.config.layer
        return (PlaneSpec(EAGLE_PLANE, (1, 2, layer.num_kv_heads, page_size, layer.head_dim), self._dtype),)

    def project(self, aux: torch.Tensor) -> torch.Tensor:
        """aux (N, 3H) in the model's dtype -> (N, H) float32."""
        if len(aux) == 0:
            return aux.new_empty((0, self.hidden_size), dtype=torch.float32)
        return self._weights.fc(aux).float()

    def forward(
        self, next_ids: torch.Tensor, features: torch.Tensor, view: AttentionInputs, kv: KVPool
    ) -> torch.Tensor:
        """Write draft KV to the plane "eagle", then attend. Return g (N, H) float32.

        Raises ValueError unless ids, features and positions are equally many.
        """
        check_lengths(next_ids, features, view)
        residual = features.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if len(residual) > 0:
            self.midlayer.add_to(residual, next_ids, view, kv.plane(EAGLE_PLANE))
        return residual

    def write(self, next_ids: torch.Tensor, features: torch.Tensor, view: AttentionInputs, kv: KVPool) -> None:
        check_lengths(next_ids, features, view)
        if len(features) > 0:
            self.midlayer.write(features.float().contiguous(), next_ids, view, kv.plane(EAGLE_PLANE))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return (N, Vd) float32 for g (N, H)."""
        if len(hidden) == 0:
            return hidden.new_empty((0, self.draft_vocab_size), dtype=torch.float32)
        return self._weights.head(self._blocks.add_norm(hidden.float().contiguous(), None, self._weights.norm))


def check_lengths(next_ids: torch.Tensor, features: torch.Tensor, view: AttentionInputs) -> None:
    if not len(next_ids) == len(features) == len(view.positions):
        raise ValueError(f"{len(next_ids)} ids, {len(features)} features, {len(view.positions)} positions")


class SeparateMidlayer:
    """Runs the layer kernel by kernel, on any device."""

    def __init__(self, weights: EagleWeights, attention: AttentionBackend, blocks: BlockKernels) -> None:
        self._weights = weights
        self._attention = attention
        self._blocks = blocks

    def add_to(
        self, residual: torch.Tensor, next_ids: torch.Tensor, view: AttentionInputs, plane: torch.Tensor
    ) -> None:
        weights, blocks = self._weights, self._blocks
        self._attention.begin(view, plane)
        hidden = residual.shape[1]
        x = torch.empty((len(residual), 2 * hidden), dtype=weights.embed.dtype, device=residual.device)
        x[:, :hidden] = blocks.add_norm(weights.embed[next_ids].float(), None, weights.embed_norm)
        x[:, hidden:] = blocks.add_norm(residual, None, weights.feature_norm)
        attended = self._attention.attend(0, weights.qkv(x), None, None)
        normed = blocks.add_norm(residual, weights.out(attended), weights.mlp_norm)
        residual += weights.down(blocks.gated(weights.gate_up, normed))

    def write(self, features: torch.Tensor, next_ids: torch.Tensor, view: AttentionInputs, plane: torch.Tensor) -> None:
        """Run the whole layer, because attention can't write alone."""
        self.add_to(features.clone(), next_ids, view, plane)
