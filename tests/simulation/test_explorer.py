"""The production engine under orders that its events allow, watched by the hazard detector; and, so that this means
something, the same with one event, wait or copy taken away at a time. `python -m tests.support.explorer.run --help` for
more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.explorer.cases import REAL, SCENARIOS, Case, run_case
from tests.support.explorer.mutants import MUTANTS, Broken
from tests.support.explorer.rates import scripted
from tests.support.explorer.scripted import SCRIPTS
from tests.support.explorer.shrink import ddmin, shrink

SEEDS = 2  # of each scenario
SEARCH = 60  # seeds from a mutant's first: the rarest is found by one in eight
SEEDED = [mutant for mutant in MUTANTS.values() if mutant.seed is not None]
BY_SCRIPT = [mutant for mutant in MUTANTS.values() if mutant.script]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Failed steps are what is asked for here."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def assert_unbroken(scenario: str, seed: int) -> None:
    verdict = run_case(Case(scenario, seed))
    replay = f"replay: python -m tests.support.explorer.run --scenario {scenario} --seed {seed}"
    assert not verdict.oracle, f"{verdict.message}\n{replay}\n{verdict.timeline()}"
    assert verdict.num_steps > 5


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("seed", range(100, 100 + SEEDS))
def test_no_order_breaks_the_code_as_it_is(scenario: str, seed: int) -> None:
    assert_unbroken(scenario, seed)


@pytest.mark.parametrize("scenario", REAL)
def test_many_orders_of_real_mtp_layers_break_nothing(scenario: str) -> None:
    """Drafts, too, are those that the library makes, whatever came before in time."""
    for seed in range(200, 215):
        assert_unbroken(scenario, seed)


@pytest.mark.rule("H21")
@pytest.mark.parametrize("mutant", SEEDED, ids=lambda mutant: mutant.name)
def test_a_broken_stream_is_found(mutant: Broken) -> None:
    """An edit of the scheduler changes what a seed draws, so no one seed is asked for."""
    assert mutant.seed is not None
    seeds = range(mutant.seed, mutant.seed + SEARCH)
    cases = (Case(mutant.scenarios[seed % len(mutant.scenarios)], seed) for seed in seeds)
    assert any(run_case(case, mutant).oracle in mutant.found_by for case in cases), f"{mutant.takes_away} isn't missed"


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_scripted_schedules_pass(name: str) -> None:
    SCRIPTS[name]()


@pytest.mark.parametrize("mutant", BY_SCRIPT, ids=lambda mutant: mutant.name)
def test_the_scripted_schedules_fail_without_their_rule(mutant: Broken) -> None:
    assert scripted(mutant), f"nobody misses {mutant.takes_away}"


def test_a_seed_and_a_recorded_schedule_both_replay() -> None:
    case = Case("spec", 104)
    first, again = run_case(case, detect=False), run_case(case, detect=False)
    assert first.timeline(last=100_000) == again.timeline(last=100_000)
    assert sum(schedule.size for schedule in first.schedules) > 0
    recorded = run_case(replace(case, schedules=first.schedules), detect=False)
    assert recorded.timeline(last=100_000) == first.timeline(last=100_000)


def test_a_failing_case_shrinks_and_keeps_its_failure_reason() -> None:
    mutant = MUTANTS["stash_off_stream"]
    case = Case("plain", 4)
    verdict = run_case(case, mutant)
    small = shrink(case, verdict, lambda one: run_case(one, mutant), budget=25)
    before = sum(schedule.size for schedule in verdict.schedules)
    after = sum(schedule.size for schedule in small.verdict.schedules)
    assert small.verdict.oracle == verdict.oracle == "detector"
    assert len(small.verdict.rids) < len(verdict.rids) and after < before
    assert "relay.output_tokens_buf" in small.verdict.message
    text = small.verdict.timeline()
    for column in ("host", "forward", "copy", "> stash"):
        assert column in text


def test_ddmin_keeps_what_matters() -> None:
    assert ddmin(range(40), lambda kept: {7, 31} <= set(kept)) == [7, 31]
    assert ddmin(range(9), lambda kept: True) == []
    assert ddmin([5], lambda kept: kept == [5]) == [5]
