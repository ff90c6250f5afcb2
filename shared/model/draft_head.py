"""Define the draft layers that draft algorithms use.

    forward at slot s:   (id of the token at s + 1, feature at s)  ->  `hidden`, a guess of the feature at s + 1
    logits of `hidden`:  the token at s + 2

A feature comes from the target (`project`), or is the layer's hidden state one slot before. Examples are EAGLE
heads (arXiv 2401.15077, 2503.01840), MTP layers and HashDraft.
"""

from __future__ import annotations

from typing import Protocol

import torch

from shared.kernel.attention import AttentionInputs
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool


class DraftHead(Protocol):
    """All methods run on the forward stream, on the model's device. The caller owns the results.

    - hidden_shape, hidden_dtype: shape (H,) and dtype of one token's feature.
    - d2t: (Vd,) int64, each draft id's token id; None if draft ids are token ids.
    - weights_hash: hash of the weights, which decide the drafts.
    """

    hidden_shape: tuple[int, ...]
    hidden_dtype: torch.dtype
    weights_hash: str

    @property
    def d2t(self) -> torch.Tensor | None: ...

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        """Return the planes that the head adds to a page."""
        ...

    def project(self, aux: torch.Tensor) -> torch.Tensor:
        """Turn ModelOutput.aux (T, A) into features (T, H)."""
        ...

    def forward(
        self, next_ids: torch.Tensor, features: torch.Tensor, view: AttentionInputs, kv: KVPool
    ) -> torch.Tensor:
        """Return hidden (T, H) for features (T, H) and next_ids (T,) int64, the token after each slot.

        Writes the T slots' draft KV, and reads earlier slots of the same rows.
        """
        ...

    def write(self, next_ids: torch.Tensor, features: torch.Tensor, view: AttentionInputs, kv: KVPool) -> None:
        """Write the draft KV that `forward` writes."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return draft logits (N, Vd) float32 for `hidden` (N, H)."""
        ...
