"""Compute cross entropy against the target's distribution over the draft vocabulary, without storing all logits.

The product with `lm_head`, the softmaxes and the gradient run over ROWS rows at a time, so that the logits stay in the
CPU's cache (like Liger's fused linear cross entropy, arXiv 2410.10989).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
ROWS = 256


@dataclass(frozen=True, slots=True)
class Goal:
    """The training targets of M rows."""

    shares: Tensor  # (M, draft vocab) in the matrix products' dtype: the target's probabilities.
    best: Tensor  # (M,) int64: the draft id of the target's choice.
    weight: Tensor  # (M,) float32: 0 where the next token is outside the draft vocabulary, else 1.

    def of(self, rows: Tensor) -> Goal:
        return Goal(self.shares[rows], self.best[rows], self.weight[rows])


@torch.no_grad()
def make_goal(final: Tensor, draft_rows: Tensor, known: Tensor) -> Goal:
    """Return the goal. `final` (M, H): the target's last hidden states.

    `draft_rows` (draft vocab, H): the target's output rows. `known` (M,) bool: whether the next token has a draft id.
    """
    shares = torch.empty(len(final), len(draft_rows), dtype=final.dtype, device=final.device)
    best = torch.empty(len(final), dtype=torch.int64, device=final.device)
    for start in range(0, len(final), ROWS):
        part = slice(start, start + ROWS)
        logits = F.linear(final[part], draft_rows).float()
        best[part] = logits.argmax(dim=-1)
        shares[part] = logits.softmax(dim=-1)
    return Goal(shares, best, known.to(final.device, torch.float32))


@dataclass(frozen=True, slots=True)
class StepLoss:
    loss: Tensor  # () float32: the weighted sum of the rows' losses.
    hits: Tensor  # (M,) bool: whether head and target agree on the row's token.


def soft_cross_entropy(hidden: Tensor, weight: Tensor, goal: Goal, rows: Tensor) -> StepLoss:
    """Return the loss of `hidden` (M, H). `weight`: (draft vocab, H) float32. `rows`: (M,), indices into `goal`."""
    loss, hits = _Fused.apply(hidden, weight, goal, rows)
    return StepLoss(loss, hits)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, goal: Goal, rows: Tensor) -> tuple[Tensor, Tensor]:
        head = weight.to(hidden.dtype)
        slopes = torch.empty(len(hidden), len(head), dtype=hidden.dtype, device=hidden.device)
        d_hidden, total = torch.empty_like(hidden), torch.zeros((), device=hidden.device)
        hits = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        for start in range(0, len(hidden), ROWS):
            part = slice(start, start + ROWS)
            wanted, share = goal.shares[rows[part]].float(), goal.weight[rows[part]].unsqueeze(-1)
            logits = F.linear(hidden[part], head).float()
            hits[part] = logits.argmax(dim=-1) == goal.best[rows[part]]
            logits = logits.log_softmax(dim=-1)
            total -= torch.dot((wanted * share).flatten(), logits.flatten())
            slopes[part] = logits.exp_().sub_(wanted).mul_(share)
            d_hidden[part] = slopes[part] @ head
        ctx.mark_non_differentiable(hits)
        ctx.save_for_backward(hidden, slopes, d_hidden)
        return total, hits

    @staticmethod
    def backward(ctx: Any, *slope: Tensor) -> tuple[Tensor | None, ...]:
        hidden, slopes, d_hidden = ctx.saved_tensors
        return d_hidden * slope[0].to(hidden.dtype), (slopes.T @ hidden).float() * slope[0], None, None
