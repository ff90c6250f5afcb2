"""Experts: only those that a step chose run, once each, and a token's sum does not depend on other tokens; and the same
by torch's grouped product, as on a GPU."""

from __future__ import annotations

import random

import pytest
import torch

from shared.kernel.product.experts import Experts, GroupedExperts
from shared.kernel.product.linear import Linear
from shared.model.math import kernels
from tests.support.cores.core_rig import assert_whole, run_local
from tests.support.gpus.cuda_core import Kind, make_core
from tests.support.gpus.cuda_jobs import jobs_for
from tests.support.virtual_gpu import operators
from tests.support.virtual_gpu.device import make_device

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


def by_rows(x: torch.Tensor, columns: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """The grouped product, row by row, as Counted multiplies."""
    of = torch.bucketize(torch.arange(len(x)), offs, right=True)
    return torch.stack([columns[expert].T @ row for expert, row in zip(of.tolist(), x, strict=True)])


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 20])
def test_grouped_experts_add_in_the_same_order(
    num_tokens: int, normalise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, given the same products; and torch's own are as near as their sums' order."""
    torch.manual_seed(3)
    router, ups, downs = torch.randn(EXPERTS, HIDDEN), *(torch.randn(EXPERTS, HIDDEN, HIDDEN) for _ in range(2))
    router[:2] = -50.0  # no token goes there
    x = torch.rand(num_tokens, HIDDEN)

    def scores(x: torch.Tensor) -> torch.Tensor:
        return x @ router.T

    def plain(linear: Linear, rows: torch.Tensor) -> torch.Tensor:
        return linear(rows)

    one_by_one = Experts(scores, [*map(Counted, ups)], [*map(Counted, downs)], TOP, normalise)  # type: ignore[arg-type]
    expected = one_by_one(x, plain, lambda columns: columns)
    grouped = GroupedExperts(scores, ups, downs, TOP, normalise)
    torch.testing.assert_close(grouped(x, plain, lambda columns: columns), expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", by_rows)
    assert torch.equal(grouped(x, plain, lambda columns: columns), expected)


def test_a_gpu_takes_the_grouped_product_s_arguments() -> None:
    """The check on "meta" is the GPU's: bfloat16, strides, and ends of int32."""
    router, ups, downs = (torch.empty(*size, dtype=torch.bfloat16, device="meta") for size in
                          ((6, 16), (6, 64, 16), (6, 16, 32)))  # fmt: skip
    grouped = GroupedExperts(lambda x: (x @ router.T).float(), ups, downs, 2, normalise=True)
    x = torch.empty(5, 16, dtype=torch.bfloat16, device="meta")
    assert grouped(x, lambda linear, rows: linear(rows)[:, :32].contiguous(), lambda columns: columns).shape == x.shape


def test_streams_of_grouped_experts_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a virtual GPU that has the product in float32, in graphs too: the tokens of a core without."""
    kind = Kind(family="qwen3-moe")
    asked, gpu = jobs_for(kind, (), 3), make_device("eager")
    plain = make_core(kind)
    expected = run_local(plain, asked, rng=random.Random(1)).streams
    plain.close()
    monkeypatch.setattr(kernels, "groups_on", lambda dtype, device: True)
    monkeypatch.setattr(operators, "GROUPED", {torch.float32})
    core = make_core(kind, gpu, graphs=True)
    layers = core.model._weights.layers  # type: ignore[attr-defined]
    assert any(isinstance(layer.experts, GroupedExperts) for layer in layers)
    with gpu.counting() as counts:
        outcome = run_local(core, asked, rng=random.Random(1))
    assert_whole(core)
    core.close()
    assert outcome.streams == expected and core.graphs is not None and core.graphs.graphed > 3
    assert (counts.syncs, counts.h2d_pageable) == (0, 0), counts.told()


def test_a_product_that_fails_its_trial_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "groups_on", lambda dtype, device: True)
    monkeypatch.setattr(kernels, "works_grouped", lambda *sizes: False)
    caplog.set_level("INFO")
    core = make_core(Kind(family="qwen3-moe"))
    assert not any(isinstance(layer.experts, GroupedExperts) for layer in core.model._weights.layers)  # type: ignore[attr-defined]
    core.close()
    assert "experts are multiplied one by one" in caplog.text
