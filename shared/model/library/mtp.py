"""MTP layers of the library as draft heads: attention reads and writes our pages, in a plane of their own.

    slot s:   token s + 1 -> embedding -> norm \\
              feature     ->              norm  > eh_proj -> decoder layer -> norm -> hidden -> the target's output rows

A feature is the target's final hidden state, or the hidden state of a layer before (shared/model/math/draft_head.py).
The library counts a slot's position by its token: s + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.nn.functional import linear
from transformers.modeling_layers import MtpModel

from shared.kernel.attention.attention import AttentionInputs
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.library.attend.attention import PagedAttention
from shared.model.library.model import use_attention
from shared.model.math.draft_head import DraftOutput


class MtpLayers:
    """A model's MTP layers. Runs one layer at a time."""

    def __init__(
        self, network: MtpModel, attention: PagedAttention, limit: int, own_rows: Mapping[int, torch.Tensor]
    ) -> None:
        """`limit`: of LoadedFrom. `own_rows`: the output rows (vocab, H) of layers that don't use the target's."""
        self.network = network
        self._own_rows = own_rows
        self.attention = attention
        self._last_position = limit - 1
        self.attach()

    def attach(self) -> None:
        """Make the layers call our attention, as from the start."""
        use_attention(self.network, self.attention)

    def run(
        self, layer: int, next_ids: torch.Tensor, features: torch.Tensor, view: AttentionInputs, kv: KVPool
    ) -> torch.Tensor:
        """Return hidden states (T, H). T > 0; other arguments as in DraftHead."""
        if self.attention.needs_cpu_seq_lens:  # which only the device's arrays have, in host memory
            view = replace(view, layout=replace(view.layout, host=None))
        self.attention.begin(view, kv)
        positions = (view.positions + 1).clamp(max=self._last_position)
        hidden: torch.Tensor = self.network.forward_layer(
            layer, features[None], positions[None], None, input_ids=next_ids[None]
        )
        return hidden[0]

    def logits(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """(N, H) -> (N, vocab) float32."""
        own = self._own_rows.get(layer)
        logits: torch.Tensor = self.network._project_to_logits(hidden) if own is None else linear(hidden, own)
        return logits.float()


class MtpHead:
    """A StackedHead: one MTP layer."""

    d2t = None  # its ids are the target's

    def __init__(self, layers: MtpLayers, layer: int, weights_hash: str) -> None:
        self._layers, self._layer = layers, layer
        self.hidden_shape: tuple[int, ...] = (layers.network.config.hidden_size,)
        self.hidden_dtype: torch.dtype = layers.network.dtype
        self.weights_hash = weights_hash

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        """The first layer's plane has room for all layers."""
        return () if self._layer else self._layers.attention.places.specs(page_size)

    def extend(
        self,
        next_ids: torch.Tensor,
        aux: torch.Tensor,
        view: AttentionInputs,
        kv: KVPool,
        wanted: torch.Tensor | None = None,
    ) -> DraftOutput:
        hidden = self.states(next_ids, aux, view, kv)
        return self._output(hidden if wanted is None else hidden[wanted])

    def write(self, next_ids: torch.Tensor, aux: torch.Tensor, view: AttentionInputs, kv: KVPool) -> None:
        """Run the whole layer: the library's can't write alone."""
        self.states(next_ids, aux, view, kv)

    def forward(self, next_ids: torch.Tensor, features: torch.Tensor, view: AttentionInputs, kv: KVPool) -> DraftOutput:
        return self._output(self.states(next_ids, features, view, kv))

    def states(self, next_ids: torch.Tensor, features: torch.Tensor, view: AttentionInputs, kv: KVPool) -> torch.Tensor:
        if not len(next_ids):
            return features.new_empty((0, *self.hidden_shape))
        return self._layers.run(self._layer, next_ids, features, view, kv)

    def _output(self, hidden: torch.Tensor) -> DraftOutput:
        return DraftOutput(hidden, self.logits(hidden))

    def project(self, aux: torch.Tensor) -> torch.Tensor:
        return aux

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._layers.logits(self._layer, hidden)
