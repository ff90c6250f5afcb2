"""Experts on a CPU: only those that a step chose run, once each, and a token's sum does not depend on other tokens."""

from __future__ import annotations

import torch

from shared.kernel.experts import Experts

EXPERTS, TOP, HIDDEN = 16, 3, 8


class Counted:
    """A product that remembers how many tokens each call had."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.calls = weight, list[int]()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(x))
        return torch.stack([self.weight @ row for row in x]) if len(x) else x  # row by row: one order of sums


def test_each_chosen_expert_runs_once_on_its_own_tokens() -> None:
    torch.manual_seed(2)
    router = torch.randn(EXPERTS, HIDDEN)
    router[5:] = -100 * router[:1].abs()  # hardly ever among the best for positive inputs
    ups, downs = ([Counted(torch.randn(HIDDEN, HIDDEN)) for _ in range(EXPERTS)] for _ in range(2))
    experts = Experts(lambda x: x @ router.T, ups, downs, TOP, normalise=True)
    x = torch.rand(20, HIDDEN)
    whole = experts(x, lambda linear, rows: linear(rows), lambda columns: columns)
    shares, chosen = (x @ router.T).softmax(-1).topk(TOP, -1)
    shares = shares / shares.sum(-1, keepdim=True)
    for expert in range(EXPERTS):
        num = int((chosen == expert).sum())
        assert ups[expert].calls == downs[expert].calls == ([num] if num else [])
    assert 0 < sum(not up.calls for up in ups) < EXPERTS
    for token in range(len(x)):
        total = torch.zeros(HIDDEN)
        for share, expert in sorted(zip(shares[token], chosen[token].tolist(), strict=True), key=lambda one: one[1]):
            total += downs[expert].weight @ (ups[expert].weight @ x[token]) * share
        assert torch.equal(whole[token], total), "added in the order of the experts' numbers"
