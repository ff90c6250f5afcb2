"""Define how prompts are computed: in chunks, or whole for an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shared.core.request import Request
from shared.engine.plan import Int64s
from shared.sched.steps.chunking import share_budget


class PromptRules(Protocol):
    """`share_prefixes`: whether prompts that begin with equal tokens have equal KV for these tokens."""

    @property
    def share_prefixes(self) -> bool: ...

    def share(self, remaining: list[int], urgent: list[int], budget: int) -> list[int]:
        """Return each prompt's number of tokens in this step. `remaining`: tokens still to compute, oldest first.
        `urgent`: how many of these the prompt or its shortest follower lacks."""
        ...

    def encoder_lens(self, reqs: Sequence[Request]) -> Int64s | None:
        """Return each request's number of encoder positions, or None if the model has no encoder."""
        ...


@dataclass(frozen=True, slots=True)
class InChunks:
    """Each token reads only earlier tokens, so a prompt may be cut anywhere."""

    share_prefixes: bool = True

    def share(self, remaining: list[int], urgent: list[int], budget: int) -> list[int]:
        return share_budget(remaining, urgent, budget)

    def encoder_lens(self, reqs: Sequence[Request]) -> Int64s | None:
        return None


@dataclass(frozen=True, slots=True)
class ForEncoder:
    """All prompt tokens except the last read one another, so there are no chunks and no shared pages.

    After a retraction the encoder reads only the prompt.
    """

    share_prefixes: bool = False

    def share(self, remaining: list[int], urgent: list[int], budget: int) -> list[int]:
        """Give the oldest prompt all its tokens, and each later prompt all or none, within the budget."""
        shares: list[int] = []
        for tokens in remaining:
            shares.append(tokens if not shares or sum(shares) + tokens <= budget else 0)
        return shares

    def encoder_lens(self, reqs: Sequence[Request]) -> Int64s | None:
        return np.asarray([len(req.ask.prompt_ids) - 1 for req in reqs], dtype=np.int64)
