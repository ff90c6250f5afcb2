"""What a policy sees and answers. Knows nothing of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from router.registry import RegisteredNode


class Policy(Protocol):
    def pick(self, nodes: Sequence[RegisteredNode], num_tokens: int = 0) -> RegisteredNode:
        """One of `nodes`, which are of one role and never empty. `num_tokens`: whose KV the request needs at once."""
        ...
