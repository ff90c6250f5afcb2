"""Mixture of experts, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch.nn import functional

from shared.kernel.product.linear import Columns, Head, Linear

Gated = Callable[[Linear, torch.Tensor], torch.Tensor]  # BlockKernels.gated
# dtypes, and major numbers of GPUs, for which torch has a grouped product that does not wait for the host
GROUPED_IN, GROUPED_ON = frozenset({"bfloat16"}), (9, 10)


def has_grouped_product(dtype: str, major: int) -> bool:
    """`major`: of the GPU's compute capability."""
    return dtype in GROUPED_IN and major in GROUPED_ON


class Experts:
    """Sends each token through the `top_k` experts to which the router gives the largest weights.

    A token's results are added in the order of the experts' numbers, whatever else is in the step."""

    def __init__(
        self, router: Head, gate_ups: Sequence[Linear], downs: Sequence[Linear], top_k: int, normalise: bool
    ) -> None:
        self._router, self._gate_ups, self._downs = router, tuple(gate_ups), tuple(downs)
        self._top_k, self._normalise = top_k, normalise

    def __call__(self, x: torch.Tensor, gated: Gated, all_columns: Columns) -> torch.Tensor:
        """Return (M, H) for x (M, H), both in the model's dtype. Sums are float32.

        `all_columns` completes a rank's product with the other ranks' columns."""
        weights, chosen = choose(self._router(x), self._top_k, self._normalise)

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


class GroupedExperts:
    """The same by torch's grouped product: each expert multiplies its own tokens, and the host waits for nothing.

    Weights: gate_ups (experts, 2 I, H) and downs (experts, H, I)."""

    def __init__(self, router: Head, gate_ups: torch.Tensor, downs: torch.Tensor, top_k: int, normalise: bool) -> None:
        self._router, self._gate_ups, self._downs = router, gate_ups, downs
        self._top_k, self._normalise = top_k, normalise
        self._numbers = torch.arange(len(downs), device=downs.device)

    def __call__(self, x: torch.Tensor, gated: Gated, all_columns: Columns) -> torch.Tensor:
        weights, chosen = choose(self._router(x), self._top_k, self._normalise)
        chosen, places = chosen.sort(dim=-1)  # a token's results are added in this order
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        ends = (experts[:, None] <= self._numbers).sum(0, dtype=torch.int32)  # of each expert's tokens
        inner = all_columns(gated(GroupedLinear(self._gate_ups, ends), x[order // self._top_k]))
        by_expert = all_columns(GroupedLinear(self._downs, ends)(inner))
        results = torch.empty_like(by_expert).index_copy_(0, order, by_expert).unflatten(0, chosen.shape)
        shares = weights.gather(-1, places)[..., None]
        total: torch.Tensor = results[:, 0].float() * shares[:, 0]  # one at a time: float32 of all would take memory
        for n in range(1, self._top_k):
            total = total + results[:, n].float() * shares[:, n]
        return total.to(x.dtype)


class GroupedLinear:
    """A Linear whose rows are sorted by expert: expert e has the rows up to ends[e], (experts,) int32."""

    def __init__(self, weights: torch.Tensor, ends: torch.Tensor) -> None:
        _, self.out_features, self.in_features = weights.shape
        self._columns, self._ends = weights.transpose(1, 2), ends

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.grouped_mm(x, self._columns, offs=self._ends)


def choose(logits: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and numbers of each token's experts, (M, top_k), of the router's logits (M, experts)."""
    weights, chosen = logits.softmax(dim=-1).topk(top_k, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True) if normalise else weights, chosen


def works_grouped(hidden: int, inner: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the device's grouped product is right, after one trial; it takes rows of multiples of 16 bytes."""
    if hidden * dtype.itemsize % 16 or inner * dtype.itemsize % 16:
        return False
    rows, weights = (torch.arange(num, device=device, dtype=torch.float32) % 5 - 2 for num in (4 * 16, 3 * 16 * 16))
    x, each = rows.view(4, 16).to(dtype), weights.view(3, 16, 16).to(dtype)
    try:
        found = GroupedLinear(each, torch.tensor([1, 1, 4], dtype=torch.int32, device=device))(x)
    except RuntimeError:
        return False
    return torch.equal(found, torch.cat((x[:1] @ each[0].T, x[1:] @ each[2].T)))
