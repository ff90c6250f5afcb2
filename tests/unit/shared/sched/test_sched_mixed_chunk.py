"""Prompts beside running rows, by a budget of milliseconds: on a made-up engine whose steps cost a known time, chunks
fill it and do not pass it; prompts go on however small it is; a step that was held up changes little."""

from __future__ import annotations

import io
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from shared.config.load import load
from shared.config.processes import NodeParts, NodeProcessConfig
from shared.config.settings.settings import SchedConfig
from shared.core.errors import ConfigError
from shared.device.clock import HostClock
from shared.device.cpu import do_nothing
from shared.engine.plan import StepPlan, StepResult
from shared.node.assembly.build_core import build_core
from shared.node.machine.cores import NodeCores
from shared.node.records.core import NodeCore
from shared.observe.log import Logger
from shared.ranks.leader import RankProcesses
from shared.sched.steps.mixed_chunk import LEAST, BudgetedChunk, FixedChunk, MixedChunk, make_mixed_chunk
from tests.support.cores.core_rig import CoreKnobs, Job, assert_streams, draw_jobs, make_core, run_local
from tests.support.cores.steps import made_up_result

MOST = 512
RAMP = 16  # steps


def result(num_rows: int, prompt_tokens: int, seconds: float) -> StepResult:
    num_prefill = int(prompt_tokens > 0)
    accept_lens = np.ones(num_rows + num_prefill, np.int32)
    return made_up_result(accept_lens, seconds, num_prefill=num_prefill, prompt_tokens=prompt_tokens)


def on_one_core(num_rows: int, prompt_tokens: int) -> float:
    return 0.010 + 0.0005 * num_rows + 0.0007 * prompt_tokens


@dataclass
class Machine:
    """Steps with results one step late, as the overlap loop has them."""

    choice: MixedChunk
    num_rows: int = 4
    seconds_of: Callable[[int, int], float] = on_one_core
    held_up: float = 1.0  # all steps take so many times as long
    _late: deque[StepResult] = field(default_factory=deque)

    def step(self, prompt_tokens: int | None = None) -> tuple[int, float]:
        """(prompt tokens, seconds). `prompt_tokens`: all that there are; None: many."""
        chosen = self.choice.choose()
        tokens = chosen if prompt_tokens is None else min(chosen, prompt_tokens)
        seconds = self.seconds_of(self.num_rows, tokens) * self.held_up
        self._late.append(result(self.num_rows, tokens, seconds))
        if len(self._late) > 1:
            self.choice.observe(self._late.popleft())
        return tokens, seconds

    def run(self, num_steps: int, prompt_tokens: int | None = None) -> list[tuple[int, float]]:
        return [self.step(prompt_tokens) for _ in range(num_steps)]


def fitting(budget_s: float, num_rows: int) -> float:
    """Tokens that take exactly the budget on one core."""
    return (budget_s - on_one_core(num_rows, 0)) / 0.0007


@pytest.mark.parametrize(("budget_s", "num_rows"), [(0.035, 1), (0.06, 20), (0.12, 4)])
def test_steps_fill_the_budget_and_do_not_pass_it(budget_s: float, num_rows: int) -> None:
    machine = Machine(BudgetedChunk(budget_s, MOST), num_rows)
    assert all(seconds <= budget_s for _, seconds in machine.run(RAMP))
    after = machine.run(50)
    assert all(seconds <= budget_s for _, seconds in after)
    assert after[-1][1] > 0.85 * budget_s


@pytest.mark.parametrize("budget_s", [1e-6, 0.005, 0.012])
def test_prompts_go_on_however_small_the_budget_is(budget_s: float) -> None:
    assert {tokens for tokens, _ in Machine(BudgetedChunk(budget_s, MOST)).run(30)} == {LEAST}
    assert Machine(BudgetedChunk(budget_s, LEAST // 2)).run(30)[-1][0] == LEAST // 2


def test_tokens_free_until_the_device_is_busy_make_no_huge_steps() -> None:
    """What the first tokens cost says nothing of what more of them would."""

    def free_at_first(num_rows: int, tokens: int) -> float:
        return 0.010 + 0.0005 * max(0, num_rows + tokens - 100)

    machine = Machine(BudgetedChunk(0.030, MOST), seconds_of=free_at_first)
    steps = machine.run(300)
    assert max(seconds for _, seconds in steps) <= 0.030 * 1.25
    assert np.mean([tokens for tokens, _ in steps[RAMP:]]) > 100


def test_held_up_steps_make_chunks_small_for_a_few_steps_only() -> None:
    """A first one that compiles, and one in the middle that another process delayed."""
    machine = Machine(BudgetedChunk(0.06, MOST), held_up=1000.0)
    for _ in range(3):
        machine.run(1)
        machine.held_up = 1.0
        assert machine.run(2 * RAMP)[-1][0] > 0.8 * fitting(0.06, 4)
        machine.held_up = 10.0


def test_one_step_that_was_held_up_halves_the_chunk_at_most() -> None:
    choice = BudgetedChunk(0.06, MOST)
    for _ in range(RAMP):
        choice.observe(result(4, choice.choose(), 0.02))
    before = choice.choose()
    choice.observe(result(4, before, 100.0))
    assert choice.choose() == before // 2


def test_the_few_tokens_that_end_a_prompt_change_nothing() -> None:
    """Many of them would fit, but how a step of many would go was not measured."""
    machine = Machine(BudgetedChunk(0.06, MOST))
    machine.run(RAMP)
    before = machine.step()[0]
    machine.run(2 * RAMP, 3)
    assert machine.step()[0] == before


@pytest.mark.parametrize("seconds", [0.001, 10.0])
def test_unmixed_steps_and_steps_without_a_clock_teach_nothing(seconds: float) -> None:
    choice = BudgetedChunk(0.06, MOST)
    for _ in range(20):
        for taught in (result(0, 300, seconds), result(4, 0, seconds), result(4, 300, 0.0)):
            choice.observe(taught)
    assert choice.choose() == LEAST
    choice.observe(result(4, LEAST, 0.02))
    assert choice.choose() > LEAST


def test_without_a_budget_chunks_are_as_the_settings_say() -> None:
    assert isinstance(make_mixed_chunk(0.0, 64), FixedChunk)
    assert {tokens for tokens, _ in Machine(make_mixed_chunk(0.0, 64)).run(30)} == {64}
    assert NodeParts().sched.itl_budget == 0
    budgeted = make_mixed_chunk(60.0, MOST)
    assert Machine(budgeted).run(30)[-1][1] == pytest.approx(0.06, rel=0.15)
    with pytest.raises(ConfigError, match="--itl-budget"):
        SchedConfig(itl_budget=-1.0)


class Priced(HostClock):
    """A clock on which each launched step takes what it is said to cost."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now


def on_a_priced_clock(core: NodeCore, budget_s: float) -> list[StepPlan]:
    """Give the core a budget, and steps the times of `on_one_core`. The plans are added as they are launched."""
    clock, launch, forward, plans = Priced(), core.engine.launch, core.engine.worker.forward, []
    core.engine.streams = replace(core.engine.streams, clock=clock)
    core.scheduler.planner.mixed_chunk = BudgetedChunk(budget_s, MOST)

    def remember(plan):  # type: ignore[no-untyped-def]
        plans.append(plan)
        return launch(plan)

    def forward_for(plan, lease):  # type: ignore[no-untyped-def]
        yield from forward(plan, lease)
        clock.now += seconds_of(plan)

    core.engine.launch = remember  # type: ignore[method-assign]
    core.engine.worker.forward = forward_for  # type: ignore[method-assign]
    return plans


def seconds_of(plan: StepPlan) -> float:
    return on_one_core(plan.batch_size - plan.num_prefill, plan.prompt_tokens)


def long_prompt(rid: int, num_prompt: int, max_tokens: int) -> Job:
    rng = random.Random(rid)
    (drawn,) = draw_jobs(rng, 1, 0.0)
    sampling = replace(drawn.sampling, max_tokens=max_tokens, stop_token_ids=())
    return replace(drawn, rid=rid, prompt=tuple(rng.randrange(95) for _ in range(num_prompt)), sampling=sampling)


@pytest.mark.parametrize("backend", ["inline", "simulated"])
@pytest.mark.parametrize("budget_s", [0.0001, 0.04, 0.08])
def test_a_node_keeps_the_budget_and_says_the_same(backend: str, budget_s: float) -> None:
    core = make_core(CoreKnobs(backend, chunk_size=256, prefix_cache=False, num_pages=300, seed=1))
    plans = on_a_priced_clock(core, budget_s)
    jobs = [long_prompt(rid, 20, 80) for rid in range(3)] + [long_prompt(rid, 250, 4) for rid in range(3, 8)]
    assert_streams(jobs, run_local(core, jobs))
    mixed = [plan for plan in plans if 0 < plan.num_prefill < plan.batch_size]
    assert len(mixed) > 10
    least = on_one_core(8, LEAST)
    assert all(seconds_of(plan) <= max(budget_s, least) for plan in mixed)
    assert max(plan.prompt_tokens for plan in mixed) <= LEAST or budget_s > least
    counted = core.queues.counters
    assert counted.mixed_steps == len(mixed)
    assert counted.mixed_prompt_tokens == sum(plan.prompt_tokens for plan in mixed)


def test_the_flags_reach_the_scheduler_of_a_node() -> None:
    given = {"model": {"model": "hashlm"}, "memory": {"kv_bytes": 1 << 20}}
    given |= {"sched": {"device": "inline", "itl_budget": 40.0, "mixed_chunk_size": 48, "growth_reserve": 0.5}}
    config = load(NodeProcessConfig, given, fixed={"node": {"role": "decode"}})
    threads = torch.get_num_threads()
    cores = NodeCores(config.cores, config.parts.parallel, "n")
    try:
        core = build_core(config, Logger("n", io.StringIO()), do_nothing, RankProcesses(config, "n"), cores)
        assert isinstance(core.scheduler.planner.mixed_chunk, BudgetedChunk)
        assert core.settings.growth_reserve == 0.5
        assert Machine(core.scheduler.planner.mixed_chunk, seconds_of=lambda *_: 0.001).run(20)[-1][0] == 48
        core.close()
    finally:
        cores.close()
        torch.set_num_threads(threads)
