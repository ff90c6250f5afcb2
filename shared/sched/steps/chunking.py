"""Choose which prompts advance in a step of chunked prefill, and how far."""

from __future__ import annotations

from dataclasses import dataclass

from shared.core.request import Request, TokenIds


@dataclass(slots=True, eq=False)
class ChunkedPrompt:
    """A PREFILLING request, which has all its pages. `computed` includes the tokens of planned steps."""

    request: Request
    ids: TokenIds  # prompt + output so far
    computed: int
    started: bool = False  # whether a chunk of this incarnation was planned

    @property
    def remaining(self) -> int:
        return len(self.ids) - self.computed


def share_budget(remaining: list[int], urgent: list[int], budget: int) -> list[int]:
    """Return how many tokens of each prompt this step computes. `remaining` and `urgent` (see PromptRules.share):
    oldest first.

    The oldest prompt gets half the budget, so short prompts can't starve it. The other prompts share the rest, the most
    urgent first. The oldest prompt also gets tokens that the others don't use. If no other prompt is more urgent, the
    oldest prompt gets the whole budget first, because sharing would only delay it.
    """
    shares = [0] * len(remaining)
    if not remaining:
        return shares
    shares[0] = min(remaining[0], budget if urgent[0] == min(urgent) else (budget + 1) // 2)
    left = budget - shares[0]
    others = sorted(range(1, len(remaining)), key=lambda i: (urgent[i], i))
    for wanted, order in ((urgent, others), (remaining, [0, *others])):
        for index in order:
            more = min(wanted[index] - shares[index], left)
            shares[index] += more
            left -= more
    return shares
