"""Answers under grammars, in the whole engine: the same tokens as the reference's, which asks a grammar anew for each.

With and without overlap, with every kind of draft, retracted, restored, handed over, beside rows without a grammar.
Every seed draws its cell.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace

import msgspec
import pytest
from llguidance import LLMatcher

from shared.core.sampling_params import SamplingParams
from shared.node.records.core import NodeCore
from shared.wire.messages import Grant
from tests.support.cores.core_rig import (
    EOS,
    CoreKnobs,
    Job,
    Outcome,
    assert_streams,
    assert_whole,
    draw_jobs,
    make_core,
    run_local,
)
from tests.support.cores.step_faults import PLACES, break_at, run_with_fault
from tests.support.cores.steps import run_until_still
from tests.support.hazards.attach import watching
from tests.support.oracles.grammar_oracle import (
    JSON,
    Later,
    allows_of,
    draw_grammar,
    drawn_costs,
    following,
    make_grammars,
)
from tests.support.worlds.node_pair import Net, assert_clean, make_node

DRAFTS = (
    {},
    {"width": 4},
    {"width": 3, "spec": "ngram"},
    {"width": 3, "spec": "mtp"},
    {"width": 7, "topk": 2, "steps": 2},
    {"width": 4, "draw_widths": True},
)
BLOCK = 6
NUM_BLOCKS = 6
TOO_COMPLEX = LLMatcher.grammar_from_regex("(a?){1500}a{1500}")


def draw_knobs(rng: random.Random, seed: int) -> CoreKnobs:
    return CoreKnobs(
        backend=rng.choice(["simulated", "simulated", "cpu", "inline"]),
        overlap=rng.random() < 0.7,
        chunk_size=rng.choice([3, 16, 64]),
        mix=rng.random() < 0.7,
        num_pages=rng.choice([40, 100]),
        prefix_cache=rng.random() < 0.5,
        needs_cpu_seq_lens=rng.random() < 0.3,
        cold_pages=rng.choice([0, 30]),
        seed=seed,
        **DRAFTS[seed % len(DRAFTS)],
    )


def constrained(jobs: list[Job], rng: random.Random, share: float = 0.6) -> list[Job]:
    """Some of them follow a grammar; each of these ends with the model's own end."""
    return [one if rng.random() > share else with_grammar(one, draw_grammar(rng)) for one in jobs]


def with_grammar(one: Job, grammar: str, **more: object) -> Job:
    return replace(one, sampling=replace(following(one.sampling, grammar), **more))  # type: ignore[arg-type]


def make_core_with_slow_masks(knobs: CoreKnobs, seed: int) -> NodeCore:
    executor = Later()
    core = make_core(knobs, grammars=make_grammars(executor, clock=drawn_costs(seed)))
    core.loop.step = executor.before(core.loop.step, seed)  # type: ignore[method-assign]
    return core


def run(seed: int) -> int:
    """Return how many answers a grammar ended."""
    rng = random.Random(seed)
    knobs = draw_knobs(rng, seed)
    jobs = constrained(draw_jobs(rng, rng.randrange(6, 14), max_prompt=100), rng)
    with watching() if knobs.backend == "simulated" else nullcontext() as hazards:
        core = make_core_with_slow_masks(knobs, seed) if seed // BLOCK % 2 else make_core(knobs)
        if hazards is not None:
            hazards.watch(core)
        outcome = run_local(core, jobs, retract_every=rng.choice([0, 5, 9]), rng=rng)
    assert_streams(jobs, outcome)
    assert_whole(core)
    core.close()
    return sum(bool(one.sampling.grammar) and outcome.streams[f"r{one.rid}"][-1] == EOS for one in jobs)


@pytest.mark.rule("H16")
@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_streams_under_grammars(block: int) -> None:
    ended = 0
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        try:
            ended += run(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert ended > 8, "grammars end answers"


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("seed", [1, 2])
def test_hand_offs_under_grammars(seed: int, width: int) -> None:
    """The prefill node draws the first token by a mask, the decode node goes on from there; n = 3, too."""
    rng = random.Random(seed)
    p, d = make_node("prefill", "p0", CoreKnobs(width=width)), make_node("decode", "d0", CoreKnobs(width=width))
    net = Net([p, d])
    jobs = constrained(draw_jobs(rng, 10, max_prompt=60), rng, share=0.8)
    keys = [net.generate(p, one, d) for one in jobs]
    siblings = replace(with_grammar(Job(50, (1, 2, 3), SamplingParams(30), 7), JSON))
    leader = net.generate(p, siblings, d, num_sequences=3)
    net.run()
    for one, key in zip(jobs, keys, strict=True):
        assert net.router.streams[key] == one.expected(), one.sampling.grammar
    assert len({tuple(stream) for key, stream in net.router.streams.items() if key.rid == leader.rid}) == 3
    assert net.messages(Grant)
    assert_clean(p, d)


def test_nodes_with_unlike_grammars_share_only_plain_requests() -> None:
    """Another llguidance on the decode node: its masks may be others. Plain requests go there as ever."""
    p, d = make_node("prefill", "p0", CoreKnobs()), make_node("decode", "d0", CoreKnobs())
    other = msgspec.structs.replace(d.ctx.facts.fingerprint, grammar="llguidance 99")
    d.ctx.facts = replace(d.ctx.facts, fingerprint=other)
    net = Net([p, d])
    plain, bound = Job(0, (1, 2, 3), SamplingParams(9), 7), Job(1, (1, 2, 3), SamplingParams(9), 7)
    first, second = net.generate(p, plain, d), net.generate(p, with_grammar(bound, JSON), d)
    net.run()
    assert net.router.streams[first] == plain.expected()
    end = net.router.end(second)
    assert end.error_code == "handoff_failed" and "llguidance 99" in end.error_message
    assert_clean(p, d)


@pytest.mark.rule("H16")
def test_an_answer_goes_on_in_the_middle_of_its_grammar() -> None:
    """After a lost node: the next one has the emitted tokens and no memory of what they were drawn from."""
    whole = with_grammar(Job(0, (4, 5, 6), SamplingParams(40, temperature=0.8), 9), JSON)
    expected = whole.expected()
    for known in range(1, len(expected) - 1, 3):
        d = make_node("decode", "d0", CoreKnobs())
        net = Net([d])
        key = net.generate(d, whole, output_ids=[expected[:known]])
        net.router.streams[key] = expected[:known]
        net.run()
        assert net.router.streams[key] == expected
        assert_clean(d)


@pytest.mark.parametrize("backend", ["inline", "cpu"])
def test_a_grammar_that_gets_too_complex_ends_its_request_alone(backend: str) -> None:
    core = make_core(CoreKnobs(backend=backend))
    sampling = SamplingParams(30, temperature=0.0)
    jobs = [Job(rid, (1, 2, rid), sampling, 5) for rid in range(4)]
    bad = with_grammar(Job(9, (1, 2, 3), sampling, 5), TOO_COMPLEX)
    core.submit(bad.request())
    outcome = run_local(core, [*jobs[:2], with_grammar(jobs[2], JSON), jobs[3]], outcome=Outcome())
    error = outcome.ends["r9"].error
    assert error is not None and error.status == 400 and "grammar" in error.message
    assert_streams([*jobs[:2], with_grammar(jobs[2], JSON), jobs[3]], outcome)
    assert_whole(core)
    core.close()


def test_a_request_whose_grammar_compiles_holds_up_no_other() -> None:
    """It waits in its place; those behind it begin before it, and it begins when it can."""
    executor = Later()
    core = make_core(CoreKnobs(), grammars=make_grammars(executor))
    sampling = SamplingParams(20, temperature=0.0)
    waits = with_grammar(Job(0, (1, 2, 3), sampling, 5), JSON)
    others = [Job(rid, (1, 2, rid), sampling, 5) for rid in (1, 2)]
    core.submit(waits.request())
    outcome = run_until_still(core, others)
    assert not outcome.streams["r0"] and len(core.requests) == 1
    executor.run()
    run_until_still(core, outcome=outcome)
    assert_streams([waits, *others], outcome)
    assert_whole(core)
    core.close()


def test_min_tokens_and_bad_words_give_way_to_a_grammar() -> None:
    """The grammar is over after seven characters, and each of them is barred; the answer has them all the same."""
    grammar = LLMatcher.grammar_from_regex("[ab]{3}-[ab]{3}")
    bad = tuple((i,) for i in range(60, 80))
    one = with_grammar(Job(0, (1, 2, 3), SamplingParams(30), 3), grammar, min_tokens=20, bad_words=bad)
    core = make_core(CoreKnobs())
    outcome = run_local(core, [one])
    assert_streams([one], outcome)
    assert len(outcome.streams["r0"]) == 8 and outcome.streams["r0"][-1] == EOS
    allows = allows_of(grammar)
    assert allows is not None and all(allows(outcome.streams["r0"][:k])[outcome.streams["r0"][k]] for k in range(8))
    core.close()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("backend", ["inline", "cpu", "simulated"])
def test_a_step_that_fails_while_masks_are_wanted(backend: str, place: str) -> None:
    """Nothing waits for masks that nobody will make: the engine is drained, and all answers are right."""
    for nth in (2, 3, 6):
        core = make_core(CoreKnobs(backend=backend, width=3))
        sampling = SamplingParams(25, temperature=0.0)
        jobs = [Job(rid, (1, 2, rid), sampling, 5) for rid in range(3)]
        jobs = [jobs[0], *(with_grammar(one, JSON) for one in jobs[1:])]
        num_raised = break_at(core, place, nth)
        run_with_fault(core, jobs)
        assert num_raised() == 1
        assert_whole(core)
        core.close()
