"""Makes a failing case small: fewer requests first, then fewer decisions of the worlds. Same oracle, any message.

Delta debugging: leave out halves, then quarters, then smaller parts, as long as it still fails. Knows nothing of
what is being shrunk but its list of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tests.support.explorer.cases import Case, Verdict
from tests.support.explorer.world import Schedule

T = TypeVar("T")
Run = Callable[[Case], Verdict]


@dataclass
class Shrinker:
    """`budget` runs at most; `best` is the smallest case that failed, with its verdict."""

    run: Run
    best: Case
    verdict: Verdict
    budget: int = 150
    runs: int = 0

    def still_fails(self, case: Case) -> bool:
        if self.runs >= self.budget:
            return False
        self.runs += 1
        verdict = self.run(case)
        if verdict.oracle != self.verdict.oracle:
            return False
        self.best, self.verdict = case, verdict
        return True


def shrink(case: Case, verdict: Verdict, run: Run, budget: int = 150) -> Shrinker:
    """First make the drawn schedule explicit, then leave out what is not needed."""
    shrinker = Shrinker(run, case, verdict, budget)
    _shrink_jobs(shrinker)
    explicit = replace(shrinker.best, schedules=shrinker.verdict.schedules)
    if not shrinker.still_fails(explicit):
        return shrinker
    for index in range(len(explicit.schedules or ())):
        _shrink_schedule(shrinker, index)
    _shrink_jobs(shrinker)
    return shrinker


def _shrink_jobs(shrinker: Shrinker) -> None:
    rids = shrinker.best.rids or shrinker.verdict.rids
    ddmin(rids, lambda kept: bool(kept) and shrinker.still_fails(replace(shrinker.best, rids=tuple(kept))))


def _shrink_schedule(shrinker: Shrinker, index: int) -> None:
    def attempt(schedule: Schedule) -> bool:
        schedules = list(shrinker.best.schedules or ())
        schedules[index] = schedule
        return shrinker.still_fails(replace(shrinker.best, schedules=tuple(schedules)))

    def current() -> Schedule:
        assert shrinker.best.schedules is not None
        return shrinker.best.schedules[index]

    preemptions, changes, runs = sorted(current().preemptions), sorted(current().changes), sorted(current().runs)
    ddmin(preemptions, lambda kept: attempt(replace(current(), preemptions=frozenset(kept))))
    ddmin(changes, lambda kept: attempt(replace(current(), changes=frozenset(kept))))
    lengths = current().runs
    ddmin(runs, lambda kept: attempt(replace(current(), runs={point: lengths[point] for point in kept})))


def ddmin(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """The smallest part of `items` found that still fails."""
    best = list(items)
    if best and fails([]):
        return []
    size = len(best) // 2
    while size >= 1:
        start, shorter = 0, False
        while start < len(best):
            kept = best[:start] + best[start + size :]
            if kept != best and fails(kept):
                best, shorter = kept, True
            else:
                start += size
        size = size if shorter and size == 1 else size // 2
    return best
