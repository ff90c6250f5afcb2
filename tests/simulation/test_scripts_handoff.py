"""Scripted schedules: a page that is granted again while the last step of its old owner is still to run (I8, H1)."""

from __future__ import annotations

import numpy as np
import pytest

from shared.core.request import Request
from shared.engine.transfer_jobs import TransferJobs
from shared.sched.steps.prebuilt import Arrival
from tests.support.cores.core_rig import assert_whole
from tests.support.cores.scripted_core import FORWARD, TRANSFER, Script, job


def computed_elsewhere(one, page_size: int) -> tuple[list[np.ndarray], int]:  # noqa: ANN001
    """The pages and the first token that another node's prefill of this prompt leaves."""
    other = Script(page_size=page_size)
    sent = one.request(handoff_to="here")
    other.core.scheduler.intake.submit(sent)
    while sent.state.value != "handed_off":
        other.world.run_until_idle()
        other.core.loop.step()
    pages = other.core.kv.rows.pages_of(sent.row).tolist()
    return [other.core.pool.page_view(page).copy() for page in pages], sent.output_ids[0]


def launch_pull(script: Script, jobs: TransferJobs, req: Request, pages: list[np.ndarray]) -> None:
    """As the decode node does it: into the request's own pages, behind the newest launched step."""
    target = script.core.kv.rows.pages_of(req.row).tolist()

    def copy() -> None:
        for mine, theirs in zip(target, pages, strict=False):
            script.core.pool.page_view(mine)[:] = theirs

    jobs.launch(req, copy, "pull", after_newest_step=True)


@pytest.mark.rule("H1", "I8")
def test_a_pull_comes_after_the_zombie_that_writes_the_same_page() -> None:
    """The dying row's last step writes into a page that is free already and granted again. The transfer stream would be
    first if it could: then the zombie's token would lie in the middle of the arrival's prompt."""
    script = Script(prefix_cache=False)
    (dying,) = script.submit(job(1, 9, 30))
    script.run_until_running(dying)
    zombie = script.in_flight()
    written = int(zombie.layout.page_table[0, int(zombie.seq_lens_cpu[0]) // 4])
    script.core.queues.abort(dying.key)
    arriving = job(2, 14, 12)
    arrived, jobs = arriving.request(), TransferJobs(script.core.engine)
    assert script.core.scheduler.grants.grant(arrived, "p") == 0
    pulled = script.core.kv.rows.pages_of(arrived.row)[:4].tolist()
    assert written in pulled, "the schedule needs the page to be reused"
    pages, token = computed_elsewhere(arriving, 4)
    launch_pull(script, jobs, arrived, pages)
    for stream in (TRANSFER, FORWARD, TRANSFER):
        script.world.run_stream(stream)
    assert [done.tag for done in jobs.take_done()] == [arrived]
    script.core.loop.admit([Arrival(arrived, token, 14, (), {})])
    assert script.finish().streams["r2"] == arriving.expected()
    assert_whole(script.core)


def test_a_pull_does_not_wait_for_steps_that_come_after_it() -> None:
    """Only the steps launched before it can know the page's old owner."""
    script = Script()
    running = job(1, 9, 30)
    (req,) = script.submit(running)
    script.run_until_running(req)
    script.world.run_until_idle()
    script.step()
    script.world.run_until_idle()
    arriving = job(2, 14, 12)
    arrived, jobs = arriving.request(), TransferJobs(script.core.engine)
    assert script.core.scheduler.grants.grant(arrived, "p") == 0
    pages, token = computed_elsewhere(arriving, 4)
    launch_pull(script, jobs, arrived, pages)
    script.step()
    assert not script.core.engine.leases[-1].done.peek()
    script.world.run_stream(TRANSFER)
    assert [done.tag for done in jobs.take_done()] == [arrived]
    script.core.loop.admit([Arrival(arrived, token, 14, (), {})])
    outcome = script.finish()
    assert outcome.streams["r2"] == arriving.expected() and outcome.streams["r1"] == running.expected()
    assert_whole(script.core)


def test_a_failed_pull_fails_alone() -> None:
    """Errors travel with data: the next pull of the same stream is not skipped."""
    script = Script()
    jobs: TransferJobs = TransferJobs(script.core.engine)

    def broken() -> None:
        raise OSError("gone")

    jobs.launch("bad", broken, "pull", after_newest_step=True)
    jobs.launch("good", lambda: 5, "pull", after_newest_step=True)
    script.world.run_until_idle()
    bad, good = jobs.take_done()
    assert bad.error is not None and "gone" in bad.error.message and (good.error, good.value) == (None, 5)
