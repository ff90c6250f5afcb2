"""Steps of any width after steps of any other, plain ones included, in flight together: streams are the reference's,
every verify accepts what its own width allows, reservations hold, nothing leaks."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest

from shared.core.sampling_params import SamplingParams
from shared.engine.plan import StepResult
from shared.node.records.core import NodeCore
from shared.sched.steps.draft_length import DraftLength
from tests.support.cores.core_rig import CoreKnobs, Job, assert_streams, assert_whole, draw_jobs, make_core, run_local
from tests.support.cores.equivalence_cells import (
    HIT_RATE,
    NUM_PAGES,
    Watch,
    most_accepted,
    run_alone,
    run_disaggregated,
)
from tests.support.hazards.attach import watching

BLOCK = 5
NUM_BLOCKS = 8


def run_seed(seed: int, watch: Watch) -> None:
    rng = random.Random(seed)
    page_size = rng.choice([1, 16])
    knobs = CoreKnobs(
        backend=rng.choice(["simulated", "simulated", "cpu", "inline"]),
        overlap=rng.random() < 0.7,
        chunk_size=rng.choice([3, 16, 64]),
        mix=rng.random() < 0.7,
        page_size=page_size,
        num_pages=rng.choice(NUM_PAGES[page_size]),
        max_running=rng.choice([3, 6]),
        prefix_cache=rng.random() < 0.5,
        spec=rng.choice(["eagle", "eagle", "mtp", "ngram"]),
        width=rng.choice([2, 4, 7]),
        draw_widths=True,
        needs_cpu_seq_lens=rng.random() < 0.3,
        seed=seed,
    )
    jobs = draw_jobs(rng, rng.randrange(8, 16), rng.choice([0.0, 0.8]))
    run = run_disaggregated if rng.random() < 0.5 else run_alone
    run(knobs, jobs, rng.choice([0, 0, 9]), rng, watch)


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_streams_and_accepted_lengths(block: int) -> None:
    watch = Watch()
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        try:
            run_seed(seed, watch)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert watch.verifies > 100


@pytest.mark.parametrize("seed", range(6))
def test_trees_after_plain_steps_and_before_them(seed: int) -> None:
    rng = random.Random(seed)
    backend = rng.choice(["simulated", "inline"])
    knobs = CoreKnobs(
        backend=backend, overlap=rng.random() < 0.7, page_size=rng.choice([1, 16]), num_pages=500, width=6, topk=2,
        steps=3, draw_widths=True, seed=seed,
    )  # fmt: skip
    jobs = draw_jobs(rng, 8, rng.choice([0.0, 0.8]), max_prompt=60)
    with watching() if backend == "simulated" else nullcontext() as hazards:
        core = make_core(knobs)
        if hazards is not None:
            hazards.watch(core)
        outcome = run_local(core, jobs, retract_every=rng.choice([0, 7]), rng=rng)
    assert core.queues.counters.spec_accepted_tokens > 10
    assert_streams(jobs, outcome)
    assert_whole(core)
    core.close()


def test_a_reservation_is_for_the_widths_in_flight() -> None:
    """Long after the last wide step, whose pages are used up, a plain step reserves one token and no window."""
    core = make_core(CoreKnobs(width=8, hit_rate=0, page_size=1, prefix_cache=False, overlap=False))
    core.scheduler.intake.submit(Job(0, (1, 2, 3), SamplingParams(max_tokens=40), 5).request())
    core.scheduler.planner.widths = (widths := Scripted([1] * 3 + [8] * 2 + [1] * 30))
    most = 0
    while core.queues.requests or not core.loop.idle:
        core.loop.step(block=True)
        core.queues.take_events()
        for req in core.queues.running.reqs:
            if widths.left < 15 and req.row:
                most = max(most, int(core.kv.rows.num_pages[req.row]) - req.computed)
    core.close()
    assert most == 1


def test_the_last_plain_step_before_drafts_leaves_state() -> None:
    core = make_core(CoreKnobs(width=8, hit_rate=100, overlap=False))
    core.scheduler.intake.submit(Job(0, (1, 2, 3), SamplingParams(max_tokens=40), 5).request())
    core.scheduler.planner.widths = Scripted([8] + [1] * 3 + [8] * 3)
    launch, steps = core.engine.launch, []
    core.engine.launch = lambda plan: (steps.append((plan.width, plan.drafts_next)), launch(plan))[1]  # type: ignore
    run_local(core, [])
    core.close()
    drafting = (8, True)
    assert steps[:8] == [drafting, drafting, (1, False), (1, False), (1, False), (1, True), drafting, drafting]


NUM_DRAFTS, NUM_PLAIN = 3, 12  # more than are written together, and no multiple of them


def run_plainly(core: NodeCore, jobs: list[Job], retract: bool = False) -> list[int]:
    """Decode jobs: some plain steps, then drafts, then plain steps to the end. Return the first job's answer."""
    core.scheduler.planner.widths = Scripted([1] * NUM_PLAIN + [NUM_DRAFTS + 1] * 4 + [1])
    outcome = run_local(core, jobs, retract_every=9 if retract else 0, rng=random.Random(1))
    for job in jobs:
        assert outcome.streams[f"r{job.rid}"] == job.expected()
    return outcome.streams[f"r{jobs[0].rid}"]


@pytest.mark.parametrize("backend", ["inline", "cpu", "simulated"])
@pytest.mark.parametrize("retract", [False, True])
@pytest.mark.parametrize("others", [(), (21, 50)], ids=["alone", "with others"])
def test_drafts_after_plain_steps_read_whole_kv(backend: str, retract: bool, others: tuple[int, ...]) -> None:
    """Accepted lengths show a slot whose draft KV was not written, in this request or in one that begins with its text.

    `others`: lengths of other prompts."""
    knobs = CoreKnobs(
        backend=backend, width=NUM_DRAFTS + 1, hit_rate=HIT_RATE, page_size=1, num_pages=600, chunk_size=8
    )
    core, tokens, watch = make_core(knobs), [1, 2, 3], Watch()
    watch.on(core, most_accepted(knobs))
    for n in range(4):
        jobs = [Job(n, tuple(tokens), SamplingParams(max_tokens=30 + 3 * n), 5)]
        for i, length in enumerate(others):
            prompt = tuple((length + n + k) % 90 for k in range(length))
            jobs.append(Job(10 * (i + 1) + n, prompt, SamplingParams(max_tokens=9 + 8 * n), i))
        answer = run_plainly(core, jobs, retract)
        tokens = [*tokens, *answer]
    assert core.queues.counters.spec_accepted_tokens > NUM_DRAFTS
    assert core.queues.counters.cached_prompt_tokens > 100
    core.close()


class Scripted:
    """A WidthChoice: the next of a list with each result that has decode rows and, for a wide entry, drafts.

    Prompts' chunks and late results of plain steps, which a retraction brings at the clock's whim, use nothing up."""

    def __init__(self, widths: list[int]) -> None:
        self._widths = widths

    @property
    def left(self) -> int:
        return len(self._widths)

    def choose(self, num_rows: int) -> int:
        return self._widths[0]

    def observe(self, result: StepResult) -> None:
        has_decoded = len(result.row_ids) > result.num_prefill
        if has_decoded and self.left > 1 and (result.width > 1 or self._widths[0] == 1):
            self._widths.pop(0)


@pytest.mark.parametrize(("hit_rate", "lowest", "highest"), [(100, 3.5, 6.0), (0, 1.0, 1.3)])
def test_the_adaptive_choice_in_a_core(hit_rate: int, lowest: float, highest: float) -> None:
    """Simulated streams have no clock: acceptance decides. Drafts that never agree are given up."""
    core = make_core(CoreKnobs(backend="simulated", width=6, hit_rate=hit_rate, num_pages=400, seed=hit_rate))
    core.scheduler.planner.widths = DraftLength(range(1, 7), 5)
    jobs = [Job(i, (i, 2, 3), SamplingParams(max_tokens=200), i) for i in range(4)]
    launch, widths = core.engine.launch, []
    core.engine.launch = lambda plan: (widths.append(plan.width), launch(plan))[1]  # type: ignore[method-assign]
    outcome = run_local(core, jobs)
    core.close()
    for job in jobs:
        assert outcome.streams[f"r{job.rid}"] == job.expected()
    later = widths[len(widths) // 2 :]
    assert lowest <= sum(later) / len(later) <= highest
