"""How far steps may write past a sequence's end. Memory indexed by position has this much extra room.

... last result | window | window | window |        depth 2: two open steps and the step launched beside them
                  open     open     launched
"""

from __future__ import annotations

LEAST_DEPTH = 2  # the same memory plan with and without --overlap


def loop_depth(overlap: bool, num_stages: int) -> int:
    """Return the most steps that are open at the launch of another."""
    return int(overlap) + num_stages - 1


def overshoot(width: int, depth: int) -> int:
    """Return the most tokens that a row's open steps can commit past its last result. `width`: tokens per step."""
    return (max(depth, LEAST_DEPTH) + 1) * width
