"""Define the draft layers that draft algorithms use.

    at slot s:   (id of the token at s + 1, feature at s)  ->  hidden, a guess of the feature at s + 1
                                                           ->  logits of the token at s + 2

`extend` makes features of what the target left. `forward` takes hidden states of one slot before as features. Examples
are EAGLE heads (arXiv 2401.15077, 2503.01840), MTP layers and HashDraft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from shared.kernel.attention.attention import AttentionInputs
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool


@dataclass(frozen=True, slots=True)
class DraftOutput:
    hidden: torch.Tensor  # (N, *hidden_shape)
    logits: torch.Tensor  # (N, Vd) float32


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

    def extend(
        self,
        next_ids: torch.Tensor,
        aux: torch.Tensor,
        view: AttentionInputs,
        kv: KVPool,
        wanted: torch.Tensor | None = None,
    ) -> DraftOutput:
        """Write the draft KV of T slots that the target has reached. Read earlier slots of the same rows.

        - next_ids (T,) int64: the token after each slot
        - aux (T, A): ModelOutput.aux
        - wanted (N,) int64: the slots whose output the caller reads; None: all
        """
        ...

    def write(self, next_ids: torch.Tensor, aux: torch.Tensor, view: AttentionInputs, kv: KVPool) -> None:
        """Write the draft KV that `extend` writes."""
        ...

    def forward(self, next_ids: torch.Tensor, features: torch.Tensor, view: AttentionInputs, kv: KVPool) -> DraftOutput:
        """Do as `extend` for all T slots, with features (T, *hidden_shape)."""
        ...


class StackedHead(DraftHead, Protocol):
    """A DraftHead that may be a layer of several. They compute logits only where a draft is drawn."""

    def project(self, aux: torch.Tensor) -> torch.Tensor:
        """Turn ModelOutput.aux (T, A) into features (T, *hidden_shape)."""
        ...

    def states(self, next_ids: torch.Tensor, features: torch.Tensor, view: AttentionInputs, kv: KVPool) -> torch.Tensor:
        """Do as `forward`, but return only hidden states (T, *hidden_shape)."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits (N, Vd) float32 of hidden states (N, *hidden_shape)."""
        ...
