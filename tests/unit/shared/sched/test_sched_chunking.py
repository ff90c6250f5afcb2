"""How prompts share a step's budget: nobody starves, nothing is wasted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.sched.steps import chunking

prompts = st.lists(st.integers(1, 300), max_size=12)
budgets = st.integers(1, 128)


def share_budget(remaining: list[int], budget: int) -> list[int]:
    """Nobody waits for these prompts."""
    return chunking.share_budget(remaining, remaining, budget)


@given(prompts, budgets)
def test_shares_fit_the_budget_and_leave_nothing_usable(remaining: list[int], budget: int) -> None:
    shares = share_budget(remaining, budget)
    assert len(shares) == len(remaining)
    assert all(0 <= share <= rest for share, rest in zip(shares, remaining, strict=True))
    assert sum(shares) == min(budget, sum(remaining))


@given(prompts.filter(bool), budgets)
def test_the_oldest_is_sure_of_half(remaining: list[int], budget: int) -> None:
    assert share_budget(remaining, budget)[0] >= min(remaining[0], (budget + 1) // 2)


@given(st.lists(st.integers(1, 300), min_size=2, max_size=12), st.integers(2, 128))
def test_the_shortest_moves_in_every_step(remaining: list[int], budget: int) -> None:
    """A long prompt at the head can't starve the short ones behind it."""
    shares = share_budget(remaining, budget)
    shortest = min(range(len(remaining)), key=lambda i: (remaining[i], i))
    assert shares[shortest] >= min(remaining[shortest], budget // 2)


def ends(lengths: list[int], budget: int) -> list[int]:
    """The step in which each prompt's last token is computed; all came at once."""
    left, found, step = list(lengths), [0] * len(lengths), 0
    while any(left):
        step += 1
        waiting = [i for i, rest in enumerate(left) if rest]
        for i, share in zip(waiting, share_budget([left[i] for i in waiting], budget), strict=True):
            left[i] -= share
            found[i] = found[i] if left[i] else found[i] or step
    return found


@pytest.mark.parametrize(("length", "budget", "number"), [(1500, 256, 8), (128, 64, 32), (128, 256, 32), (200, 256, 9)])
def test_prompts_of_one_length_end_one_by_one(length: int, budget: int, number: int) -> None:
    """As by arrival: two that share every step would both end when the second of them does."""
    assert ends([length] * number, budget) == [-(-(i + 1) * length // budget) for i in range(number)]


def test_a_prompt_is_as_urgent_as_its_shortest_follower() -> None:
    """And only for as many tokens as that one lacks: then the shorter ones go first again."""
    assert chunking.share_budget([300, 100, 200], [300, 100, 200], 64) == [32, 32, 0]
    assert chunking.share_budget([300, 100, 200], [300, 100, 20], 64) == [32, 12, 20]
    assert chunking.share_budget([300, 100, 200], [10, 100, 200], 64) == [64, 0, 0], "the oldest is the most urgent"
    assert chunking.share_budget([10, 8, 200], [10, 8, 5], 64) == [10, 8, 46], "what nobody else uses"
