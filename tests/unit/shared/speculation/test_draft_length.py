"""The draft length follows acceptance and cost on a made-up engine: near the best fixed width wherever that lies, plain
where drafting loses, back when it would win again, few probes, no flapping."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from shared.engine.plan import StepResult
from shared.sched.steps.draft_length import LONGEST_PROBE, MEMORY, PROBE_STEPS, DraftLength, WidthChoice
from tests.support.cores.steps import made_up_result

WIDTHS = (1, 2, 3, 4, 6, 8)


def on_two_cores(num_rows: int, width: int) -> float:
    """Seconds of a step, as SmolLM2's go: weights once, then each token; a draft forward per draft."""
    draft = 0.0008 * (width - 1) if width > 1 else 0.0
    return 0.005 + 0.0005 * num_rows * width + draft


@dataclass
class Machine:
    """Steps with results one step late, as the overlap loop has them."""

    choice: WidthChoice
    rate: float  # each draft is right so often, if all before it were
    num_rows: int = 1
    seconds_of: Callable[[int, int], float] = on_two_cores
    noise: float = 0.05
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    widths: list[int] = field(default_factory=list)
    tokens: int = 0
    held_up: float = 1.0  # all steps take so many times as long: others use the machine too
    _late: deque[StepResult] = field(default_factory=deque)
    _can_draft: bool = True  # as in ScheduleBatch

    def run(self, num_steps: int) -> list[int]:
        """The widths of these steps."""
        for _ in range(num_steps):
            width = self.choice.choose(self.num_rows)
            width, self._can_draft = width if self._can_draft else 1, width > 1
            self.widths.append(width)
            self._late.append(self._step(width))
            if len(self._late) > 1:
                self.choice.observe(self._late.popleft())
        return self.widths[-num_steps:]

    def _step(self, width: int) -> StepResult:
        right = self.rng.random((self.num_rows, width - 1)) < self.rate
        accept_lens = 1 + right.cumprod(axis=1).sum(axis=1).astype(np.int32)
        seconds = self.seconds_of(self.num_rows, width) * self.held_up * (1 + self.noise * self.rng.random())
        if self.noise and self.rng.random() < 0.02:
            seconds *= 10  # the system was elsewhere
        self.tokens += int(accept_lens.sum())
        return made_up_result(accept_lens, seconds, width=width)


def adaptive() -> DraftLength:
    return DraftLength(WIDTHS, depth=WIDTHS[-1] - 1)


def true_speed(rate: float, num_rows: int, width: int) -> float:
    """Tokens per second with this width for ever."""
    tokens = num_rows * sum(rate**i for i in range(width))
    return tokens / on_two_cores(num_rows, width)


@pytest.mark.parametrize("num_rows", [1, 32])
@pytest.mark.parametrize("rate", [0.0, 0.6, 0.95])
def test_about_as_fast_as_the_best_fixed_width(rate: float, num_rows: int) -> None:
    """From the first step on, guesses and probes included."""
    machine = Machine(adaptive(), rate, num_rows)
    machine.run(1500)
    seconds = sum(on_two_cores(num_rows, width) for width in machine.widths)
    assert machine.tokens / seconds > 0.93 * max(true_speed(rate, num_rows, width) for width in WIDTHS)


def test_falls_back_to_plain_soon_and_comes_back() -> None:
    machine = Machine(adaptive(), rate=0.9)
    assert np.mean(machine.run(300)[100:]) > 5
    machine.rate = 0.05
    lost = machine.run(400)
    assert np.mean(lost[3 * MEMORY :]) < 1.2, "decided within three memories of verifies; then probes only"
    machine.rate = 0.9
    machine.run(2 * LONGEST_PROBE)
    assert np.mean(machine.run(200)) > 5, "a probe or two find out"


@pytest.mark.parametrize("rate", [0.6, 0.8])
@pytest.mark.parametrize("seed", range(3))
def test_a_machine_that_others_use_now_and_then_is_forgotten(rate: float, seed: int) -> None:
    """Some ten steps are held up, all of one width or some of two, then none for long, again and again; and the machine
    is slower for all widths for a long while."""
    machine = Machine(adaptive(), rate, rng=np.random.default_rng(seed))
    best = max(true_speed(rate, 1, width) for width in WIDTHS)
    machine.run(200)
    for held_up, num_steps in [(6.0, 8), (3.0, 14), (2.0, 300), (20.0, 5)]:
        machine.held_up = held_up
        machine.run(num_steps)
        machine.held_up, before = 1.0, machine.tokens
        widths = machine.run(300)
        seconds = sum(on_two_cores(1, width) for width in widths)
        assert (machine.tokens - before) / seconds > 0.88 * best, f"{np.unique(widths, return_counts=True)}"


def test_plain_decoding_remembers_why_it_is_plain() -> None:
    """Where drafting always loses it is tried ever more seldom, though what was measured of it gets old."""
    choice = DraftLength((1, 2, 3, 4), depth=3)
    machine = Machine(choice, rate=0.35, num_rows=4, seconds_of=lambda rows, width: 1 + 0.5 * (width - 1))
    machine.run(600)
    assert np.mean([width > 1 for width in machine.run(1500)]) < 0.06


def test_drafts_that_lose_a_little_are_given_up() -> None:
    """Four tokens in the time of 4.1."""
    choice = DraftLength((1, 4), depth=3)
    machine = Machine(choice, rate=1.0, noise=0.0, seconds_of=lambda rows, width: 1.0 if width == 1 else 4.1)
    machine.run(300)
    assert np.mean([width > 1 for width in machine.run(1000)]) < 0.1


def test_more_rows_mean_fewer_drafts() -> None:
    """The same acceptance: what pays for one row is dear for 32, and back."""
    machine = Machine(adaptive(), rate=0.6)
    alone = machine.run(300)[100:]
    machine.num_rows = 32
    crowd = machine.run(300)[100:]
    machine.num_rows = 1
    again = machine.run(300)[100:]
    assert np.median(crowd) == 1 < np.median(alone) and np.median(again) == np.median(alone)


def test_a_batch_that_ends_row_by_row_probes_as_seldom() -> None:
    """Drafts pay for its last row and lose for four."""
    costs = {4: 0.9, 1: 0.1}
    machine = Machine(adaptive(), rate=0.7, seconds_of=lambda rows, width: 1 + costs[rows] * (width - 1))
    of_four, of_one = list[int](), list[int]()
    for _ in range(40):
        for num_rows, num_steps, seen in ((4, 56, of_four), (1, 8, of_one)):
            machine.num_rows = num_rows
            seen += machine.run(num_steps)
    assert np.mean([width > 1 for width in of_four[-20 * 56 :]]) < 0.04
    assert np.mean([width > 1 for width in of_one[-20 * 8 :]]) > 0.8


@pytest.mark.parametrize("rate", [0.0, 0.95])
def test_probes_are_few_and_short(rate: float) -> None:
    machine = Machine(adaptive(), rate, noise=0.0)
    machine.run(500)
    tried = [(width == 1) != (rate == 0.0) for width in machine.run(4 * LONGEST_PROBE)]
    assert 0 < sum(tried) <= 5 * PROBE_STEPS
    most = PROBE_STEPS + (rate > 0)  # a probe of plain steps ends with the one that the drafter needs
    assert "1" * (most + 1) not in "".join(str(int(other)) for other in tried)


def test_steps_that_compute_prompts_too_say_nothing_of_cost() -> None:
    choice = adaptive()
    for _ in range(50):
        width = choice.choose(1)
        choice.observe(made_up_result(np.full(1, width), 0.001 if width > 1 else 0.01, width=width))
        choice.observe(made_up_result(np.array([0, width]), 9.0 * width, width=width, num_prefill=1))
    assert choice.choose(1) == WIDTHS[-1]


def test_empty_plans_and_steps_of_prompts_alone_change_nothing() -> None:
    choice = adaptive()
    assert {choice.choose(0) for _ in range(100)} == {WIDTHS[-1]}
    for _ in range(100):
        choice.observe(made_up_result(np.array([1, 0]), 0.01, width=4, num_prefill=2))
    assert {choice.choose(1) for _ in range(100)} == {WIDTHS[-1]}
