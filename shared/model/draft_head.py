"""What a draft algorithm asks of a draft layer. Knows nothing of relays, sampling or verification.

    forward at slot s:   (id of the token at s + 1, feature at s)  ->  what the feature at s + 1 should be: `hidden`
    logits of it:        what comes at s + 2

Features are the target's own (`project` of what it left) or a layer's hidden state of one slot before: the draft then
stands on its own foundation. EAGLE (arXiv 2401.15077, 2503.01840) and MTP layers are such layers, and so is HashDraft.
"""

from __future__ import annotations

from typing import Protocol

import torch

from shared.kernel.attention import AttentionInputs
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool


class DraftHead(Protocol):
    """All methods run on the forward stream, on tensors of the model's device; what they return is the caller's.

    hidden_shape, hidden_dtype: of one token's feature, (H,). d2t: (Vd,) int64, the token id of each draft
    id, or None where the head has the target's vocabulary. weights_hash: nodes with other weights draft otherwise.
    """

    hidden_shape: tuple[int, ...]
    hidden_dtype: torch.dtype
    weights_hash: str

    @property
    def d2t(self) -> torch.Tensor | None: ...

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        """The tensors that a page has beside the target's; their names are this head's own."""
        ...

    def project(self, aux: torch.Tensor) -> torch.Tensor:
        """(T, A) what the target left of each token, ModelOutput.aux -> features (T, H)."""
        ...

    def forward(
        self, next_ids: torch.Tensor, features: torch.Tensor, view: AttentionInputs, kv: KVPool
    ) -> torch.Tensor:
        """next_ids (T,) int64 the token after each slot, features (T, H) -> hidden (T, H).
        Writes draft KV of all T slots, reads that of all slots before in the same rows."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(N, H) -> (N, Vd) float32."""
        ...
