"""What a layer does with products of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer turns products of queries and keys into weights."""

    scale: float
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: torch.Tensor | None = None  # (heads,): a score without a value, in each softmax

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None
