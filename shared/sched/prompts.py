"""How prompts are computed: in chunks, or whole where an encoder reads them. What planning does differently for
encoders stands here. They are frozen (CONTRIBUTING.md): shared/config/frozen.py refuses new features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shared.core.request import Request
from shared.engine.plan import Int64s
from shared.sched.chunking import share_budget


class PromptRules(Protocol):
    """`share_prefixes`: whether prompts that begin alike have the same KV there."""

    @property
    def share_prefixes(self) -> bool: ...

    def share(self, remaining: list[int], budget: int) -> list[int]:
        """Return the tokens that each prompt gets this step; `remaining` is in order of seniority."""
        ...

    def encoder_lens(self, reqs: Sequence[Request]) -> Int64s | None:
        """Return how many positions of each request are the encoder's. None: the model has none."""
        ...


@dataclass(frozen=True, slots=True)
class InChunks:
    """Each token reads those before it, so a prompt may be cut anywhere."""

    share_prefixes: bool = True

    def share(self, remaining: list[int], budget: int) -> list[int]:
        return share_budget(remaining, budget)

    def encoder_lens(self, reqs: Sequence[Request]) -> Int64s | None:
        return None


@dataclass(frozen=True, slots=True)
class ForEncoder:
    """A prompt's tokens but the last read one another, so it is computed whole, and what they leave in a page depends
    on all of them. After a retraction the encoder still reads the prompt alone, not what the decoder said."""

    share_prefixes: bool = False

    def share(self, remaining: list[int], budget: int) -> list[int]:
        """Return all of the oldest prompt, and all of others while the budget has room."""
        shares: list[int] = []
        for tokens in remaining:
            shares.append(tokens if not shares or sum(shares) + tokens <= budget else 0)
        return shares

    def encoder_lens(self, reqs: Sequence[Request]) -> Int64s | None:
        return np.asarray([len(req.prompt_ids) - 1 for req in reqs], dtype=np.int64)
