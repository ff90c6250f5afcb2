"""What a policy sees and answers. Knows nothing of messages.

A policy of one's own is a file beside this one and a line in `choose.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from router.prefix_index import PromptPages
from router.registry import RegisteredNode


class Reason(StrEnum):
    """Why a node was picked, as metrics have it."""

    ONLY = "only"  # there was no other
    PREFIX = "prefix"  # of what it has cached
    LOAD = "load"  # it has less to do, or has room
    AFFINITY = "affinity"  # the same client's requests go there, and nothing else decides
    TURN = "turn"  # it was picked least often, or longest ago


class Picked(NamedTuple):
    node: RegisteredNode
    reason: Reason


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request needs. `affinity`: what its client calls itself or its session; "": nothing."""

    num_tokens: int = 0  # whose KV it needs at once
    now: float = 0.0
    pages: PromptPages | None = None
    affinity: str = ""

    def missing(self, node: RegisteredNode) -> int:
        """Return how many of its tokens the node would compute."""
        return self.num_tokens - self.cached(node)

    def cached(self, node: RegisteredNode) -> int:
        """Return how many of its tokens the node need not compute, as far as is known."""
        return 0 if self.pages is None else self.pages.cached_tokens(node.pages, node.hello)


class Policy(Protocol):
    reads_caches: bool  # whether nodes are to tell what they have cached

    def pick(self, nodes: Sequence[RegisteredNode], wanted: Wanted) -> Picked:
        """One of `nodes`, which are of one role and never empty."""
        ...
