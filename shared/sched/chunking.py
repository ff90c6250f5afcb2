"""Chunked prefill: which prompts advance in a step, and by how much. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from shared.core.request import Request, TokenIds


@dataclass(slots=True, eq=False)
class ChunkedPrompt:
    """A request in state PREFILLING. All its pages are reserved already; `computed` counts planned tokens."""

    request: Request
    ids: TokenIds  # prompt + output so far
    computed: int
    started: bool = False  # a chunk of this incarnation was planned

    @property
    def remaining(self) -> int:
        return len(self.ids) - self.computed


def share_budget(remaining: list[int], budget: int) -> list[int]:
    """Tokens each prompt gets this step; `remaining` is in order of seniority.

    The oldest is sure of half the budget, so short prompts can't starve a long one; the others get the rest,
    shortest first, so a long prompt can't starve short ones. What they leave goes back to the oldest. Where nobody has
    less left than the oldest, it goes first with the whole budget: sharing would only make it end later.
    """
    shares = [0] * len(remaining)
    if not remaining:
        return shares
    shares[0] = min(remaining[0], budget if remaining[0] == min(remaining) else (budget + 1) // 2)
    left = budget - shares[0]
    for index in sorted(range(1, len(remaining)), key=lambda i: (remaining[i], i)):
        shares[index] = min(remaining[index], left)
        left -= shares[index]
    shares[0] += min(left, remaining[0] - shares[0])
    return shares
