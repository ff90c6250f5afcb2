"""How far launched steps may write past the end of a sequence. Memory that steps write by position has so much more.

... last result | window | window | window |        depth 2: two open steps and the one launched beside them
                  open     open     launched
"""

from __future__ import annotations

LEAST_DEPTH = 2  # what memory is planned for in any case: a node keeps its figures with and without --overlap


def loop_depth(overlap: bool, num_stages: int) -> int:
    """Return how many steps may be open when the loop launches another one."""
    return int(overlap) + num_stages - 1


def overshoot(width: int, depth: int) -> int:
    """Return the tokens that a row's steps may commit together past its last result: a window of `width` each."""
    return (max(depth, LEAST_DEPTH) + 1) * width
