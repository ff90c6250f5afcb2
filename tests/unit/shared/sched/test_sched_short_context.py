"""A model whose longer texts have other KV from their first token on: no step computes a token beyond the bound with
the KV of a short text, and no page of the one kind is taken for one of the other."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from shared.core.page_identity import LONG
from shared.core.request import Request, RequestState
from shared.core.sampling_params import SamplingParams
from shared.sched.steps.batch import ScheduleBatch
from shared.sched.steps.events import ContextOutgrown
from shared.sched.steps.short_rows import rows_near
from tests.support.cores.core_pair import make_pair, run_pair
from tests.support.cores.core_rig import CoreKnobs, Job, Outcome, assert_streams, assert_whole, make_core, run_local

BOUND, PAGE = 40, 8
KNOBS = CoreKnobs(
    "simulated", chunk_size=16, page_size=PAGE, num_pages=120, spec="none", hit_rate=100, short_context=BOUND
)
# below the bound; up to it; across it, in windows and at their ends; beyond it
LENGTHS = (9, BOUND - 16, BOUND - 8, BOUND - 3, BOUND - 1, BOUND, BOUND + 1, BOUND + 30)
DRAFTS = {
    "none": KNOBS,
    "chain": replace(KNOBS, spec="eagle", width=4),
    "tree": replace(KNOBS, spec="eagle", width=4, topk=2, steps=2),
    "mtp": replace(KNOBS, spec="mtp", width=4),
    "ngram": replace(KNOBS, spec="ngram", width=5),
    "drawn": replace(KNOBS, spec="eagle", width=3, draw_widths=True),
}
COLD = replace(KNOBS, cold_pages=60, num_pages=34)
TIGHT = replace(KNOBS, num_pages=26, max_running=4)


def jobs(first: int = 0) -> list[Job]:
    """All prompts begin alike, so that pages would be shared. The second ones are greedy, so that drafts are taken."""
    stem = random.Random(3).choices(range(95), k=max(LENGTHS))
    params = SamplingParams(max_tokens=16, temperature=0.0 if first else 0.8)
    made = [Job(first + rid, tuple(stem[:length]), params, seed=rid) for rid, length in enumerate(LENGTHS)]
    return [replace(job, short_context=BOUND) for job in made]


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("overlap", [True, False])
def test_streams_are_those_of_each_row_alone(drafts: str, overlap: bool) -> None:
    """Twice: the second time prompts are cached."""
    core = make_core(replace(DRAFTS[drafts], overlap=overlap))
    outcome = Outcome()
    for first in (0, 20):
        run_local(core, jobs(first), retract_every=7, rng=random.Random(1), outcome=outcome)
        assert_streams(jobs(first), outcome)
    assert core.queues.counters.cached_prompt_tokens > 0
    assert_whole(core)
    core.close()


@pytest.mark.parametrize("knobs", [*DRAFTS.values(), COLD, TIGHT, replace(COLD, spec="eagle", width=3)])
def test_hand_offs_are_computed_again_at_the_bound(knobs: CoreKnobs) -> None:
    pair = make_pair(knobs)
    for first in (0, 20):
        run_pair(pair, jobs(first), retract_every=11, rng=random.Random(2))
        assert_streams(jobs(first), pair.outcome)
    for core in (pair.prefill, pair.decode):
        assert_whole(core)
    pair.close()


def test_a_row_is_computed_again_once() -> None:
    """Four of the jobs cross the bound. No other row begins again, and no token is dropped."""
    core = make_core(replace(KNOBS, num_pages=200))
    outcome = run_local(core, jobs())
    assert_streams(jobs(), outcome)
    assert core.queues.counters.retractions == 4
    assert core.queues.counters.output_tokens == 16 * len(LENGTHS)
    core.close()


def test_who_resumes_beyond_the_bound_begins_there() -> None:
    """As after a node's death: the first tokens of the answer are known."""
    core, outcome, right = make_core(KNOBS), Outcome(), jobs()[3].expected()
    for num_known in (3, 4, 9):
        req = replace(jobs()[3], rid=num_known).request()
        req.output_ids.extend(right[:num_known])
        outcome.streams[f"r{num_known}"] = right[:num_known]
        core.scheduler.intake.submit(req)
    run_local(core, [], outcome=outcome)
    assert list(outcome.streams.values()) == [right] * 3
    assert core.queues.counters.retractions == 1, "of the first, whose tokens reach up to the bound"
    core.close()


def test_short_and_long_texts_share_no_page() -> None:
    core = make_core(KNOBS)
    for rid, length, num_cached in (
        (0, BOUND, 0),
        (1, BOUND + 1, 0),
        (2, BOUND + 9, BOUND),
        (3, BOUND - 1, BOUND - PAGE),
    ):
        prompt = tuple(range(3, 3 + length))
        outcome = run_local(core, [Job(rid, prompt, SamplingParams(1, temperature=0.0), seed=0)])
        assert outcome.ends[f"r{rid}"].cached_tokens == num_cached
    core.close()


def row(index: int, adapter: str = "") -> Request:
    req = Job(index, (1,), SamplingParams(9), 0, adapter=adapter).request()
    req.state = RequestState.RUNNING
    return req


@pytest.mark.parametrize(
    ("committed", "width", "in_flight", "found"),
    [
        (BOUND - 3, 3, 1, ""),
        (BOUND - 2, 3, 1, "waiting"),
        (BOUND - 2, 3, 0, "narrow"),
        (BOUND - 1, 3, 0, "narrow"),
        (BOUND, 3, 0, "outgrown"),
        (BOUND - 1, 1, 1, ""),
        (BOUND, 1, 1, "waiting"),
        (BOUND, 1, 0, "outgrown"),
    ],
)
def test_rows_near_the_bound(committed: int, width: int, in_flight: int, found: str) -> None:
    reqs = [row(0), row(1, LONG), row(2)]
    batch = ScheduleBatch.of(reqs, [committed, committed + BOUND, 5], step=1, in_flight=in_flight)
    near = rows_near(BOUND, batch, width)
    assert {name: [*rows] for name, rows in near._asdict().items() if rows} == ({found: [reqs[0]]} if found else {})
    assert not any(rows_near(0, batch, width))


def test_a_row_that_outgrows_the_context_is_told_of() -> None:
    core = make_core(KNOBS)
    core.scheduler.intake.submit(jobs()[5].request())
    told = []
    while core.queues.requests:
        core.loop.step(block=True)
        told += [event for event in core.queues.take_events() if isinstance(event, ContextOutgrown)]
    assert [event.key.rid for event in told] == ["r5"]
    core.close()


def test_a_longer_text_waits_for_no_short_pages() -> None:
    core = make_core(KNOBS)
    short = replace(jobs()[3], rid=1).request()
    core.scheduler.intake.submit(jobs()[2].request())
    core.loop.step()
    prefixes = core.queues.prefixes
    assert prefixes.makes_wait(short), "for the same beginning"
    short.output_ids.extend([1] * 9)
    assert not prefixes.makes_wait(short)
    run_local(core, [])
    core.close()
