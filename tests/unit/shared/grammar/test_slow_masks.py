"""Rows whose masks are slow: no other row waits for them, and their own streams stay the reference's."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from llguidance import LLMatcher

from shared.core.constraint import Forced
from shared.core.errors import BatonError, StepFailed
from shared.core.keys import RequestKey
from shared.core.request import NodeAsk, Request, RequestState
from shared.core.sampling_params import SamplingParams
from shared.device.cpu import do_nothing
from shared.grammar.compiler import GrammarCompiler
from shared.grammar.constraint import FADE, GrammarConstraint
from shared.grammar.grammars import Grammars
from shared.sched.steps.batch import ScheduleBatch
from shared.sched.steps.slow_masks import LEAST_S, rows_with_slow_masks
from tests.support.cores.core_rig import CoreKnobs, Job, Outcome, assert_streams, assert_whole, make_core
from tests.support.cores.steps import results_of, run_until_still, tokens_of
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.oracles.grammar_oracle import (
    GRAMMARS,
    JSON,
    VOCABULARY,
    AtOnce,
    Later,
    Seconds,
    always,
    following,
    make_grammars,
)

BACKENDS = ["inline", "simulated", "cpu"]
SLOW_S = 50.0  # no step of a test takes twice as long
BRACE = VOCABULARY.tokens.index(b"{")
GREEDY = SamplingParams(30, temperature=0.0)
CONSTRAINED = Job(0, (1, 2, 3), following(GREEDY, JSON), 5)
PLAIN = [Job(rid, (1, 2, rid), GREEDY, 5) for rid in (1, 2)]


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_plain_rows_take_no_longer_beside_slow_masks(backend: str, width: int) -> None:
    """Masks of 50 s that nobody makes: the plain rows take the steps that they take alone."""
    alone = make_core(CoreKnobs(backend, width=width, hit_rate=100))
    expected = results_of(alone)
    run_until_still(alone, PLAIN)

    executor, outcome = Later(), Outcome()
    core = make_core(
        CoreKnobs(backend, width=width, hit_rate=100), grammars=make_grammars(executor, clock=always(SLOW_S))
    )
    core.submit(CONSTRAINED.request())
    executor.run()  # the first mask, so that the row begins
    run_until_still(core, outcome=outcome)
    assert len(outcome.streams["r0"]) == 1 and executor.waiting, "its second mask is being made"
    seen = results_of(core)
    run_until_still(core, PLAIN, outcome)
    assert_streams(PLAIN, outcome)
    assert len(seen) == len(expected) and len(outcome.streams["r0"]) == 1
    while executor.waiting:
        executor.run()
        run_until_still(core, outcome=outcome)
    assert_streams([CONSTRAINED], outcome)
    assert_whole(core)


@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_of_plain_rows_count_beside_a_slow_row(backend: str) -> None:
    """A slow row has the mask behind its last token alone, so it takes no drafts; the others take theirs."""
    core = make_core(CoreKnobs(backend, width=4, hit_rate=100), grammars=make_grammars(clock=always(SLOW_S)))
    seen = results_of(core)
    outcome = run_until_still(core, [CONSTRAINED, *PLAIN])
    assert_streams([CONSTRAINED, *PLAIN], outcome)
    assert set(tokens_of(seen, "r0")) == {1} and 4 in tokens_of(seen, "r1")


def test_cheap_masks_are_made_while_the_step_runs() -> None:
    """Such a row sits no step out: it takes the steps of a row without a grammar, drafts included."""
    executor = Later()
    core = make_core(CoreKnobs(width=4, hit_rate=100), grammars=make_grammars(executor, clock=always(0.004)))
    seen, outcome = results_of(core), Outcome()
    core.submit(CONSTRAINED.request())
    executor.run()
    run_until_still(core, outcome=outcome)
    assert_streams([CONSTRAINED], outcome)
    assert not executor.waiting and max(tokens_of(seen, "r0")) > 1


@pytest.mark.parametrize(("num_steps", "num_chunks", "is_hidden"), [(2, 0, True), (1, 0, False), (2, 1, False)])
def test_masks_that_a_long_step_hides_are_cheap(num_steps: int, num_chunks: int, is_hidden: bool) -> None:
    """One long step may have been delayed, and one with chunks says nothing of the next."""
    executor, outcome = Later(), Outcome()
    core = make_core(
        CoreKnobs("simulated", width=4, hit_rate=100), grammars=make_grammars(executor, clock=always(0.02))
    )
    seen = results_of(core)
    run_until_still(core, PLAIN)
    for _ in range(num_steps):
        core.scheduler.planner.observe(replace(seen[-1], verify_seconds=0.05, num_prefill=num_chunks))
    core.submit(CONSTRAINED.request())
    executor.run()
    run_until_still(core, outcome=outcome)
    assert (len(outcome.streams["r0"]) > 1) is is_hidden and executor.waiting, "later steps take no time"


class FakeConstraint:
    def __init__(self, cost_s: float, error: BatonError | None = None) -> None:
        self.cost_s, self.error = cost_s, error
        self.is_ready = True
        self.asked: list[int] = []

    def prepare(self, emitted: Sequence[int]) -> None:
        if self.asked[-1:] != [len(emitted)]:
            self.asked.append(len(emitted))
            self.is_ready = False

    def is_prepared(self, emitted: Sequence[int]) -> bool:
        return self.is_ready and self.asked[-1:] == [len(emitted)]


def batch_of(*constraints: FakeConstraint, in_flight: int = 0) -> ScheduleBatch:
    reqs = []
    for number, constraint in enumerate(constraints):
        key = RequestKey("test", 1, f"r{number}", 0, 0)
        req = Request(key, NodeAsk(np.arange(3, dtype=np.int64), GREEDY, 0), number, constraint=constraint)  # type: ignore[arg-type]
        req.state, req.output_ids = RequestState.RUNNING, [7]
        reqs.append(req)
    return ScheduleBatch.of(reqs, [3] * len(reqs), 1, in_flight)


def names(rows: object) -> list[str]:
    return sorted(req.key.rid for req in rows)  # type: ignore[attr-defined]


def test_the_cheapest_masks_that_fit_into_a_step_are_its() -> None:
    costs = [FakeConstraint(cost_s) for cost_s in (0.003, 0.002, 0.001, 0.0015)]
    late, prepared = rows_with_slow_masks(batch_of(*costs), 0.0)
    assert names(late) == ["r0"] and not prepared, "3 ms do not fit beside 4.5 of 5 ms"
    assert [one.asked for one in costs] == [[1], [], [], []]


def test_a_slow_row_waits_for_its_token_in_flight() -> None:
    slow = FakeConstraint(1.0)
    late, prepared = rows_with_slow_masks(batch_of(slow, in_flight=1), 0.0)
    assert names(late) == ["r0"] and not prepared and not slow.asked


def test_a_row_whose_grammar_failed_steps_to_its_end() -> None:
    late, prepared = rows_with_slow_masks(batch_of(FakeConstraint(1.0, StepFailed("too complex"))), 0.0)
    assert not late and not prepared


def test_each_mask_that_a_thread_has_made_wakes_the_loop() -> None:
    executor, wakes = Later(), list[int]()
    ours = make_grammars(executor, wake=lambda: wakes.append(1))
    constraint = ours.constraint(JSON)
    executor.run()
    num_wakes = len(wakes)
    constraint.prepare([BRACE])
    assert len(wakes) == num_wakes and not constraint.is_prepared([BRACE])
    executor.run()
    assert len(wakes) == num_wakes + 1 and constraint.is_prepared([BRACE])
    ours.close()


def test_a_mask_waits_for_no_other_grammar_s_compilation() -> None:
    """One stream's next token would otherwise take as long as the grammars of all requests that have come before."""
    may_end, masked = threading.Event(), threading.Event()

    class Held(GrammarCompiler):
        def compile(self, grammar: str) -> LLMatcher:
            assert grammar == JSON or may_end.wait(HANG_GUARD_S)
            return super().compile(grammar)

    ours = Grammars(Held(VOCABULARY), VOCABULARY.eos_ids, do_nothing)
    constraint = ours.constraint(JSON)
    constraint._job.result(HANG_GUARD_S)
    other = ours.constraint(GRAMMARS[1])
    constraint.prepare([BRACE])
    constraint._job.add_done_callback(lambda _: masked.set())
    try:
        assert masked.wait(HANG_GUARD_S) and constraint.is_prepared([BRACE]) and not other.is_ready
    finally:
        may_end.set()
        ours.close()


def test_a_grammar_that_was_slow_is_taken_for_slow_for_a_while() -> None:
    ours = make_grammars(clock=Seconds([0.05, *[0.0] * 100]))
    constraint, out, costs = ours.constraint(JSON), np.zeros((2, ours.num_words), np.uint32), list[float]()
    while constraint.cost_s > LEAST_S:
        costs.append(constraint.cost_s)
        constraint.fill([], [BRACE], [0], out)
    assert costs[0] == 0.05 and costs == sorted(costs, reverse=True) and 10 < len(costs) < 40
    ours.close()


def test_a_copy_of_a_mask_says_nothing_of_what_masks_cost() -> None:
    ours = make_grammars(clock=always(SLOW_S))
    constraint, made, copied = ours.constraint(JSON), *np.zeros((2, 1, ours.num_words), np.uint32)
    constraint._clock = Seconds([])
    constraint.fill([], [], [], copied)
    constraint._clock = always(0.0)
    constraint.fill([BRACE], [], [], made)
    assert constraint.cost_s == pytest.approx(FADE * SLOW_S) and copied.any() and (copied != made).any()
    ours.close()


class TimedMatcher:
    """Its work takes seconds: each token 1, each mask 0.001, and the search for forced tokens 0.01."""

    def __init__(self) -> None:
        self.now = 0.0

    def consume_tokens(self, ids: list[int]) -> bool:
        self.now += len(ids)
        return True

    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
        self.now += 0.001

    def is_error(self) -> bool:
        return False

    def compute_ff_tokens(self) -> list[int]:
        self.now += 0.01
        return [8, 9]


def test_an_answer_that_is_replayed_makes_no_grammar_slow() -> None:
    """What each step costs counts: the masks, and the search for forced tokens."""
    matcher = TimedMatcher()
    constraint = GrammarConstraint(
        lambda: matcher,  # type: ignore[arg-type,return-value]
        1,
        frozenset(),
        lambda job, _: AtOnce().submit(job),
        lambda: matcher.now,
    )
    constraint.prepare([7] * 500)
    assert constraint.cost_s == pytest.approx(0.011) and constraint.forced == Forced(500, [8, 9])
