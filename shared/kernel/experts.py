"""Mixture of experts, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from shared.kernel.linear import Columns, Head, Linear


class Experts:
    """Sends each token through the `top_k` experts to which the router gives the largest weights.

    A token's results are added in the order of the experts' numbers, whatever else is in the step."""

    def __init__(
        self, router: Head, gate_ups: Sequence[Linear], downs: Sequence[Linear], top_k: int, normalise: bool
    ) -> None:
        self._router, self._gate_ups, self._downs = router, tuple(gate_ups), tuple(downs)
        self._top_k, self._normalise = top_k, normalise

    def __call__(
        self, x: torch.Tensor, gated: Callable[[Linear, torch.Tensor], torch.Tensor], all_columns: Columns
    ) -> torch.Tensor:
        """Return (M, H) for x (M, H), both in the model's dtype. Sums are float32. `gated`: BlockKernels.gated.

        `all_columns` completes a rank's product with the other ranks' columns."""
        weights, chosen = self._router(x).softmax(dim=-1).topk(self._top_k, dim=-1)  # (M, k)
        if self._normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)

        def run(expert: int, tokens: torch.Tensor) -> torch.Tensor:
            inner = all_columns(gated(self._gate_ups[expert], tokens))
            return all_columns(self._downs[expert](inner)).float()

        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if x.device.type == "cpu":  # tokens are sorted by expert, once for all experts
            order = chosen.flatten().argsort(stable=True)
            tokens, shares = order // self._top_k, weights.flatten()[order, None]
            ends = chosen.flatten().bincount(minlength=len(self._downs)).cumsum(0).tolist()
            for expert, (first, end) in enumerate(pairwise([0, *ends])):
                if first < end:
                    own = tokens[first:end]
                    total.index_add_(0, own, run(expert, x[own]) * shares[first:end])
        else:  # every expert takes every token: the host must not wait for the device's choice
            share = torch.zeros((len(x), len(self._downs)), device=x.device).scatter_(1, chosen, weights)
            for expert in range(len(self._downs)):
                own = share[:, expert, None]
                # `where` instead of a product with 0, because infinity * 0 is NaN
                total += torch.where(own != 0, run(expert, x) * own, 0)
        return total.to(x.dtype)
