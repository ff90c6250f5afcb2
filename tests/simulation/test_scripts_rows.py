"""Scripted schedules: rows and pages that change hands while a step that knows the old owner is still to run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shared.core.errors import IntegrityError
from shared.core.request import Request
from shared.core.states import FinishReason
from shared.engine.lease import StepLease
from shared.engine.plan import Admission
from shared.sched.steps.prebuilt import Arrival
from tests.support.cores.core_rig import assert_streams, assert_whole
from tests.support.cores.scripted_core import FORWARD, TRANSFER, Script, job
from tests.support.oracles.hashlm_reference import reference_stream


def poison_freed_pages(script: Script) -> None:
    pool = script.core.pool

    def poison(pages: np.ndarray) -> None:
        for page in pages.tolist():
            pool.page_view(page)[:] = 0xA5

    script.core.kv.allocator.on_free = poison


def test_a_zombie_runs_on_its_own_copy_of_the_page_table() -> None:
    """The row's next owner has pages of the prefix cache at its beginning, computed long ago. The zombie's position
    lies in the second of them: if it read the table when it runs, it would write there."""
    script = Script()
    first, zombie = job(0, 17, 3), job(1, 5, 30)
    script.submit(first)
    assert_streams([first], script.finish())
    (dying,) = script.submit(zombie)
    script.run_until_running(dying)
    plan = script.in_flight()
    position, row = int(plan.seq_lens_cpu[0]), dying.row
    assert position // 4 == 1
    script.core.queues.abort(dying.key)
    heir_job = replace(job(2, 1, 12), prompt=first.prompt + (3, 1, 4))
    (heir,) = script.submit(heir_job)
    script.step()
    assert heir.row == row and heir.cached_tokens == 16, "the heir's second page is a cached one"
    assert_streams([heir_job], script.finish())


@pytest.mark.rule("S8")
def test_a_plan_does_not_see_what_the_batch_becomes() -> None:
    """The step that reads the relay expects the step that wrote it, not the one planned meanwhile."""
    script = Script()
    one = job(1, 12, 12)
    (req,) = script.submit(one)
    script.run_until_running(req)
    plan = script.in_flight()
    expected = plan.expect_step.tolist()
    script.step()
    assert script.plans[-1].expect_step.tolist() == [plan.step] and plan.expect_step.tolist() == expected
    assert_streams([one], script.finish())


@pytest.mark.rule("H33")
def test_a_row_is_reused_at_once_while_its_zombie_is_in_flight() -> None:
    """Both write the row's relay, the zombie first: program order of the forward stream, no fence."""
    script = Script(max_running=1)
    poison_freed_pages(script)
    zombie, heir_job = job(1, 12, 30), job(2, 9, 12)
    (dying,) = script.submit(zombie)
    script.run_until_running(dying)
    row = dying.row
    script.core.queues.abort(dying.key)
    (heir,) = script.submit(heir_job)
    script.step()
    assert heir.row == row and len(script.core.engine.leases) == 2
    assert_streams([heir_job], script.finish())
    assert_whole(script.core)


@pytest.mark.rule("H2")
def test_an_arrival_takes_the_row_of_a_zombie() -> None:
    """H2: the zombie's stash comes before the seed of the PREBUILT row, for both are on the forward stream."""
    script = Script(max_running=1)
    (dying,) = script.submit(job(1, 12, 30))
    script.run_until_running(dying)
    script.core.queues.abort(dying.key)
    arrived, stream = _arrive(script, job(2, 9, 12))
    assert arrived.row == 1
    script.step()
    assert script.finish().streams["r2"] == stream


def _arrive(script: Script, arriving) -> tuple[Request, list[int]]:  # noqa: ANN001
    """Grant, fill the pages as a pull would, admit."""
    req = arriving.request()
    assert script.core.scheduler.grants.grant(req, "p") == 0
    stream = reference_stream(arriving.prompt, arriving.sampling, arriving.seed, arriving.sampling.max_tokens)
    _compute_pages_elsewhere(script, req)
    script.core.loop.admit([Arrival(req, stream[0], len(req.ask.prompt_ids), (), {})])
    return req, stream


def _compute_pages_elsewhere(script: Script, req: Request) -> None:
    """What another node's prefill would have left, put into this one's pages on the transfer stream."""
    other = Script(page_size=script.core.kv.page_size)
    key = req.key
    sent = replace(job(99), rid=99, prompt=tuple(req.ask.prompt_ids.tolist())).request(handoff_to="here")
    other.core.scheduler.intake.submit(sent)
    while sent.state.value != "handed_off":
        other.world.run_until_idle()
        other.core.loop.step()
    source = other.core.kv.rows.pages_of(sent.row).tolist()
    target = script.core.kv.rows.pages_of(req.row).tolist()

    def copy() -> None:
        for mine, theirs in zip(target, source, strict=False):
            script.core.pool.page_view(mine)[:] = other.core.pool.page_view(theirs)

    transfer = script.core.streams.transfer
    if script.core.engine.last_done is not None:
        transfer.wait(script.core.engine.last_done)
    transfer.launch(copy, label=f"pull({key.rid})").done.synchronize()


@pytest.mark.rule("H46")
def test_an_admission_off_the_forward_stream_is_found_by_its_tag() -> None:
    """Injected fault: the seed of a PREBUILT row is launched on the transfer stream, so nothing orders it before the
    row's first step. The step reads a value that another step wrote, and the report says so."""
    script = Script()
    engine = script.core.engine
    off_stream: list[Admission] = []

    def admit(admission: Admission) -> StepLease:
        off_stream.append(admission)
        lease = StepLease(admission.step, admission, None)
        lease.sampled = engine.streams.transfer.launch(lambda: engine._seed_relay(admission, lease, None), label="off")
        engine._launch_copy(lease)
        return lease

    engine.admit = admit  # type: ignore[method-assign]
    _arrive(script, job(2, 9, 12))
    script.step()
    (plan,) = script.plans
    assert off_stream and plan.expect_step.tolist() == [off_stream[0].step]
    script.world.run_stream(FORWARD)
    script.world.run_stream(TRANSFER)
    outcome = script.finish()
    end = outcome.ends["r2"]
    assert end.reason is FinishReason.ERROR and isinstance(end.error, IntegrityError)
    assert f"step {plan.step} read a relay row that another step had written" in end.error.message
    assert len(outcome.streams["r2"]) == 1, "nothing after the first token, which came with the record, was believed"
    assert_whole(script.core)


@pytest.mark.rule("S11")
def test_an_admission_comes_before_the_row_s_first_step() -> None:
    """The same schedule, with the admission where it belongs: the transfer stream has no say in it."""
    script = Script()
    _, stream = _arrive(script, job(2, 9, 12))
    script.step()
    script.world.run_stream(FORWARD)
    outcome = script.finish()
    assert outcome.streams["r2"] == stream and outcome.ends["r2"].reason is FinishReason.LENGTH


def test_a_matched_prefix_stays_while_its_reader_lives() -> None:
    """The reader's prompt was in the cache; a big prompt then wants every page. Without the lock the reader's pages
    would be evicted, poisoned and overwritten before it has read them."""
    script = Script(num_pages=20)
    poison_freed_pages(script)
    first = job(0, 16, 1)
    script.submit(first)
    assert_streams([first], script.finish())
    reader, big = replace(job(1, 1, 20), prompt=first.prompt + (5,)), job(2, 60, 4)
    reading, waiting = script.submit(reader, big)
    script.step()
    assert reading.cached_tokens == 16
    outcome = script.finish()
    assert_streams([reader, big], outcome)
    assert waiting.arrival > reading.arrival
    assert_whole(script.core)


@pytest.mark.rule("H14")
def test_a_token_in_flight_at_retraction_goes_with_its_life() -> None:
    """H14: the request is planned again before the old step's result is processed; taking both would say it twice."""
    script = Script()
    one = job(1, 12, 12)
    (req,) = script.submit(one)
    script.run_until_running(req)
    old = script.in_flight()
    said = list(req.output_ids)
    script.core.queues.retract(req)
    script.step()
    assert req.state.value == "running" and script.plans[-1].step == old.step + 1
    while not script.core.engine.leases[0].done.peek():
        script.world.run(FORWARD if script.world.stream(FORWARD).head() else "copy")
    script.step()
    assert req.output_ids == said, "the old step's token is dropped"
    assert_streams([one], script.finish())


def test_a_zombie_s_result_after_the_end_changes_nothing() -> None:
    script = Script(width=4)
    poison_freed_pages(script)
    stream = job(1, 12, 30).expected()
    one = replace(job(1, 12, 30), sampling=replace(job(1, 12, 30).sampling, stop_token_ids=(stream[9],)))
    (req,) = script.submit(one)
    outcome = script.finish()
    assert outcome.ends["r1"].reason is FinishReason.STOP and req.row == 0
    assert_streams([one], outcome)
    assert_whole(script.core)


@pytest.mark.rule("H15")
def test_nothing_after_a_stop_enters_the_prefix_cache() -> None:
    """H15: the device accepted a run past the stop. The next request with exactly that text must not find more of it
    in the cache than was said."""
    plain = job(1, 12, 30)
    stream = plain.expected()
    for cut in range(1, 14):
        script = Script(width=4, page_size=1, num_pages=200)
        stop = (stream[cut],)
        one = replace(plain, sampling=replace(plain.sampling, stop_token_ids=stop))
        script.submit(one)
        script.finish()
        script.world.run_until_idle()
        said = one.expected()
        num_cached = script.core.kv.cache.num_cached
        assert num_cached <= len(plain.prompt) + len(said), f"{num_cached} pages of one token each"
        again = replace(plain, rid=2, prompt=plain.prompt + tuple(stream[: cut + 4]))
        script.submit(again)
        assert_streams([again], script.finish())
