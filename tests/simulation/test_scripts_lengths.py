"""Scripted schedules: who may read a length when, and who may change it (S6, S7, S8)."""

from __future__ import annotations

import pytest
import torch

from tests.support.cores.core_rig import assert_streams, assert_whole
from tests.support.cores.scripted_core import COPY, FORWARD, Script, job
from tests.support.oracles.hash_draft import expected_accept_len


@pytest.mark.rule("S4", "S6", "H44", "I3")
@pytest.mark.parametrize("spec", ["eagle", "mtp"])
def test_host_lengths_are_those_that_the_newest_step_published(spec: str) -> None:
    """Planning step 3 needs exact lengths while step 2 has not even begun: the host waits for step 2's publish_ready,
    armed at its launch, and for nothing behind it. S12: whatever the drafter."""
    script = Script(width=4, needs_cpu_seq_lens=True, spec=spec)
    one = job(1, 12, 40)
    (req,) = script.submit(one)
    script.run_until_running(req)
    newest, extended = script.core.engine.leases[-1], []
    drafter = script.core.engine.worker.drafter
    assert drafter is not None
    extend = drafter.extend
    drafter.extend = lambda *args: extended.append(newest.step) or extend(*args)  # type: ignore[method-assign]
    committed = int(script.in_flight().seq_lens_cpu[0])
    accepted = expected_accept_len(committed, 4, 70)
    script.step()
    plan = script.plans[-1]
    assert plan.step == newest.step + 1, "the next step was planned while the newest was in flight"
    assert not plan.lengths_relayed and plan.seq_lens_cpu.tolist() == [committed + accepted]
    assert extended == [] and not newest.done.peek(), "the host did not wait for draft-extend"
    drafter.extend = extend  # type: ignore[method-assign]
    assert_streams([one], script.finish())


@pytest.mark.rule("S12")
@pytest.mark.parametrize("spec", ["ngram", "eagle", "mtp"])
def test_lengths_are_published_and_told_before_draft_extend(spec: str) -> None:
    """S4, S12: value, then event, then draft-extend; every drafter's worker publishes by the same callback."""
    script = Script(width=4, spec=spec)
    one = job(1, 12, 40)
    (req,) = script.submit(one)
    script.run_until_running(req)
    lease, before = script.core.engine.leases[-1], int(script.core.future_map.new_seq_lens_buf[req.row])
    drafter = script.core.engine.worker.drafter
    assert drafter is not None and lease.publish_ready is not None and lease.sampled is not None
    extend, seen = drafter.extend, []

    def watched(*args):  # noqa: ANN002, ANN202
        seen.append((int(script.core.future_map.new_seq_lens_buf[req.row]) > before, lease.publish_ready.peek()))
        return extend(*args)

    drafter.extend = watched  # type: ignore[method-assign]
    while not lease.sampled.done.peek():
        script.world.run(FORWARD)
    assert seen == [(True, True)]
    drafter.extend = extend  # type: ignore[method-assign]
    assert_streams([one], script.finish())


@pytest.mark.rule("Rc", "H3")
def test_two_steps_publish_lengths_of_arrivals_and_running_rows() -> None:
    """The newest lease may be an admission: waiting for its publish is enough, for the forward stream is in order."""
    script = Script(width=4, needs_cpu_seq_lens=True)
    (req,) = script.submit(job(1, 12, 40))
    script.run_until_running(req)
    committed = int(script.in_flight().seq_lens_cpu[0])
    arrived = job(2, 8, 40).request()
    assert script.core.scheduler.grants.grant(arrived, "p") == 0
    from shared.sched.steps.prebuilt import Arrival

    state = {name: torch.zeros(buffer.shape[1:]) for name, buffer in script.core.future_map.extras.items()}
    script.core.loop.admit([Arrival(arrived, 5, 8, (), state)])
    script.step()
    assert not script.plans[-1].lengths_relayed
    lengths = dict(zip(script.plans[-1].req_pool_indices.tolist(), script.plans[-1].seq_lens_cpu.tolist(), strict=True))
    assert lengths == {req.row: committed + expected_accept_len(committed, 4, 70), arrived.row: 8}


@pytest.mark.rule("S7", "H6")
def test_a_plan_in_flight_keeps_its_lengths() -> None:
    """S7: planning the next step moves the batch's lengths while the forward of this one has still to read its own."""
    script = Script()
    jobs = [job(1, 12, 20), job(2, 17, 20)]
    requests = script.submit(*jobs)
    script.run_until_running(*requests)
    plan = script.in_flight()
    assert plan.num_prefill == 0 and not plan.lengths_relayed
    before = plan.seq_lens_cpu.tolist()
    script.step()
    assert script.plans[-1].step == plan.step + 1
    assert plan.seq_lens_cpu.tolist() == before
    assert script.plans[-1].seq_lens_cpu.tolist() == [length + 1 for length in before]
    assert_streams(jobs, script.finish())
    assert_whole(script.core)


@pytest.mark.rule("H9")
def test_the_copy_stream_waits_for_the_sampling() -> None:
    script = Script()
    one = job(1, 12, 9)
    (req,) = script.submit(one)
    script.run_until_running(req)
    lease = script.core.engine.leases[-1]
    assert lease.sampled is not None
    while not lease.sampled.done.peek():
        assert script.world.stream(COPY).head() is None
        script.world.run(FORWARD)
    assert script.world.stream(COPY).head() is not None
    assert_streams([one], script.finish())


@pytest.mark.rule("S5", "Re")
def test_a_mixed_step_reads_its_tail_s_lengths_from_the_relay() -> None:
    """Regression (e): the chunk is planned while a verify whose accept is more than one is in flight. The host has
    bounds only, and the lower one is wrong by then."""
    script = Script(width=4, chunk_size=8)
    decoding, prompt = job(1, 12, 40), job(2, 30, 9)
    (req,) = script.submit(decoding)
    script.run_until_running(req)
    while expected_accept_len(int(script.in_flight().seq_lens_cpu[0]), 4, 70) < 2:
        script.world.run_until_idle()
        script.step()
    script.submit(prompt)
    script.step()
    mixed = script.plans[-1]
    assert mixed.num_prefill == 1 and mixed.batch_size == 2 and mixed.lengths_relayed
    accepts = []
    process = script.core.scheduler.process
    script.core.scheduler.process = lambda result: (accepts.append(result), process(result))  # type: ignore[method-assign]
    assert_streams([decoding, prompt], script.finish())
    for result in accepts:
        for b in range(result.num_prefill, len(result.row_ids)):
            accepted = int(result.accept_lens[b])
            assert accepted == expected_accept_len(int(result.seq_lens[b]) - accepted, 4, 70)


def test_a_reservation_covers_two_windows_in_flight() -> None:
    """(lag + 1) x width: the row's lower bound lags a whole window behind when the next one is planned."""
    script = Script(width=4, page_size=1, num_pages=200)
    (req,) = script.submit(job(1, 12, 40))
    script.run_until_running(req)
    for _ in range(20):
        script.step()
        if script.core.queues.running.in_flight.max(initial=0) == 2:
            lo = int(script.core.queues.running.seq_lens.lo[0])
            assert int(script.core.kv.rows.num_pages[req.row]) >= lo + 8
            break
        script.world.run_until_idle()
    else:
        raise AssertionError("two windows were never in flight")
    script.finish()
