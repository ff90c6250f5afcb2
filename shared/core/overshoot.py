"""Computes how far steps may write past a sequence's end. Memory indexed by position has room for these tokens.

... last result | window | window | window |        depth 2: two open steps and the step launched beside them
                  open     open     launched
"""

from __future__ import annotations

LEAST_DEPTH = 2  # keeps the memory plan the same with and without --overlap


def loop_depth(overlap: bool, num_stages: int) -> int:
    """Return the largest number of steps that are open when the loop launches another."""
    return int(overlap) + num_stages - 1


def overshoot(width: int, depth: int) -> int:
    """Return the largest number of tokens that a row's open steps can commit past its last result.

    `width`: tokens per step.
    """
    return (max(depth, LEAST_DEPTH) + 1) * width
