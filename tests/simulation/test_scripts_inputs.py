"""Scripted schedules: where a step's tokens come from (S9, S11), and that they come once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.device.events import Ticket
from shared.engine.lease import StepLease
from shared.engine.plan import StepPlan
from tests.support.cores.core_rig import assert_streams, assert_whole
from tests.support.cores.scripted_core import FORWARD, Script, job


@pytest.mark.rule("S11", "Rd", "H5", "H45")
@pytest.mark.parametrize("width", [1, 4])
def test_penalties_see_tokens_that_the_host_does_not_know_yet(width: int) -> None:
    """Regression (d): the next step is planned and run while the token it penalises is still in flight, and its input
    ids are resolved on the forward stream only."""
    script = Script(width=width)
    strong = {"repetition_penalty": 2.0, "presence_penalty": 1.5, "frequency_penalty": 1.0}
    jobs = [job(1, 12, 30, **strong), job(2, 9, 30), job(3, 20, 30, repetition_penalty=1.7)]
    requests = script.submit(*jobs)
    script.run_until_running(*requests)
    for _ in range(6):
        known = [len(req.output_ids) for req in requests]
        script.step()
        while script.world.stream(FORWARD).head() is not None:
            script.world.run(FORWARD)
        assert [len(req.output_ids) for req in requests] == known, "run, and not processed"
        script.world.run_until_idle()
        script.step()
    assert_streams(jobs, script.finish())


@pytest.mark.rule("S11", "H45")
def test_penalties_of_a_cached_prefix_are_seeded() -> None:
    """S11: no forward of this row ever sees those ids."""
    script = Script()
    first = job(1, 21, 2)
    script.submit(first)
    script.finish()
    again = replace(job(2, 1, 30, repetition_penalty=2.0), prompt=first.prompt)
    (req,) = script.submit(again)
    assert_streams([again], script.finish())
    assert req.cached_tokens == 20


@pytest.mark.rule("S9", "H4")
def test_a_step_that_runs_twice_finds_its_staging_consumed() -> None:
    """Injected fault: the forward closure of a chunk is run twice on the same lease. The second run must be an error
    that names the step, not a second prefill."""
    script = Script(chunk_size=8)
    one = job(1, 20, 9)
    engine = script.core.engine
    launch, twice = engine.streams.forward.launch, []

    def again(fn, fires=(), label: str = "") -> Ticket:  # noqa: ANN001
        ticket = launch(fn, fires, label)
        if label == "forward(2)":
            twice.append(launch(fn, (), "forward(2) again"))
        return ticket

    engine.streams.forward.launch = again  # type: ignore[method-assign]
    script.submit(one)
    outcome = script.finish()
    assert "step 2: prompt staging was consumed twice" in str(twice[0].error)
    assert_streams([one], outcome)
    assert script.core.loop.num_failed_steps == 1
    assert_whole(script.core)


@pytest.mark.rule("S9", "I4")
def test_a_chunk_s_tokens_are_copied_once_and_not_after_the_step() -> None:
    """I4, over a run with retraction: a re-prefill stages its tokens anew."""
    script = Script(chunk_size=8)
    taken: list[tuple[int, list[int]]] = []
    take = StepLease.take_staging

    def watch(lease: StepLease):  # noqa: ANN202
        ids = take(lease)
        taken.append((lease.step, ids.tolist()))
        return ids

    StepLease.take_staging = watch  # type: ignore[method-assign]
    try:
        one = job(1, 20, 20)
        (req,) = script.submit(one)
        script.run_until_running(req)
        script.core.queues.retract(req)
        assert_streams([one], script.finish())
    finally:
        StepLease.take_staging = take  # type: ignore[method-assign]
    staged = {plan.step: plan.prefill_input_ids_cpu for plan in script.plans if plan.prefill_input_ids_cpu is not None}
    assert len(taken) == len(staged) == len({step for step, _ in taken})
    assert all(staged[step].tolist() == ids for step, ids in taken)


@pytest.mark.rule("S2")
def test_decode_rows_read_the_relay_and_chunks_their_staging() -> None:
    """One mixed step: the decode row's input was sampled by a step that has not run when this one is planned."""
    script = Script(chunk_size=8)
    decoding, prompt = job(1, 12, 20), job(2, 30, 9)
    (req,) = script.submit(decoding)
    script.run_until_running(req)
    before = script.in_flight()
    script.submit(prompt)
    script.step()
    mixed: StepPlan = script.plans[-1]
    assert mixed.expect_step.tolist() == [-1, before.step] and mixed.mix_running_indices.tolist() == [req.row]
    assert mixed.prefill_input_ids_cpu is not None
    assert mixed.prefill_input_ids_cpu.tolist() == list(prompt.prompt[:8])
    assert_streams([decoding, prompt], script.finish())


@pytest.mark.rule("H11")
def test_a_chunk_s_last_token_knows_its_successor() -> None:
    """H11: draft state of a chunk's last token depends on the next prompt token, not on a sampled one."""
    for chunk_size in (3, 5, 8):
        script = Script(width=4, chunk_size=chunk_size)
        one = job(1, 33, 20)
        script.submit(one)
        steps = []
        process = script.core.scheduler.process
        script.core.scheduler.process = lambda result, p=process, s=steps: (s.append(result), p(result))  # type: ignore[method-assign]
        assert_streams([one], script.finish())
        assert sum(int(result.accept_lens.max()) > 1 for result in steps if not result.num_prefill) > 2
