"""A choice of small networks for each token (mixture of experts). Knows nothing of layers or of files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shared.kernel.linear import Columns, Head, Linear


class Experts:
    """Each token goes through the `top_k` experts that its router likes best, weighted by how much it likes them.

    Experts run one after another in the order of their numbers, each on the tokens that chose it; a token adds its
    own experts' results in that order, whoever else is in the step.
    """

    def __init__(
        self, router: Head, gate_ups: Sequence[Linear], downs: Sequence[Linear], top_k: int, normalise: bool
    ) -> None:
        self._router, self._gate_ups, self._downs = router, tuple(gate_ups), tuple(downs)
        self._top_k, self._normalise = top_k, normalise

    def __call__(
        self, x: torch.Tensor, gate: Callable[[torch.Tensor], torch.Tensor], all_columns: Columns
    ) -> torch.Tensor:
        """x (M, H) -> (M, H), both in the dtype; sums in float32. `gate` as of BlockKernels. `all_columns` of what a
        gate and a down product give, where they have some columns only."""
        weights, chosen = self._router(x).softmax(dim=-1).topk(self._top_k, dim=-1)  # (M, k)
        if self._normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)

        def run(expert: int, tokens: torch.Tensor) -> torch.Tensor:
            inner = all_columns(gate(self._gate_ups[expert](tokens)))
            return all_columns(self._downs[expert](inner)).float()

        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if x.device.type == "cpu":
            for expert in chosen.unique().tolist():
                token, place = (chosen == expert).nonzero(as_tuple=True)
                total.index_add_(0, token, run(expert, x[token]) * weights[token, place, None])
        else:  # every expert runs on every token: which ones are chosen, the host would have to wait for
            share = torch.zeros((len(x), len(self._downs)), device=x.device).scatter_(1, chosen, weights)
            for expert in range(len(self._downs)):
                own = share[:, expert, None]
                total += torch.where(own != 0, run(expert, x) * own, 0)  # not by 0: an expert's infinity times 0 is NaN
        return total.to(x.dtype)
