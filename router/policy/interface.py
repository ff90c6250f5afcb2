"""The interface of a policy (docs/adding-a-policy.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from router.fleet.prefix_index import PromptPages
from router.fleet.registry import RegisteredNode


class Reason(StrEnum):
    """Why a node was picked, as metrics name it."""

    ONLY = "only"
    PREFIX = "prefix"  # the node has cached pages
    LOAD = "load"  # the node has less work, or has room
    AFFINITY = "affinity"  # of equal nodes, the one for this client
    MEETING = "meeting"  # of equal nodes, the one to which every router sends prompts that begin alike
    TURN = "turn"  # of equal nodes, the one picked least often, or longest ago


class Picked(NamedTuple):
    node: RegisteredNode
    reason: Reason


@dataclass(frozen=True, slots=True)
class Wanted:
    num_tokens: int = 0  # tokens that need KV when the request starts
    now: float = 0.0
    pages: PromptPages | None = None
    affinity: str = ""  # the client's name for itself or its session

    def beginning(self, node: RegisteredNode) -> bytes:
        """Return an identity shared by prompts that begin alike; b"" if unknown."""
        return b"" if self.pages is None else self.pages.beginning(node.hello)

    def missing(self, node: RegisteredNode) -> int:
        return self.num_tokens - self.cached(node)

    def cached(self, node: RegisteredNode, *, arriving: bool = False) -> int:
        """Return how many of the prompt's tokens the node need not compute, as far as known.

        `arriving`: KV that a prefill node sends counts too. Only hand-offs from that node wait for it."""
        return 0 if self.pages is None else self.pages.cached_tokens(node.pages, node.hello, arriving=arriving)


class Policy(Protocol):
    reads_caches: bool  # whether the policy needs nodes' cache contents

    def pick(self, nodes: Sequence[RegisteredNode], wanted: Wanted) -> Picked:
        """Pick one of `nodes`. All have the same role, and there is at least one."""
        ...
