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
        gate and a down product give, where they have some columns only. Waits for the device."""
        weights, chosen = self._router(x).softmax(dim=-1).topk(self._top_k, dim=-1)  # (M, k)
        if self._normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            inner = all_columns(gate(self._gate_ups[expert](x[token])))
            result = all_columns(self._downs[expert](inner))
            total.index_add_(0, token, result.float() * weights[token, place, None])
        return total.to(x.dtype)
