"""Random trees of draft tokens, and what is true of them written down slowly."""

from __future__ import annotations

import random

import torch


def draw_parents(rng: random.Random, width: int) -> list[int]:
    """Parent of each node 1 .. width - 1: chains, stars, and all between."""
    reach = rng.choice([1, 2, width])
    return [rng.randrange(max(0, node - reach), node) for node in range(1, width)]


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root (0) to a node, itself included."""
    path = [node]
    while path[0]:
        path.insert(0, parents[path[0] - 1])
    return path


def visible_bits(parents: list[int]) -> torch.Tensor:
    """(width,) int64"""
    return torch.tensor([sum(1 << n for n in path_to(parents, node)) for node in range(len(parents) + 1)])


def depths(parents: list[int]) -> list[int]:
    return [len(path_to(parents, node)) - 1 for node in range(len(parents) + 1)]
