"""A model in two pipeline stages: two batches are on their way at once, rank 0 keeps the relay, and nobody notices."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from shared.core.errors import ConfigError
from shared.device.streams import make_streams
from shared.engine.transfer_jobs import TransferJobs
from shared.model.hashlm.model import HashLM
from shared.model.hashlm.shard import split
from shared.node.assembly.assemble import CoreSizes, assemble_core
from shared.sched.steps.events import ChunkReady, PrefillDone
from shared.sched.steps.prebuilt import Arrival
from shared.sched.steps.settings import SchedSettings
from tests.support.cores.core_pair import make_pair, run_pair
from tests.support.cores.core_rig import (
    MAX_CONTEXT,
    CoreKnobs,
    assert_streams,
    assert_whole,
    draw_jobs,
    make_core,
    run_local,
)
from tests.support.cores.scripted_core import COPY, FORWARD, TRANSFER, Script, job
from tests.support.oracles.hashlm_reference import reference_stream

STAGE = "stage1"


def rows_of(script: Script, index: int) -> set[int]:
    return set(script.plans[index].req_pool_indices.tolist())


def test_two_batches_take_turns() -> None:
    script = Script(stages=2)
    jobs = [job(rid, 9, 20) for rid in range(4)]
    requests = script.submit(*jobs)
    script.run_until_running(*requests)
    for _ in range(4):
        script.step_done()
    for index in (-1, -2, -3):
        assert len(rows_of(script, index)) == 2 and not rows_of(script, index) & rows_of(script, index - 1)
        assert rows_of(script, index) == rows_of(script, index - 2)
    assert_streams(jobs, script.finish())
    assert_whole(script.core)


def test_the_first_stage_goes_on_while_the_second_has_not_begun() -> None:
    script = Script(stages=2)
    jobs = [job(rid, 9, 20) for rid in range(4)]
    requests = script.submit(*jobs)
    script.run_until_running(*requests)
    script.world.run_until_idle()
    script.step()
    script.step()
    *_, first, second = script.core.engine.leases
    script.world.run_stream(FORWARD)
    assert first.forward is not None and second.forward is not None
    assert first.forward.done.peek() and second.forward.done.peek(), "sampling waits behind the next forward"
    assert not first.computed.done.peek()
    assert_streams(jobs, script.finish())


def test_chunks_of_a_prompt_follow_one_another_through_stages() -> None:
    script = Script(stages=2, chunk_size=8)
    running, long = job(1, 9, 30), job(2, 60, 8)
    (req,) = script.submit(running)
    script.run_until_running(req)
    script.submit(long)
    script.world.run_until_idle()
    mixed = 0
    while not script.outcome.ends.get("r2"):
        script.step()
        mixed += 0 < script.plans[-1].num_prefill < script.plans[-1].batch_size
        script.world.run_stream(FORWARD)
        script.world.run_until_idle()
    assert mixed >= 3
    assert_streams([running, long], script.finish())


def test_a_lone_row_steps_without_waiting_for_others() -> None:
    script = Script(stages=2)
    one = job(1, 9, 20)
    script.submit(one)
    assert_streams([one], script.finish())
    assert not script.core.engine.stages.unsampled


@pytest.mark.rule("H2")
def test_an_arrival_follows_the_sampling_of_its_row_s_last_owner() -> None:
    """H2 in a pipeline: the zombie's sampling was to be launched with the next step, and would have overwritten the
    relay of the arrival, which has none."""
    script = Script(stages=2, max_running=1)
    (dying,) = script.submit(job(1, 12, 30))
    script.run_until_running(dying)
    assert script.core.engine.stages.unsampled
    script.core.queues.abort(dying.key)
    arriving = job(2, 9, 12)
    arrived = arriving.request()
    assert script.core.scheduler.grants.grant(arrived, "p") == 0 and arrived.row == 1
    fill_from_elsewhere(script, arrived, arriving)
    script.core.loop.admit([Arrival(arrived, arriving.expected()[0], 9, (), {})])
    assert script.finish().streams["r2"] == arriving.expected()


def fill_from_elsewhere(script: Script, req, arriving) -> TransferJobs:  # noqa: ANN001
    """A pull of what another node has computed into the request's pages."""
    other = Script(page_size=script.core.kv.page_size)
    sent = replace(arriving, rid=99).request(handoff_to="here")
    other.core.scheduler.intake.submit(sent)
    while sent.state.value != "handed_off":
        other.world.run_until_idle()
        other.core.loop.step()
    source = [other.core.pool.page_view(page).copy() for page in other.core.kv.rows.pages_of(sent.row).tolist()]
    target = script.core.kv.rows.pages_of(req.row).tolist()

    def copy() -> None:
        for mine, theirs in zip(target, source, strict=False):
            script.core.pool.page_view(mine)[:] = theirs

    jobs: TransferJobs = TransferJobs(script.core.engine)
    jobs.launch(req, copy, "pull", after_newest_step=True)
    return jobs


def test_a_pull_follows_all_stages_of_the_zombie_writing_a_page() -> None:
    script = Script(stages=2, prefix_cache=False)
    (dying,) = script.submit(job(1, 9, 30))
    script.run_until_running(dying)
    zombie = script.in_flight()
    written = int(zombie.layout.page_table[0, int(zombie.seq_lens_cpu[0]) // 4])
    script.core.queues.abort(dying.key)
    arriving = job(2, 14, 12)
    arrived = arriving.request()
    assert script.core.scheduler.grants.grant(arrived, "p") == 0
    assert written in script.core.kv.rows.pages_of(arrived.row)[:4]
    jobs = fill_from_elsewhere(script, arrived, arriving)
    for stream in (FORWARD, TRANSFER, STAGE, FORWARD, TRANSFER):
        script.world.run_stream(stream)
    assert [done.tag for done in jobs.take_done()] == [arrived]
    script.core.loop.admit([Arrival(arrived, arriving.expected()[0], 14, (), {})])
    assert script.finish().streams["r2"] == arriving.expected()


def test_pages_are_announced_after_the_last_stage_writes_them() -> None:
    script = Script(stages=2, chunk_size=8)
    req = job(1, 30, 8).request(handoff_to="there")
    script.core.scheduler.intake.submit(req)
    for _ in range(4):
        script.core.loop.step()
        for stream in (FORWARD, COPY):
            script.world.run_stream(stream)
        assert not script.core.queues.take_events(), "the last stage has not begun"
    pages, announced = script.core.kv.rows.pages_of(req.row).tolist(), []
    plane = script.core.pool.plane("kv")
    while not announced or announced[-1] < 30:
        script.core.loop.step()
        for event in script.core.queues.take_events():
            if isinstance(event, ChunkReady):
                announced.append(event.num_tokens)
                whole = plane[pages[: event.num_tokens // 4]]  # (pages, 2 layers, 4 slots)
                assert whole.all(), "a layer of it is not there"
            elif isinstance(event, PrefillDone):
                announced.append(event.committed)
        script.world.run_stream(STAGE)
        for stream in (FORWARD, COPY):
            script.world.run_stream(stream)
    assert announced == [8, 16, 24, 30]


def test_nobody_hears_of_layers_while_stages_run() -> None:
    """A mark after the first stage would say that pages hold what the second has yet to write."""
    script = Script(stages=2, layer_ends=(1,))
    script.core.scheduler.intake.submit(job(1, 30, 8).request(handoff_to="there"))
    script.step_done()
    assert script.plans and not any(plan.layer_ends for plan in script.plans)


@pytest.mark.parametrize(("stages", "overlap"), [(2, True), (3, True), (4, True), (4, False)])
@pytest.mark.parametrize("spec", ["ngram", "eagle"])
def test_rows_have_room_for_a_window_in_every_open_step(stages: int, overlap: bool, spec: str) -> None:
    """As many tokens past a sequence's end as steps may be open: the more stages, the more of them."""
    for seed in range(6):
        knobs = CoreKnobs("simulated", page_size=4, num_pages=420, max_running=3, chunk_size=512, seed=seed)
        core = make_core(replace(knobs, stages=stages, overlap=overlap, spec=spec, width=4))
        rng = random.Random(seed)
        answers = [rng.randrange(2, 30) for _ in range(4)]
        jobs = [job(rid, MAX_CONTEXT - answer, answer) for rid, answer in enumerate(answers)]
        assert_streams(jobs, run_local(core, jobs))
        assert_whole(core)
        core.close()


@pytest.mark.parametrize("tree", [False, True])
def test_a_row_s_next_owner_follows_the_drafts_of_its_last_one(tree: bool) -> None:
    """Sampling writes history and, of a tree, KV: a step late, they would hit whoever has row and pages by then."""
    shape = {"width": 7, "topk": 2, "steps": 2} if tree else {"width": 4}
    for seed in range(4):
        knobs = CoreKnobs("inline", page_size=4, num_pages=90, max_running=3, stages=2, seed=seed, **shape)  # type: ignore[arg-type]
        jobs = draw_jobs(random.Random(seed), 30, max_prompt=40)
        jobs = [replace(one, sampling=replace(one.sampling, repetition_penalty=1.3)) for one in jobs]
        core = make_core(knobs)
        assert_streams(jobs, run_local(core, jobs, retract_every=7, rng=random.Random(seed)))
        assert_whole(core)
        core.close()


@pytest.mark.parametrize(("backend", "stages"), [("inline", 2), ("cpu", 2), ("simulated", 2), ("simulated", 3)])
def test_a_stage_that_raises_costs_one_step(backend: str, stages: int) -> None:
    core = make_core(CoreKnobs(backend, page_size=4, stages=stages, max_running=6, seed=3))
    (second, *behind), calls = core.engine.stages.later, 0

    def faulty(*args):  # noqa: ANN002, ANN202
        nonlocal calls
        calls += 1
        if calls == 9:
            raise RuntimeError("injected")
        return second(*args)

    core.engine.stages.later = (faulty, *behind)
    jobs = [job(rid, 9, 20) for rid in range(6)]
    outcome = run_local(core, jobs)
    assert core.loop.num_failed_steps == 1
    assert_streams(jobs, outcome)
    assert_whole(core)
    core.close()


def test_a_pipeline_hands_over_to_a_pipeline() -> None:
    pair = make_pair(CoreKnobs("simulated", page_size=4, num_pages=150, stages=2, seed=4))
    jobs = draw_jobs(random.Random(4), 12, max_prompt=60)
    assert_streams(jobs, run_pair(pair, jobs, retract_every=9))
    pair.close()


@pytest.mark.parametrize("window", [0, 6])
def test_two_stages_compute_what_one_model_does(window: int) -> None:
    core = make_core(CoreKnobs("inline", page_size=4, stages=2, window=window, chunk_size=7))
    one = replace(job(1, 40, 10), window=window)
    outcome = run_local(core, [one])
    assert outcome.streams["r1"] == reference_stream(one.prompt, one.sampling, one.seed, 10, window=window)
    core.close()


def test_there_is_a_stream_for_each_stage() -> None:
    model, settings = HashLM(), SchedSettings(page_size=4, max_context=64)
    with pytest.raises(ConfigError, match="2 stages on 1 streams"):
        assemble_core(model, make_streams("inline"), settings, CoreSizes(20, 2), stages=split(model))
    assert np.all([stream.name for stream in make_streams("inline", num_stages=3).stages] == ["stage1", "stage2"])
