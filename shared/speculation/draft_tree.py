"""Grow a tree of drafts with one head (EAGLE-2, arXiv 2406.16858), and keep its likeliest nodes.

At each level the k = `topk` likeliest nodes get k children each. A node's likelihood counts all drafts on its path, so
a kept node's ancestors are kept, too.

        slot         L-1          L .. L+k-1         L+k .. L+2k-1       L = committed, f: the target's feature
    head reads   (bonus, f)        level 1              level 2
    head draws    level 1       k x k of level 2     k x k of level 3

Nodes of level n are at position L + n - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.engine.forward_batch import ForwardBatch
from shared.engine.verify import Drafts
from shared.kv.pool import KVPool
from shared.model.math.draft_head import DraftHead
from shared.speculation.draw import Draw
from shared.speculation.views import alternatives_of


@dataclass(slots=True)
class Level:
    """n candidates of one depth for each of D rows. A candidate's score is the log-likelihood of its path.

    parents: each parent's index among all levels' candidates; -1 stands for the bonus token.
    """

    ids: torch.Tensor  # (D, n) int64
    scores: torch.Tensor  # (D, n) float32
    parents: torch.Tensor  # (D, n) int64


@dataclass(slots=True)
class Frontier:
    """The k nodes of the newest level that get children."""

    places: torch.Tensor  # (D, k) int64: the nodes' indices among all levels' candidates
    path: torch.Tensor  # (D, k, depth) int64: drafts up to the node
    scores: torch.Tensor  # (D, k)
    features: torch.Tensor  # (D, k, *hidden_shape): the head's state one slot before the node
    seen: torch.Tensor  # (D, k) int64: bit mask of the ancestors' slots in the window


def num_levels(width: int, topk: int, steps: int) -> int:
    """Return the largest number of levels. The head never reads the last level, so that level needs no slots."""
    return min(steps, 1 + width // topk)


def grow(
    head: DraftHead, draw: Draw, fb: ForwardBatch, kv: KVPool, first: Level, hidden: torch.Tensor, steps: int
) -> Drafts:
    """Grow the tree. `first`: the topk likeliest drafts after the bonus token.

    hidden (D, *hidden_shape): the head's state from which these drafts were drawn.
    """
    topk = first.ids.shape[1]
    levels = [first]
    frontier = Frontier(
        places=torch.arange(topk, device=first.ids.device).expand_as(first.ids),
        path=first.ids.unsqueeze(2),
        scores=first.scores,
        features=hidden.unsqueeze(1).expand(-1, topk, *hidden.shape[1:]),
        seen=torch.zeros_like(first.ids),
    )
    for depth in range(1, num_levels(fb.plan.width, topk, steps)):
        num_before = sum(level.ids.shape[1] for level in levels)
        level, frontier = _next_level(head, draw, fb, kv, frontier, depth, num_before)
        levels.append(level)
    return _likeliest(levels, fb.plan.width - 1)


def _next_level(
    head: DraftHead, draw: Draw, fb: ForwardBatch, kv: KVPool, frontier: Frontier, depth: int, num_before: int
) -> tuple[Level, Frontier]:
    """Feed the frontier to the head. Return the frontier's children and the next frontier."""
    num_rows, topk, _ = frontier.path.shape
    slots = torch.arange((depth - 1) * topk, depth * topk, device=frontier.path.device)
    seen = frontier.seen | (1 << slots)
    view = alternatives_of(fb, depth - 1, slots, seen)
    output = head.forward(frontier.path[:, :, -1].reshape(-1), frontier.features.flatten(0, 1), view, kv)
    ids, log_probs = draw.candidates(head, output.logits, frontier.path, topk)
    scores = frontier.scores.unsqueeze(2) + log_probs
    parents = frontier.places.unsqueeze(2).expand_as(ids)
    level = Level(ids.flatten(1), scores.flatten(1), parents.flatten(1))
    chosen = level.scores.topk(topk, dim=1).indices
    parent = chosen // topk
    row = torch.arange(num_rows, device=chosen.device).unsqueeze(1)
    path = torch.cat([frontier.path[row, parent], level.ids.gather(1, chosen).unsqueeze(2)], dim=2)
    features = output.hidden.view(num_rows, topk, *output.hidden.shape[1:])[row, parent]
    best = level.scores.gather(1, chosen)
    return level, Frontier(num_before + chosen, path, best, features, seen.gather(1, parent))


def _likeliest(levels: list[Level], num_nodes: int) -> Drafts:
    """Keep the likeliest nodes. Of equally likely nodes keep the first, so that no ancestor is missing."""
    ids = torch.cat([level.ids for level in levels], dim=1)
    scores = torch.cat([level.scores for level in levels], dim=1)
    parents = torch.cat([level.parents for level in levels], dim=1)
    ranking = scores.sort(dim=1, descending=True, stable=True).indices
    kept = ranking[:, :num_nodes].sort(dim=1).values
    numbers = torch.zeros_like(ids)
    numbers.scatter_(1, kept, torch.arange(1, num_nodes + 1, device=ids.device).expand_as(kept))
    above = parents.gather(1, kept)
    return Drafts(ids.gather(1, kept), torch.where(above < 0, 0, numbers.gather(1, above.clamp(min=0))))
