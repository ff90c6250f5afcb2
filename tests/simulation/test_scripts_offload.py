"""Scripted schedules of the cold tier: pages that are on their way out or back while others want their places."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shared.core.request import Request
from shared.engine.transfer_jobs import TransferJobs
from tests.support.cores.core_rig import Job, assert_streams, assert_whole
from tests.support.cores.scripted_core import COLD, FORWARD, TRANSFER, Script, job


def cold_script(**knobs: object) -> Script:
    """Freed memory never looks like KV."""
    script = Script(**({"cold_pages": 40} | knobs))
    pool = script.core.pool

    def poison(pages: np.ndarray) -> None:
        for page in pages.tolist():
            pool.page_view(page)[:] = 0xA5

    script.core.kv.allocator.on_free = poison
    return script


def finish(script: Script, *jobs: Job) -> None:
    assert_streams(jobs, script.finish())
    assert_whole(script.core)
    script.core.check_integrity(idle=True)


def test_a_retracted_row_goes_on_without_recomputing_anything() -> None:
    script = cold_script(prefix_cache=False)
    one = job(1, 9, 30, presence_penalty=0.5)
    (req,) = script.submit(one)
    script.run_until_running(req)
    script.core.queues.retract(req)
    finish(script, one)
    counters = script.core.queues.counters
    assert counters.prompt_tokens == 9 and counters.readmissions == 1
    assert counters.offloaded_pages == counters.restored_pages == 3


def test_a_retracted_row_is_held_until_its_pages_are_out() -> None:
    """The next owner's step would write over what the copy has yet to read."""
    script = cold_script(prefix_cache=False, num_pages=14)
    one, other = job(1, 9, 20), job(0, 20, 12)
    (req,) = script.submit(one)
    script.run_until_running(req)
    script.submit(other)
    script.core.queues.retract(req)
    assert script.core.kv.row_gauges()["held"] == 1
    script.step()
    for stream in FORWARD:
        script.world.run_stream(stream)
    finish(script, one, other)
    assert script.core.queues.counters.readmissions == 1


def restoring_behind_a_zombie() -> tuple[Script, Job, Request, int]:
    """One request's pages come back into those of another that has just been aborted, whose last step has not begun.
    Gives the page that this step writes, too."""
    script = cold_script(prefix_cache=False, max_running=1)
    one, dead = job(1, 14, 20), job(0, 9, 30)
    (req,) = script.submit(one)
    script.run_until_running(req)
    script.core.queues.retract(req)
    (dying,) = script.submit(dead)
    script.run_until_running(dying)
    zombie = script.in_flight()
    written = int(zombie.layout.page_table[0, int(zombie.seq_lens_cpu[0]) // 4])
    script.core.queues.abort(dying.key)
    script.step()
    assert req.state.value == "restoring"
    return script, one, req, written


@pytest.mark.rule("H1")
def test_pages_come_back_after_the_zombie_that_writes_them() -> None:
    script, one, req, written = restoring_behind_a_zombie()
    assert written in script.core.kv.rows.pages_of(req.row)[:4], "the schedule needs the page to be reused"
    for stream in (COLD, FORWARD, COLD):
        script.world.run_stream(stream)
    finish(script, one)
    assert script.core.queues.counters.readmissions == 1


@pytest.mark.rule("H34")
@pytest.mark.parametrize("end", ["abort", "retract"])
def test_pages_restored_for_a_gone_request_are_held_until_copied(end: str) -> None:
    script, one, req, _ = restoring_behind_a_zombie()
    heir = job(2, 12, 12)
    getattr(script.core.queues, end)(req.key if end == "abort" else req)
    assert script.core.kv.row_gauges()["held"] == 1
    script.submit(heir)
    script.step()
    for stream in (FORWARD, COLD):
        script.world.run_stream(stream)
    finish(script, heir, *([one] if end == "retract" else []))


def fill_the_tier(script: Script, *jobs: Job) -> None:
    """Run them one after another, until all their full pages are in the tier."""
    for one in jobs:
        script.submit(one)
        script.finish()
    for _ in range(10):
        script.world.run_until_idle()
        script.step()


def test_cached_pages_are_copied_out_before_eviction_and_return() -> None:
    script = cold_script(num_pages=12)
    first, other = job(0, 20, 8), job(1, 30, 8)
    again = replace(first, rid=2, seed=5)
    fill_the_tier(script, first, other)
    script.submit(again)
    finish(script, first, other, again)
    assert script.core.queues.counters.restored_pages >= 3
    assert script.outcome.ends["r2"].cached_tokens == 16, "the last token is computed in any case"


def test_a_tier_smaller_than_the_cache_comes_to_rest() -> None:
    """Each page is copied out once after it was used, whatever was dropped for it."""
    script = cold_script(cold_pages=2)
    one, two = job(1, 30, 8), job(2, 30, 8)
    script.submit(one, two)
    finish(script, one, two)
    assert 2 < script.core.queues.counters.offloaded_pages <= 18, "of nine each"


def test_cached_pages_stay_while_they_are_copied() -> None:
    script = cold_script(num_pages=10)
    first, other = job(0, 24, 8), job(1, 24, 8)
    (req,) = script.submit(first)
    while not req.finished:
        script.world.run_until_idle()
        script.step()
    assert script.core.queues.offload.num_jobs == 1  # type: ignore[union-attr]
    script.submit(other)
    script.step()
    for stream in FORWARD:
        script.world.run_stream(stream)
    script.finish()
    again = replace(first, rid=2, seed=5)
    script.submit(again)
    finish(script, first, other, again)
    assert script.core.queues.counters.restored_pages >= 4


def test_a_page_is_known_by_all_that_is_before_it() -> None:
    """The second page of one prompt behind the first page of another: the tier has both, and not this one."""
    script = cold_script(num_pages=12)
    one, two = job(1, 13, 4), job(2, 13, 4)
    mixed = replace(job(3, 13, 8), prompt=one.prompt[:4] + two.prompt[4:])
    filler = job(4, 34, 4)
    fill_the_tier(script, one, two, filler)
    script.submit(mixed)
    finish(script, one, two, filler, mixed)
    assert script.core.queues.counters.restored_pages >= 1


def spoil_memory(script: Script) -> None:
    script.core.queues.offload._tier.store._memory[:, 5] ^= 1  # type: ignore[union-attr]


def assert_damage_is_computed(script: Script, one: Job, other: Job) -> None:
    """`one` is retracted, and `other` runs while the copies of its pages are spoiled."""
    (req,) = script.submit(one)
    script.run_until_running(req)
    script.core.queues.retract(req)
    (before,) = script.submit(other)
    script.run_until_running(before)
    spoil_memory(script)
    finish(script, one, other)
    counters = script.core.queues.counters
    assert (counters.offload_failures, counters.readmissions) == (1, 0)


def test_what_comes_back_otherwise_than_it_went_is_computed() -> None:
    script = cold_script(prefix_cache=False, max_running=1)
    assert_damage_is_computed(script, job(1, 14, 20), job(0, 9, 6))


def test_a_drafter_s_rows_compute_their_tail_again() -> None:
    """Their relay can't be had once a later step is in flight; their full pages still come back."""
    script = cold_script(width=4, num_pages=14)
    first, other = job(0, 20, 8), job(1, 28, 8)
    again = replace(first, rid=2, seed=5)
    fill_the_tier(script, first, other)
    (req,) = script.submit(again)
    script.run_until_running(req)
    script.core.queues.retract(req)
    finish(script, first, other, again)
    counters = script.core.queues.counters
    assert counters.restored_pages >= 1 and counters.readmissions == 0


def test_without_a_tier_nothing_is_copied() -> None:
    script = Script(prefix_cache=False)
    one = job(1, 9, 12)
    (req,) = script.submit(one)
    script.run_until_running(req)
    script.core.queues.retract(req)
    assert script.core.kv.row_gauges()["held"] == 0
    finish(script, one)
    assert script.core.queues.counters.offloaded_pages == 0


def test_a_hand_off_does_not_stand_behind_the_cold_tier() -> None:
    """A copy that has not begun is on its stream; a pull that was launched after it ends before it."""
    script, one, req, _ = restoring_behind_a_zombie()
    jobs: TransferJobs[str, None] = TransferJobs(script.core.engine)
    jobs.launch("pull", lambda: None, "pull", after_newest_step=True)
    for stream in (FORWARD, TRANSFER):
        script.world.run_stream(stream)
    (_, restore), *_ = script.core.queues.offload._tier.jobs._open  # type: ignore[union-attr]
    assert [done.tag for done in jobs.take_done()] == ["pull"] and not restore.done.peek()
    assert req.state.value == "restoring"
    finish(script, one)


def test_one_restoring_hand_off_gives_way_not_all() -> None:
    """Its row comes back when its copy ends, and the prompt needs no more."""
    script = cold_script(cold_pages=200, num_pages=60, max_running=8)
    jobs = [job(rid, 44, 5) for rid in range(4)]
    for one in jobs:
        script.submit(one)
        script.finish()
    for _ in range(40):
        script.world.run_until_idle()
        script.step()
    core = script.core
    core.kv.flush_cache()
    offers = [replace(one, rid=10 + one.rid).request(handoff_to="decode") for one in jobs]
    for req in offers:
        core.scheduler.intake.submit(req)
    script.step()
    assert [req.state.value for req in offers] == ["restoring"] * 4
    core.scheduler.intake.submit(job(50, 70, 4).request())
    for _ in range(3):
        script.step()
    assert [req.state.value for req in offers] == ["restoring"] * 3 + ["waiting"]
    for req in offers:
        core.queues.abort(req.key)
    script.finish()
    assert_whole(core)


# ---- layers with windows: `lower` 0 has two page groups, of which one reads everything; None has one

KINDS = pytest.mark.parametrize("lower", [None, 0])


def windowed(one: Job, lower: int | None) -> Job:
    return replace(one, window=9, lower_window=lower)


@KINDS
def test_a_windowed_row_goes_on_with_what_it_reads(lower: int | None) -> None:
    """The tier gets three pages of the windowed group, whatever the row's length, and of the other one all eight."""
    script = cold_script(prefix_cache=False, window=9, lower_window=lower)
    one = windowed(job(1, 30, 20), lower)
    (req,) = script.submit(one)
    script.run_until_running(req)
    script.core.queues.retract(req)
    script.step_done()
    script.step()
    held = script.core.kv.num_held(req.row)
    finish(script, one)
    counters = script.core.queues.counters
    assert counters.prompt_tokens == 30 and counters.readmissions == 1
    assert counters.offloaded_pages == counters.restored_pages == (3 if lower is None else 3 + 8)
    assert held == counters.restored_pages, "what was not copied is free again"


@KINDS
def test_cached_pages_of_windows_return_for_who_goes_on(lower: int | None) -> None:
    script = cold_script(window=9, lower_window=lower)
    first = windowed(job(0, 20, 8), lower)
    longer = windowed(replace(job(2, 1, 8), prompt=(*first.prompt, *first.expected(), *range(9))), lower)
    fill_the_tier(script, first)
    script.core.kv.flush_cache()
    script.submit(longer)
    finish(script, first, longer)
    assert script.core.queues.counters.restored_pages == (2 if lower is None else 2 + 6), "24 tokens"


@KINDS
def test_a_prompt_that_leaves_another_s_middle_is_computed(lower: int | None) -> None:
    """Its window's pages were left behind on the way, so they are not in the tier."""
    script = cold_script(window=9, lower_window=lower)
    first = windowed(job(0, 56, 8), lower)
    leaving = windowed(replace(job(2, 40, 8), prompt=first.prompt[:28] + job(2, 20, 8).prompt), lower)
    fill_the_tier(script, first)
    script.core.kv.flush_cache()
    script.submit(leaving)
    finish(script, first, leaving)
    counters = script.core.queues.counters
    assert counters.offloaded_pages > 0 and counters.restored_pages == 0


@KINDS
def test_a_prompt_s_missing_windows_are_found_in_a_few_looks(
    monkeypatch: pytest.MonkeyPatch, lower: int | None
) -> None:
    """Of 32k tokens, one look for each page took the scheduler 0.2 s."""
    wide = {"window": 30, "lower_window": lower}
    script, looks = cold_script(num_pages=120, cold_pages=120, **wide), []
    first = replace(job(0, 120, 8), **wide)
    leaving = replace(job(2, 112, 8), prompt=first.prompt[:92] + job(2, 20, 8).prompt, **wide)
    fill_the_tier(script, first)
    script.core.kv.flush_cache()
    first_needed = script.core.kv.cache.first_needed
    monkeypatch.setattr(
        script.core.kv.cache, "first_needed", lambda num_tokens: looks.append(num_tokens) or first_needed(num_tokens)
    )
    script.submit(leaving)
    script.step()
    before = len(looks)
    monkeypatch.undo()
    finish(script, first, leaving)
    assert before < 8, looks


@KINDS
def test_a_windowed_row_that_comes_back_damaged_is_computed(lower: int | None) -> None:
    script = cold_script(prefix_cache=False, max_running=1, window=9, lower_window=lower)
    assert_damage_is_computed(script, windowed(job(1, 30, 20), lower), windowed(job(0, 9, 6), lower))
